"""A corpus's index and chunk caches: apply a change, compute what is missing, delete what is no longer used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from blend.chunks.library import ChunkLibrary, Tokens, Variant
from blend.corpora import corpora, index_dir
from blend.corpus import Corpus, CorpusChange, PreparedCorpus, plan_change, prepare
from blend.errors import ConfigError, StoreError
from blend.prompt import PromptTemplate
from blend.serve.failures import log_failure, reason_of
from blend.serve.learned import removed_from
from blend.serve.uploads import UploadQueue, part_of
from blend.types import Progress, no_progress
from blend_retrieval import Document
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import ChunkIndex

PIECE = 32  # caches that are computed between two looks at what is still wanted

DocumentState = Literal["queued", "reading", "indexing", "computing", "ready", "failed"]
OnDone = Callable[[Variant, Exception | None], None]


class Computing(Protocol):
    """Caches that are being computed."""

    def cancel(self) -> None:
        """Compute no more than has begun. Any thread may call it, any number of times."""


class NothingComputing:
    """Nothing is being computed."""

    def cancel(self) -> None:
        """Does nothing."""


Compute = Callable[[ChunkLibrary, Sequence[Variant], OnDone], Computing]
"""Computes and stores caches, in any thread; reports each when it is stored, or the error."""

GiveUp = Callable[[], bool]
CalibrateCorpus = Callable[[Sequence[Tokens], bool, GiveUp], bool]
"""Measures the KV corrections on these chunks: the missing ones, or all anew. False if it gave up."""


def compute_here(library: ChunkLibrary, variants: Sequence[Variant], on_done: OnDone) -> Computing:
    """Compute caches one after another in the calling thread; the error of one does not stop the others."""
    for one in variants:
        try:
            library.compute([one])
        except Exception as error:
            on_done(one, error)
        else:
            on_done(one, None)
    return NothingComputing()


def current_index(rag: Rag) -> ChunkIndex | None:
    """The index of the corpus as it is now; None before its first document."""
    try:
        return rag.index
    except (IndexMissingError, ConfigError):  # the latter if the store has other corpora only
        return None


class AppliedChange(NamedTuple):
    """A corpus after a change. chunks: token ids of each document's chunks."""

    chunks: dict[str, frozenset[Tokens]]
    prepared: PreparedCorpus


class _WatchedTemplate(PromptTemplate):
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

    uploads: remembers the chunks whose caches are to go, for the case that the process dies first.
    """

    def __init__(self, rag: Rag, uploads: UploadQueue) -> None:
        self._rag, self._uploads = rag, uploads
        self._known: dict[str, Tokens] = {}

    def require_store(self) -> None:
        """Raise `StoreError` if the store cannot be read."""
        _ = self._rag.store.generation

    def documents(self) -> set[str]:
        """Ids of the documents in the index."""
        index = current_index(self._rag)
        return {chunk.document_id for chunk in index.chunks} if index else set()

    def apply(self, documents: Sequence[Document], removed: Sequence[str], progress: Progress) -> AppliedChange:
        """Add documents to the index, replacing those with their ids, and take removed uploads out.

        Caches of what went remain until `forget`. progress: also called before each text is tokenised. Raises `RetrievalError`,
        `StoreError`, and what `progress` raises; the index is then unchanged.
        """
        change = self._plan(documents, removed, progress)
        if removed:  # first, because a full disk needs the room; `forget` retries what fails
            with suppress(StoreError):
                self._free(change)
        # Written first: a process that dies behind the new index would not know what to delete.
        self._uploads.write_gone({*self._uploads.gone(), *change.gone}.difference(change.ids))
        prepared = prepare(change, progress=progress)
        self._known = {chunk.id: change.corpus.token_ids(chunk) for chunk in change.chunks}
        if before := removed_from(self._rag.store):
            library = prepared.library
            before.allow(map(library.key, library.variants(change.ids)))
        self._rag.store.advance()
        chunks: dict[str, set[Tokens]] = {}
        for chunk in change.chunks:
            chunks.setdefault(chunk.document_id, set()).add(change.corpus.token_ids(chunk))
        return AppliedChange({name: frozenset(own) for name, own in chunks.items()}, prepared)

    def free(self, removed: str) -> None:
        """Delete the caches of an upload that is to leave the index, without writing anything. Raises `StoreError`."""
        self._free(self._plan((), [removed]))

    def forget(self, chunks: Collection[Tokens], library: ChunkLibrary, current: Collection[Tokens]) -> None:
        """Delete the caches of these chunks and of those that left earlier, except current and shared ones.

        Running prompts keep the entries that they opened, and write none of these again. Raises `StoreError`; what is left is
        then remembered.
        """
        gone = tuple({*self._uploads.gone(), *chunks}.difference(current))
        self._uploads.write_gone(gone)
        self._free(CorpusChange(self._corpus(), library, (), (), gone))
        self._uploads.write_gone(())

    def _free(self, change: CorpusChange) -> None:
        removed_from(self._rag.store).add(change.spare)
        change.forget()

    def _plan(
        self, documents: Sequence[Document], removed: Sequence[str], progress: Progress = no_progress
    ) -> CorpusChange:
        def stays(document: str) -> bool:
            return not any(part_of(document, upload) for upload in removed)

        return plan_change(self._corpus(progress), documents, stays=stays, progress=progress)

    def _corpus(self, progress: Progress = no_progress) -> Corpus:
        rag, config = self._rag, self._rag.corpus_config
        template = _WatchedTemplate(rag.template, progress)
        others = {name: index_dir(rag.root, name) for name in corpora(rag.root) if name != config.name}
        return Corpus(rag.decoder, template, rag.embedder, rag.store, rag.index_dir, config, others, self._known)


class CacheProgress(NamedTuple):
    """Progress of a document's caches, in tokens. reason: why one could not be computed, or empty."""

    state: DocumentState
    done: int
    total: int
    reason: str = ""


class CacheTable:
    """The caches of a corpus: stored, missing, being computed or failed. The owner's lock guards it.

    A ready document stays ready while its chunks stay, even if they get further caches.
    """

    def __init__(self) -> None:
        self.library: ChunkLibrary | None = None
        self._of: dict[str, frozenset[Variant]] = {}
        self._chunks: dict[str, frozenset[Tokens]] = {}
        self._owners: dict[Tokens, list[str]] = {}
        self._all: frozenset[Variant] = frozenset()
        self._missing: dict[Variant, None] = {}
        self._failed: dict[Variant, str] = {}
        self._ready: set[str] = set()
        self._computing: set[Variant] = set()

    def replace(
        self,
        library: ChunkLibrary,
        chunks: Mapping[str, frozenset[Tokens]],
        variants: Sequence[Variant],
        missing: Sequence[Variant],
    ) -> bool:
        """The corpus changed. chunks: of each document. variants, missing: see `blend.corpus.PreparedCorpus`.

        Returns whether caches are being computed that are no longer wanted.
        """
        of_chunk: dict[Tokens, list[Variant]] = {}
        for one in variants:
            of_chunk.setdefault(one.chunk, []).append(one)
        self._ready = {name for name in self._ready if self._chunks[name] == chunks.get(name)}
        self.library, self._chunks, self._all = library, dict(chunks), frozenset(variants)
        self._of = {
            name: frozenset(one for ids in own for one in of_chunk.get(ids, ())) for name, own in chunks.items()
        }
        self._owners = {}
        for name, own in chunks.items():
            for ids in own:
                self._owners.setdefault(ids, []).append(name)
        self._missing, self._failed = dict.fromkeys(missing), {}
        self._mark_ready(self._of)
        if self._computing <= self._all:
            return False
        self._computing = set()
        return True

    def piece(self) -> list[Variant]:
        """The next caches to compute; none while others are being computed."""
        if self._computing:
            return []
        found = list(islice(self._missing, PIECE))
        self._computing = set(found)
        return found

    def done(self, one: Variant, error: Exception | None) -> bool:
        """A cache is stored, or failed. False if its chunk has left the corpus."""
        self._computing.discard(one)
        if one not in self._all:
            return one.chunk in self._owners
        self._missing.pop(one, None)
        if error is not None:
            self._failed[one] = reason_of(error)
        self._mark_ready(self._owners.get(one.chunk, ()))
        return True

    def retry(self) -> None:
        """Count failed caches as missing again."""
        self._missing |= dict.fromkeys(self._failed)
        self._failed = {}

    @property
    def chunks(self) -> list[Tokens]:
        """The chunks of all documents, each once."""
        return list(self._owners)

    @property
    def count(self) -> int:
        """How many caches the corpus should have."""
        return len(self._all)

    @property
    def failed(self) -> bool:
        """Whether some could not be computed."""
        return bool(self._failed)

    @property
    def idle(self) -> bool:
        """Whether none is being computed."""
        return not self._computing

    @property
    def complete(self) -> bool:
        """Whether none is missing and none is being computed."""
        return not (self._missing or self._computing)

    def knows(self, documents: Collection[str]) -> bool:
        """Whether these are the documents."""
        return self._of.keys() == set(documents)

    def progress(self, document: str) -> CacheProgress | None:
        """The progress of a document; None for an unknown one."""
        own = self._of.get(document)
        if own is None:
            return None
        total = sum(len(one.chunk) for one in own)
        if document in self._ready:
            return CacheProgress("ready", total, total)
        done = sum(len(one.chunk) for one in own if one not in self._missing and one not in self._failed)
        reason = next((self._failed[one] for one in own if one in self._failed), "")
        return CacheProgress("failed" if reason else "computing", done, total, reason)

    def _mark_ready(self, documents: Iterable[str]) -> None:
        for name in documents:
            if not any(one in self._missing or one in self._failed for one in self._of[name]):
                self._ready.add(name)


class CacheBuilder:
    """Has the missing caches of a corpus computed piece by piece, then calibrates.

    The corpus's thread calls `change`, `forget` and `step`; `changed` guards what it shares with others.
    interrupted: whether that thread has more urgent work than calibration. table: what is missing.
    """

    def __init__(
        self,
        updater: CorpusUpdater,
        compute: Compute,
        calibrate: CalibrateCorpus | None,
        changed: threading.Condition,
        interrupted: GiveUp,
    ) -> None:
        self._updater, self._compute, self._calibrate, self._changed = updater, compute, calibrate, changed
        self._interrupted, self._anew = interrupted, False
        self.table = CacheTable()
        self._handle: Computing = NothingComputing()
        self._strays: list[Tokens] = []  # chunks whose caches were stored after they had left
        self._computed, self._settled = 0, True

    @property
    def due(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._strays) or (self.table.idle and not (self.table.complete and self._settled))

    @property
    def quiet(self) -> bool:
        """Whether everything possible is computed and nothing is left to delete."""
        return not self._strays and self.table.complete and self._settled

    def cancel(self) -> None:
        """Stop computing."""
        with self._changed:
            handle = self._handle
        handle.cancel()

    def change(self, applied: AppliedChange) -> None:
        """The corpus changed."""
        chunks, prepared = applied
        with self._changed:
            stale = self.table.replace(prepared.library, chunks, prepared.variants, prepared.missing)
            self._settled = False
        if stale:  # outside the lock: a computing thread may wait for it
            self.cancel()

    def step(self) -> None:
        """Delete stray caches, or start the next piece, or calibrate when all caches exist."""
        if self._strays:
            self.forget()
            return
        with self._changed:
            piece, library = self.table.piece(), self.table.library
        if library is None:
            return
        if not piece:
            self._settle()
            return
        try:
            handle = self._compute(library, piece, self._on_done)
        except Exception as error:  # the engine accepts nothing more, or has ended
            for one in piece:
                self._on_done(one, error)
        else:
            with self._changed:
                self._handle = handle

    def forget(self) -> None:
        """Delete the caches of chunks that left, including those stored since. Raises `StoreError`."""
        with self._changed:
            strays, self._strays = self._strays, []
            library, current = self.table.library, self.table.chunks
        if library is not None:
            self._updater.forget(strays, library, current)

    def _on_done(self, one: Variant, error: Exception | None) -> None:
        with self._changed:
            if error is not None and not self.table.failed:  # once: a full store fails thousands
                log_failure(error)
            self._computed += error is None
            if not self.table.done(one, error):
                self._strays.append(one.chunk)
            self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            current = self.table.chunks
            self._anew = self._anew or 2 * self._computed > self.table.count
            self._computed, done = 0, True
        try:
            if self._calibrate is not None:
                done = self._calibrate(current, self._anew, self._interrupted)
        finally:
            with self._changed:
                self._settled, self._anew = done, self._anew and not done
                self._changed.notify_all()
