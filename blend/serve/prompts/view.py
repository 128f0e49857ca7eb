"""A corpus as one request sees it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from blend.errors import PromptError
from blend.serve.documents.uploads import part_of, spellings
from blend.serve.prompt import Cited, SourceKind
from blend.types import Place
from blend_retrieval import Chunk, Retriever

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import ChunkIndex


class CorpusView:
    """A corpus as one request sees it: everything that asks for its chunks gets the same ones.

    Args:
        rag: the corpus.
        index: its chunks and their vectors; None if they could not be read.
        failure: why not.
        hidden: uploads not to answer from, though the index may still hold them.

    """

    def __init__(
        self,
        rag: Rag,
        index: ChunkIndex | None,
        failure: Exception | None,
        hidden: frozenset[str],
    ) -> None:
        self._rag = rag
        self._index = index
        self._failure = failure
        self.hidden = hidden

    @property
    def version(self) -> tuple[object, frozenset[str]]:
        """Equal for two views of the same chunks."""
        return self._index, self.hidden

    @cached_property
    def chunks(self) -> Sequence[Chunk]:
        """Its chunks without those of hidden uploads; none if they could not be read."""
        chunks = self._index.chunks if self._index is not None else ()
        return [chunk for chunk in chunks if not self._hides(chunk.document_id)] if self.hidden else chunks

    def retrieved(self, questions: Sequence[str], top_k: int) -> list[Cited]:
        """The chunks that are most similar to the last question and, with less weight, to those before it.

        Raises `PromptError` if it holds no chunks, and what prevented reading them.
        """
        if self._index is None:
            assert self._failure is not None
            raise self._failure
        rag = self._rag
        retriever = Retriever(self._index, rag.embedder, rag.corpus_config.min_score, rag.reranker)
        skip = self._hides if self.hidden else None
        hits = retriever.search(questions[-1], top_k, skip, before=questions[:-1])
        if not hits and not self.chunks:
            raise PromptError("the corpus holds no chunks; add documents first")
        return [self._cited(hit.chunk, "retrieved", hit.score) for hit in hits]

    def document(self, name: str) -> list[Cited]:
        """The chunks of a document; none if it is unknown."""
        for spelling in spellings(name):
            if chunks := [chunk for chunk in self.chunks if part_of(chunk.document_id, spelling)]:
                return [self._cited(chunk, "document") for chunk in chunks]
        return []

    def _hides(self, document: str) -> bool:
        return any(part_of(document, upload) for upload in self.hidden)

    def _cited(self, chunk: Chunk, kind: SourceKind, score: float | None = None) -> Cited:
        place = Place(self._rag.template.chunk_ids(chunk))
        return Cited(place, kind, chunk.id, chunk.document_id, chunk.title, chunk.text, score)
