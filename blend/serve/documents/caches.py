"""A corpus's index and chunk caches: apply a change, compute what is missing, delete what is no longer used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from blend.chunks.library import ChunkLibrary
from blend.corpus import Corpus, CorpusChange, DividedDocuments, PreparedCorpus, plan_change, prepare, render_passage
from blend.errors import ConfigError, StoreError
from blend.prompt import PromptTemplate
from blend.serve.documents.queue import CacheProgress, UploadQueue
from blend.serve.documents.uploads import part_of
from blend.serve.engine.background import Compute, EncodingTask
from blend.serve.failures import log_failure, reason_of
from blend.serve.removed import removed_from
from blend.types import CacheKey, Progress, Tokens, no_progress
from blend_retrieval import Document, divide_in_steps, passage_text
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from blend.rag import Rag
    from blend_retrieval import Chunk, ChunkIndex

EMBEDDED_AT_ONCE = 32  # chunks
PIECE = 32  # caches that are computed before changes of the corpus are looked for

CalibrateCorpus = Callable[[Sequence[Tokens], bool, Callable[[], bool]], bool]
"""Measures the KV corrections on these chunks: the missing ones, or all anew; asks whether to give up. False if it did."""

ChunksOf = Mapping[str, frozenset[Tokens]]
"""Token ids of each document's chunks."""


def current_index(rag: Rag) -> ChunkIndex | None:
    """The index of the corpus as it is now; None before its first document."""
    try:
        return rag.index
    except (IndexMissingError, ConfigError):  # the latter if the store has other corpora only
        return None


class WatchedTemplate(PromptTemplate):
    """Reports progress before every text that it tokenises: splitting a long document tokenises thousands."""

    def __init__(self, template: PromptTemplate, progress: Progress) -> None:
        self.__dict__.update(template.__dict__)
        self._progress = progress

    def encode(self, text: str) -> list[int]:
        """As the template does."""
        self._progress("chunk", 0, 0)
        return super().encode(text)


class CorpusUpdater:
    """Applies changes to the index of one corpus; one thread uses it.

    uploads: records the chunks whose caches must be deleted, in case the process dies first. on_gone: deletes other data of
    these texts.
    """

    def __init__(
        self, rag: Rag, uploads: UploadQueue, on_gone: Callable[[Collection[Tokens]], None] = lambda texts: None
    ) -> None:
        self._rag = rag
        self._uploads = uploads
        self._on_gone = on_gone
        self._known: dict[str, Tokens] = {}
        self._applied: CorpusChange | None = None

    def require_store(self) -> None:
        """Raise `StoreError` if the store cannot be read."""
        _ = self._rag.store.generation

    def documents(self) -> set[str]:
        """Ids of the documents in the index."""
        index = current_index(self._rag)
        return {chunk.document_id for chunk in index.chunks} if index else set()

    def divide(self, documents: Sequence[Document]) -> Generator[None, None, DividedDocuments]:
        """Divide documents, and tokenise and embed their new chunks; pauses often. Raises `RetrievalError`."""
        corpus = self._corpus(no_progress)
        chunks: list[Chunk] = []
        for document in documents:
            chunks += yield from divide_in_steps(
                document, corpus.template.encode, corpus.config.chunk_tokens, render_passage
            )
        index = current_index(self._rag)
        indexed = {chunk.id for chunk in index.chunks} if index else set[str]()
        new = [chunk for chunk in chunks if chunk.id not in indexed]
        tokens: dict[str, Tokens] = {}
        for chunk in new:
            tokens[chunk.id] = corpus.token_ids(chunk)
            yield
        vectors: dict[str, npt.NDArray[np.float32]] = {}
        for start in range(0, len(new), EMBEDDED_AT_ONCE):
            batch = new[start : start + EMBEDDED_AT_ONCE]
            texts = [passage_text(chunk) for chunk in batch]
            vectors |= zip((chunk.id for chunk in batch), corpus.embedder().embed(texts), strict=True)
            yield
        return DividedDocuments(frozenset(document.id for document in documents), chunks, vectors, tokens)

    def apply(
        self, documents: DividedDocuments, removed: Sequence[str], progress: Progress
    ) -> tuple[ChunksOf, PreparedCorpus]:
        """Add documents to the index, replacing those with the same ids, and remove uploads.

        Caches of removed chunks remain until `forget`. progress: also called before each text is tokenised. Raises
        `RetrievalError`, `StoreError`, and what `progress` raises; after an error, apply the same change again.
        """
        change = self._plan(documents, removed, progress)
        gone = {*self._uploads.gone(), *change.gone}.difference(change.ids)
        change = replace(change, gone=tuple(gone))
        if removed:  # first, because a full disk needs the room; `forget` retries what fails
            with suppress(StoreError):
                self._delete(change)
        # Written first: a process that dies after writing the new index would not know what to delete.
        self._uploads.write_gone(change.gone)
        prepared = prepare(change, progress=progress)
        self._known = {chunk.id: change.corpus.token_ids(chunk) for chunk in change.chunks}
        library = prepared.library
        keys = map(library.key, library.variants(change.ids))
        removed_from(self._rag.store).allow(keys)
        self._rag.store.advance()
        self._applied = change
        chunks: dict[str, set[Tokens]] = {}
        for chunk in change.chunks:
            chunks.setdefault(chunk.document_id, set()).add(change.corpus.token_ids(chunk))
        return {name: frozenset(texts) for name, texts in chunks.items()}, prepared

    def forget(self) -> None:
        """Delete the caches of removed chunks. Raises `StoreError` and OSError; the next change then tries again."""
        if self._applied is not None:
            self._delete(self._applied)
            self._uploads.write_gone(())

    def free(self, removed: str) -> None:
        """Delete the caches of an upload that is to leave the index, without writing anything. Raises `StoreError`."""
        self._delete(self._plan(DividedDocuments(), [removed]))

    def _delete(self, change: CorpusChange) -> None:
        """Delete the caches of removed chunks. Running prompts keep those that they opened, and write none again."""
        spare = change.corpus.spare(change.gone)
        removed_from(self._rag.store).add(spare)
        for key in spare:
            self._rag.store.delete(key)
        self._on_gone(change.gone)

    def _plan(
        self, documents: DividedDocuments, removed: Sequence[str], progress: Progress = no_progress
    ) -> CorpusChange:
        return plan_change(
            self._corpus(progress),
            documents,
            stays=lambda document: not any(part_of(document, upload) for upload in removed),
        )

    def _corpus(self, progress: Progress) -> Corpus:
        template = WatchedTemplate(self._rag.template, progress)
        return replace(self._rag.corpus(), template=template, known=self._known)


class CorpusCaches:
    """The caches that a corpus should have: computes the missing ones piece by piece, then calibrates.

    A ready document stays ready while its chunks stay, even if they get further caches.
    The corpus's thread calls `reset` and `step`; `changed` guards all else.
    interrupted: whether that thread has more urgent work than calibration.
    """

    def __init__(
        self,
        compute: Compute,
        calibrate: CalibrateCorpus | None,
        changed: threading.Condition,
        interrupted: Callable[[], bool],
    ) -> None:
        self._compute = compute
        self._calibrate = calibrate
        self._changed = changed
        self._interrupted = interrupted
        self._library: ChunkLibrary | None = None
        self._chunks: ChunksOf = {}
        self._ready: set[str] = set()
        self._variants: dict[Tokens, list[CacheKey]] = {}
        self._missing: dict[CacheKey, None] = {}
        self._failed: dict[CacheKey, str] = {}
        self._computing: set[CacheKey] = set()
        self._task: EncodingTask | None = None
        self._computed = 0
        self._settled = True
        self._anew = False
        self._documents_of: dict[Tokens, list[str]] = {}
        self._all_changed = False
        self._changed_documents = set[str]()

    @property
    def due(self) -> bool:
        """Whether `step` has something to do."""
        return not self._computing and (bool(self._missing) or not self._settled)

    @property
    def quiet(self) -> bool:
        """Whether everything possible is computed."""
        return not self._computing and not self.due

    @property
    def documents(self) -> Collection[str]:
        """Ids of the documents in the index."""
        return self._chunks.keys()

    def holds(self, documents: Collection[str]) -> bool:
        """Whether the corpus has exactly these documents."""
        return self._chunks.keys() == set(documents)

    def progress_of(self, documents: Iterable[str]) -> dict[str, CacheProgress]:
        """How far the caches of these documents are, by their ids; without unknown ones."""
        return {name: self._progress(name) for name in documents if name in self._chunks}

    def _progress(self, document: str) -> CacheProgress:
        variants = self._of(document)
        unfinished = [] if document in self._ready else self._unfinished(variants)
        total = _tokens(variants)
        reasons = (self._failed[variant] for variant in unfinished if variant in self._failed)
        return CacheProgress(total - _tokens(unfinished), total, next(reasons, ""))

    @property
    def is_noted(self) -> bool:
        """Whether `unnoted` has nothing to tell."""
        return not (self._all_changed or self._changed_documents)

    def unnoted(self) -> tuple[dict[str, CacheProgress], bool]:
        """The progress that changed since the last call, and whether it is that of all documents."""
        progress = self.progress_of(self._chunks if self._all_changed else self._changed_documents)
        everything = self._all_changed
        self._all_changed = False
        self._changed_documents = set()
        return progress, everything

    def _of(self, document: str) -> list[CacheKey]:
        return [variant for ids in self._chunks[document] for variant in self._variants.get(ids, ())]

    def _unfinished(self, variants: Sequence[CacheKey]) -> list[CacheKey]:
        return [variant for variant in variants if variant in self._missing or variant in self._failed]

    def reset(self, chunks: ChunksOf, prepared: PreparedCorpus) -> None:
        """Take in a changed corpus."""
        with self._changed:
            unchanged = [name for name, texts in self._chunks.items() if texts == chunks.get(name)]
            self._ready = {name for name in unchanged if name in self._ready or not self._unfinished(self._of(name))}
            self._library = prepared.library
            self._chunks = chunks
            self._variants = {}
            for variant in prepared.variants:
                self._variants.setdefault(variant.chunk, []).append(variant)
            self._missing = dict.fromkeys(prepared.missing)
            self._failed = {}
            self._settled = False
            self._all_changed = True
            self._documents_of = {}
            for name, texts in chunks.items():
                for tokens in texts:
                    self._documents_of.setdefault(tokens, []).append(name)
            stale = not self._computing <= set(prepared.variants)
            if stale:
                self._computing = set()
        if stale:  # outside the lock: a computing thread may wait for it
            self.cancel()

    def retry(self) -> None:
        """Count failed caches as missing again."""
        self._all_changed = self._all_changed or bool(self._failed)
        self._missing |= dict.fromkeys(self._failed)
        self._failed = {}

    def cancel(self) -> None:
        """Stop computing."""
        if self._task is not None:
            self._task.cancel()

    def step(self) -> None:
        """Queue the next missing caches, or calibrate if none is missing; does nothing while earlier ones are computed."""
        with self._changed:
            if not self.due:
                return
            library = self._library
            piece = list(islice(self._missing, PIECE))
            self._computing = set(piece)
        if not piece:
            self._settle()
        elif library is not None:
            try:
                self._task = self._compute(library, piece, self._on_done)
            except Exception as error:  # the engine accepts nothing more, or has ended
                for variant in piece:
                    self._on_done(variant, error)

    def _on_done(self, variant: CacheKey, error: Exception | None) -> None:
        with self._changed:
            self._computing.discard(variant)
            is_missing = variant in self._missing
            self._missing.pop(variant, None)
            self._changed_documents.update(self._documents_of.get(variant.chunk, ()))
            if error is None:
                self._computed += 1
            elif is_missing:
                if not self._failed:  # once: a full store fails thousands
                    log_failure(error)
                self._failed[variant] = reason_of(error)
            self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            current = list(self._variants)
            total = sum(map(len, self._variants.values()))
            self._anew = self._anew or 2 * self._computed > total
            self._computed = 0
            settled = True
        try:
            if self._calibrate is not None:
                settled = self._calibrate(current, self._anew, self._interrupted)
        finally:
            with self._changed:
                self._settled = settled
                self._anew = self._anew and not settled
                self._changed.notify_all()


def _tokens(variants: Iterable[CacheKey]) -> int:
    return sum(len(variant.chunk) for variant in variants)
