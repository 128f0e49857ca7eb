"""What a change of documents does to a corpus's index and caches; one thread does it, in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.library import ChunkLibrary, Tokens
from blend.corpora import corpora, index_dir
from blend.corpus import Corpus, CorpusChange, PreparedCorpus, plan_change, prepare
from blend.errors import ConfigError, StoreError
from blend.prompt import PromptTemplate
from blend.serve.removed import removed_from
from blend.serve.spool import Spool
from blend.serve.uploads import part_of
from blend.timing import Progress, no_progress
from blend_retrieval import Document
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import ChunkIndex


class Applied(NamedTuple):
    """A corpus after a change. chunks: token ids of each document's chunks."""

    chunks: dict[str, frozenset[Tokens]]
    prepared: PreparedCorpus


def current_index(rag: Rag) -> ChunkIndex | None:
    """The chunks of the corpus as they are now, None where it has never had any."""
    try:
        return rag.index
    except (IndexMissingError, ConfigError):  # the latter where the store has other corpora
        return None


class _Watched(PromptTemplate):
    """A template that tells of every text before it tokenises it: dividing a long document does so thousands of times."""

    def __init__(self, template: PromptTemplate, progress: Progress) -> None:
        self.__dict__.update(template.__dict__)
        self._progress = progress

    def encode(self, text: str) -> list[int]:
        """As the template does."""
        self._progress("chunk", 0, 0)
        return super().encode(text)


class CorpusKeeper:
    """Of the corpus of `rag`. spool: remembers chunks whose caches are to go, should the process end before they do."""

    def __init__(self, rag: Rag, spool: Spool) -> None:
        self._rag, self._spool = rag, spool
        self._known: dict[str, Tokens] = {}

    def require_store(self) -> None:
        """Raise `StoreError` where the store cannot be read: nothing that the corpus seems to lack is missing then."""
        _ = self._rag.store.generation

    def documents(self) -> set[str]:
        """Ids of those that the index holds."""
        index = current_index(self._rag)
        return {chunk.document_id for chunk in index.chunks} if index else set()

    def apply(self, documents: Sequence[Document], removed: Sequence[str], progress: Progress) -> Applied:
        """Put documents into the index in place of those with their ids, and take the removed uploads out.

        The caches of what went are still there: `forget` is to follow. progress: is also called before every text that is
        tokenised. Raises `RetrievalError`, `StoreError`, and what `progress` raises; the index is then as it was.
        """
        change = self._plan(documents, removed, progress)
        if removed:  # first, as a full disk needs the room; what cannot be removed now is left to `forget`
            with suppress(StoreError):
                self._free(change)
        # First on disk: a process that ends behind the new index would not know what to remove.
        self._spool.write_gone({*self._spool.gone(), *change.gone}.difference(change.ids))
        prepared = prepare(change, progress=progress)
        self._known = {chunk.id: change.corpus.token_ids(chunk) for chunk in change.chunks}
        if before := removed_from(self._rag.store):
            library = prepared.library
            before.allow(map(library.key, library.variants(change.ids)))
        self._rag.store.advance()
        return Applied(_by_document(change), prepared)

    def free(self, removed: str) -> None:
        """Remove the caches of an upload that is to leave the index, with nothing written before. Raises `StoreError`."""
        self._free(self._plan((), [removed]))

    def forget(self, chunks: Collection[Tokens], library: ChunkLibrary, current: Collection[Tokens]) -> None:
        """Remove the caches of these chunks and of those that went before, unless they are current or others use them.

        Prompts that run keep the entries that they opened, and bring none of these back. Raises `StoreError`; what is left is
        then remembered.
        """
        gone = tuple({*self._spool.gone(), *chunks}.difference(current))
        self._spool.write_gone(gone)
        self._free(CorpusChange(self._corpus(), library, (), (), gone))
        self._spool.write_gone(())

    def _free(self, change: CorpusChange) -> None:
        removed_from(self._rag.store).add(change.spare)
        change.forget()

    def _plan(
        self, documents: Sequence[Document], removed: Sequence[str], progress: Progress = no_progress
    ) -> CorpusChange:
        corpus = self._corpus(progress)
        return plan_change(corpus, documents, stays=lambda name: not _among(name, removed), progress=progress)

    def _corpus(self, progress: Progress = no_progress) -> Corpus:
        rag, config = self._rag, self._rag.corpus_config
        template = _Watched(rag.template, progress)
        others = {name: index_dir(rag.root, name) for name in corpora(rag.root) if name != config.name}
        return Corpus(rag.decoder, template, rag.embedder, rag.store, rag.index_dir, config, others, self._known)


def _among(document: str, uploads: Sequence[str]) -> bool:
    return any(part_of(document, upload) for upload in uploads)


def _by_document(change: CorpusChange) -> dict[str, frozenset[Tokens]]:
    found: dict[str, set[Tokens]] = {}
    for chunk in change.chunks:
        found.setdefault(chunk.document_id, set()).add(change.corpus.token_ids(chunk))
    return {name: frozenset(mine) for name, mine in found.items()}
