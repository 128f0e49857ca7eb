"""A corpus's index and chunk caches: apply a change, compute what is missing, delete what is no longer used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from blend.chunks.library import ChunkLibrary
from blend.corpus import CorpusChange, PreparedCorpus, plan_change, prepare
from blend.errors import ConfigError, StoreError
from blend.prompt import PromptTemplate
from blend.serve.background import Compute, EncodingTask
from blend.serve.failures import log_failure, reason_of
from blend.serve.learned import removed_from
from blend.serve.uploads import DocumentState, DocumentStatus, UploadQueue, part_of
from blend.types import CacheKey, Progress, Tokens, no_progress
from blend_retrieval import Document
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import ChunkIndex

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
        self, rag: Rag, uploads: UploadQueue, on_gone: Callable[[Collection[Tokens]], None] = lambda gone: None
    ) -> None:
        self._rag, self._uploads, self._on_gone = rag, uploads, on_gone
        self._known: dict[str, Tokens] = {}
        self._applied: CorpusChange | None = None

    def require_store(self) -> None:
        """Raise `StoreError` if the store cannot be read."""
        _ = self._rag.store.generation

    def documents(self) -> set[str]:
        """Ids of the documents in the index."""
        index = current_index(self._rag)
        return {chunk.document_id for chunk in index.chunks} if index else set()

    def apply(
        self, documents: Sequence[Document], removed: Sequence[str], progress: Progress
    ) -> tuple[ChunksOf, PreparedCorpus]:
        """Add documents to the index, replacing those with the same ids, and remove uploads.

        Caches of removed chunks remain until `forget`. progress: also called before each text is tokenised. Raises
        `RetrievalError`, `StoreError`, and what `progress` raises; after an error, apply the same change again.
        """
        change = self._plan(documents, removed, progress)
        change = replace(change, gone=tuple({*self._uploads.gone(), *change.gone}.difference(change.ids)))
        if removed:  # first, because a full disk needs the room; `forget` retries what fails
            with suppress(StoreError):
                self._delete(change)
        # Written first: a process that dies after writing the new index would not know what to delete.
        self._uploads.write_gone(change.gone)
        prepared = prepare(change, progress=progress)
        self._known = {chunk.id: change.corpus.token_ids(chunk) for chunk in change.chunks}
        library = prepared.library
        if before := removed_from(self._rag.store):
            before.allow([library.key(variant) for variant in library.variants(change.ids)])
        self._rag.store.advance()
        self._applied = change
        chunks: dict[str, set[Tokens]] = {}
        for chunk in change.chunks:
            chunks.setdefault(chunk.document_id, set()).add(change.corpus.token_ids(chunk))
        return {name: frozenset(own) for name, own in chunks.items()}, prepared

    def forget(self) -> None:
        """Delete the caches of removed chunks. Raises `StoreError` and OSError; the next change then tries again."""
        if self._applied is not None:
            self._delete(self._applied)
            self._uploads.write_gone(())

    def free(self, removed: str) -> None:
        """Delete the caches of an upload that is to leave the index, without writing anything. Raises `StoreError`."""
        self._delete(self._plan((), [removed]))

    def _delete(self, change: CorpusChange) -> None:
        """Delete the caches of removed chunks. Running prompts keep those that they opened, and write none again."""
        spare = change.corpus.spare(change.gone)
        removed_from(self._rag.store).add(spare)
        for key in spare:
            self._rag.store.delete(key)
        self._on_gone(change.gone)

    def _plan(
        self, documents: Sequence[Document], removed: Sequence[str], progress: Progress = no_progress
    ) -> CorpusChange:
        def stays(document: str) -> bool:
            return not any(part_of(document, upload) for upload in removed)

        corpus = replace(self._rag.corpus(), template=WatchedTemplate(self._rag.template, progress), known=self._known)
        return plan_change(corpus, documents, stays=stays, progress=progress)


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
        self._compute, self._calibrate, self._changed, self._interrupted = compute, calibrate, changed, interrupted
        self._library: ChunkLibrary | None = None
        self._chunks: ChunksOf = {}
        self._ready: set[str] = set()
        self._variants: dict[Tokens, list[CacheKey]] = {}
        self._missing: dict[CacheKey, None] = {}
        self._failed: dict[CacheKey, str] = {}
        self._computing: set[CacheKey] = set()
        self._task: EncodingTask | None = None
        self._computed, self._settled, self._anew = 0, True, False

    @property
    def due(self) -> bool:
        """Whether `step` has something to do."""
        return not self._computing and (bool(self._missing) or not self._settled)

    @property
    def quiet(self) -> bool:
        """Whether everything possible is computed."""
        return not self._computing and not self.due

    def holds(self, documents: Collection[str]) -> bool:
        """Whether the corpus has exactly these documents."""
        return self._chunks.keys() == set(documents)

    def status(self, one: DocumentStatus) -> DocumentStatus | None:
        """The status of a document in the index, with its progress; None for an unknown one."""
        if one.id not in self._chunks:
            return None
        own = self._of(one.id)
        left = [] if one.id in self._ready else self._left(own)
        total, missing = (sum(len(variant.chunk) for variant in variants) for variants in (own, left))
        reason = next((self._failed[variant] for variant in left if variant in self._failed), "")
        state: DocumentState = "failed" if reason else "computing" if left else "ready"
        return one._replace(state=state, tokens_done=total - missing, tokens_total=total, reason=reason)

    def _of(self, document: str) -> list[CacheKey]:
        return [variant for ids in self._chunks[document] for variant in self._variants.get(ids, ())]

    def _left(self, variants: Sequence[CacheKey]) -> list[CacheKey]:
        return [one for one in variants if one in self._missing or one in self._failed]

    def reset(self, chunks: ChunksOf, prepared: PreparedCorpus) -> None:
        """Take in a changed corpus."""
        with self._changed:
            kept = {name for name, own in self._chunks.items() if own == chunks.get(name)}
            self._ready = {name for name in kept if name in self._ready or not self._left(self._of(name))}
            self._library, self._chunks, self._variants = prepared.library, chunks, {}
            for one in prepared.variants:
                self._variants.setdefault(one.chunk, []).append(one)
            self._missing, self._failed = dict.fromkeys(prepared.missing), {}
            self._settled = False
            stale = not self._computing <= set(prepared.variants)
            if stale:
                self._computing = set()
        if stale:  # outside the lock: a computing thread may wait for it
            self.cancel()

    def retry(self) -> None:
        """Count failed caches as missing again."""
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
            library, piece = self._library, list(islice(self._missing, PIECE))
            self._computing = set(piece)
        if not piece:
            self._settle()
        elif library is not None:
            try:
                self._task = self._compute(library, piece, self._on_done)
            except Exception as error:  # the engine accepts nothing more, or has ended
                for one in piece:
                    self._on_done(one, error)

    def _on_done(self, one: CacheKey, error: Exception | None) -> None:
        with self._changed:
            self._computing.discard(one)
            wanted = one in self._missing
            self._missing.pop(one, None)
            if error is None:
                self._computed += 1
            elif wanted:
                if not self._failed:  # once: a full store fails thousands
                    log_failure(error)
                self._failed[one] = reason_of(error)
            self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            current = list(self._variants)
            self._anew = self._anew or 2 * self._computed > sum(map(len, self._variants.values()))
            self._computed, done = 0, True
        try:
            if self._calibrate is not None:
                done = self._calibrate(current, self._anew, self._interrupted)
        finally:
            with self._changed:
                self._settled, self._anew = done, self._anew and not done
                self._changed.notify_all()
