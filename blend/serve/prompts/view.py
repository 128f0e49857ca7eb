"""A corpus as one request sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from blend.corpus import TitledText
from blend.errors import ContextLengthError, PromptError
from blend.layout import Place
from blend.serve.documents.uploads import part_of, spellings
from blend.serve.prompt import Cited, SourceKind
from blend.serve.request import GivenDocument, Request
from blend_retrieval import Chunk, Retriever
from blend_retrieval.document import clean, clean_title

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import ChunkIndex


_BLANK_LINES = re.compile(r"\n\s*\n\s*\n")  # more than one


Require = Callable[[], None]
"""Called between pieces of work; raises if the request is to be given up."""


def require_fit(tokens: int, longest: int | None) -> None:
    """Raise `ContextLengthError` if a part of a prompt already has more tokens than the model reads."""
    if longest is not None and tokens > longest:
        message = f"the prompt has more than {longest:,} tokens, all that the model reads; shorten it"
        raise ContextLengthError(message, longest)


class CorpusView:
    """A corpus as one request sees it: everything that asks for its chunks gets the same ones.

    Args:
        name: of the corpus.
        rag: the corpus.
        index: its chunks and their vectors; None if they could not be read.
        failure: why not.
        hidden: uploads not to answer from, though the index may still hold them.
        require_store: raises `StoreError` if the store cannot be read now.

    """

    def __init__(
        self,
        name: str,
        rag: Rag,
        index: ChunkIndex | None,
        failure: Exception | None,
        hidden: frozenset[str],
        require_store: Callable[[], None],
    ) -> None:
        self.name = name
        self._require_store = require_store
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

    def passages(self, request: Request, longest: int | None, require: Require) -> list[Cited]:
        """The documents that a question brings or names, and what it has retrieved. longest: prompt, in tokens."""
        passages = list[Cited]()
        for number, document in enumerate(request.documents, 1):
            require()
            if document.text.strip():
                passages.append(self._brought(document, number))
            elif document.id:
                passages += self._named(document.id)
            require_fit(sum(len(passage.place.tokens) for passage in passages), longest)
        if request.top_k is None:
            return passages
        questions = [message.content for message in request.messages if message.role == "user"]
        if not questions:
            message = "there is no message of the user's to search the corpus with; add one, or leave out retrieve"
            raise PromptError(message)
        places = {passage.place for passage in passages}
        retrieved = self.retrieved(questions, request.top_k)
        return passages + [passage for passage in retrieved if passage.place not in places]

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

    def _named(self, name: str) -> list[Cited]:
        """The chunks of a document. Raises `PromptError` for an unknown one, `StoreError` if none can be read now."""
        for spelling in spellings(name):
            if chunks := [chunk for chunk in self.chunks if part_of(chunk.document_id, spelling)]:
                return [self._cited(chunk, "document") for chunk in chunks]
        self._require_store()
        raise PromptError(f"no document of the corpus has the id {name!r}; give its text, or an id that is there")

    def _brought(self, document: GivenDocument, number: int) -> Cited:
        """A document that a question brings, in one piece."""
        text = TitledText(clean_title(document.title), _BLANK_LINES.sub("\n\n", clean(document.text)))
        place = Place(self._rag.template.chunk_ids(text))
        name = document.id or f"document {number}"
        return Cited(place, "document", document=name, title=text.title, text=text.text, brought=True)

    def _hides(self, document: str) -> bool:
        return any(part_of(document, upload) for upload in self.hidden)

    def _cited(self, chunk: Chunk, kind: SourceKind, score: float | None = None) -> Cited:
        place = Place(self._rag.template.chunk_ids(chunk))
        return Cited(place, kind, chunk.id, chunk.document_id, chunk.title, chunk.text, score)
