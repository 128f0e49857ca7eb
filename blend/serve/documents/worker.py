"""The thread of one corpus: reads uploads, updates the index, queues missing caches.

Of all servers over a corpus's folder one works, the owner of its lock; the lock ends with the process. The others stand by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from blend.corpus import DividedDocuments
from blend.errors import ConfigError, StoreError, StoreNotWritableError, first_line
from blend.files import make_private_folder
from blend.serve.documents.caches import CalibrateCorpus, CorpusCaches, CorpusUpdater
from blend.serve.documents.queue import CacheProgress, GivenUpError, QueuedUpload, SupersededError, UploadQueue
from blend.serve.documents.uploads import DocumentLimits, Upload, part_of
from blend.serve.engine.background import Compute
from blend.serve.failures import CLIENT_ERRORS, is_transient, log_failure, reason_of
from blend.serve.turns import Turns
from blend_retrieval import Document
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import IsolatedReader, StoppedError

if TYPE_CHECKING:
    from filelock import BaseFileLock

MOST_AT_ONCE = 16  # uploads that are indexed together
MOST_BYTES_AT_ONCE = 1 << 20
FIRST_RETRY_S, RETRY_S = 1.0, 30.0  # delay after a transient failure; doubles from the first to the last
LAST_S = 10.0  # how long `close` waits for the thread
LOOK_S = 0.5  # how often to look for uploads that other servers accepted, and for the owner's end
SLICE_S = 0.2  # how long an upload is worked on before others are looked for
_BREATH_S = 5e-5


@dataclass(eq=False)
class _Batch:
    """Uploads that are indexed together.

    Attributes:
        steps: reads, divides and embeds their documents; pauses often.
        readable: the uploads that could be read so far.
        removed: the uploads that are to leave the index.

    """

    uploads: Sequence[QueuedUpload]
    steps: Generator[None, None, DividedDocuments] = field(init=False)
    readable: list[QueuedUpload] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    @property
    def numbers(self) -> set[int]:
        """The numbers of its uploads."""
        return {upload.number for upload in self.uploads}


class CorpusWorker:
    """Works on one corpus: on uploads first, because indexed documents can be retrieved, then on caches.

    turns: among the corpora of all tenants, for reading and indexing. tenant: whose corpus this is.
    changed: guards `caches` and `problem`; notified at every change.
    problem: the transient failure that is being retried, in the error's words; empty without one.
    """

    def __init__(
        self,
        updater: CorpusUpdater,
        queue: UploadQueue,
        compute: Compute,
        calibrate: CalibrateCorpus | None,
        limits: DocumentLimits,
        turns: Turns,
        tenant: str,
    ) -> None:
        self._updater = updater
        self._queue = queue
        self._limit = limits.documents
        self._turns = turns
        self._tenant = tenant
        self._reader = IsolatedReader(limits.reading)
        self._look = True
        self._busy = False
        self._closed = False
        self._role: Literal["starting", "owner", "standing by"] = "starting"
        self.changed = threading.Condition()
        self.caches = CorpusCaches(compute, calibrate, self.changed, lambda: self._closed or self._waits())
        self.problem = self._undeleted = ""
        self._begun: list[_Batch] = []
        self._pause_s = 0.0
        self._resume_at = 0.0  # of uploads
        self._thread = threading.Thread(target=self._run, name="kvblend-documents", daemon=True)
        self._thread.start()

    def notice(self, *, urgent: bool = False) -> None:
        """Look at the queue. urgent: also in a pause; a deletion may free the space that others wait for."""
        with self.changed:
            if urgent:
                self._resume_at = 0.0
            self.changed.notify_all()

    def free(self, name: str) -> None:
        """Make room on a full disk: delete everything of this upload except the index. Raises `StoreError`."""
        with suppress(StoreError):
            self._queue.drop(name)
        with self.changed:
            self._look = True  # if it stays after all, its caches are computed again
        self._updater.free(name)

    def saw(self, documents: Collection[str]) -> None:
        """Compare with the documents that the index holds now. Reads it again if another process has changed it."""
        with self.changed:
            if self._role == "owner" and not self.caches.holds(documents) and not self._waits():
                self._look = True
                self.changed.notify_all()

    def progress(self) -> dict[str, CacheProgress]:
        """How far the caches of all documents are, by their ids."""
        with self.changed:
            if self._role == "owner":
                return self.caches.progress_of(self.caches.documents)
        return self._queue.progress()

    @property
    def quiet(self) -> bool:
        """Whether everything possible is indexed and computed."""
        if self._role == "starting" or self._waits():
            return False
        if self._role == "owner":
            return self.caches.quiet and self.caches.is_noted and not (self._look or self._busy)
        return all(
            progress.computed == progress.total or progress.reason for progress in self._queue.progress().values()
        )

    def close(self) -> None:
        """Stop the thread, and all that share its turns. Waits at most `LAST_S`; unfinished uploads stay on disk."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._turns.close(StoppedError)
        self.caches.cancel()
        self._reader.close()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        from filelock import FileLock

        lock = FileLock(self._queue.folder / ".owner", timeout=0, mode=0o600)
        try:
            while self._take_lock(lock) and self._wait():
                self._work()
            with suppress(StoreError):  # the next owner counts it as a try
                self._queue.put_back([upload for batch in self._begun for upload in batch.uploads])
        finally:
            lock.release(force=True)  # it counts what was acquired, also before a failure

    def _take_lock(self, lock: BaseFileLock) -> bool:
        """Wait until this server is the owner; False if it is closed first."""
        from filelock import Timeout

        while not (self._closed or self._role == "owner"):
            try:
                make_private_folder(self._queue.folder)
                lock.acquire()
                self._queue.sweep()
                with self.changed:
                    self._role = "owner"
                    self._look = True
            except Timeout:
                self._role = "standing by"
                self._report("")
            except (OSError, StoreError) as error:
                folder = self._queue.folder
                why = f"documents cannot be kept in {folder} ({getattr(error, 'strerror', None) or error})"
                self._report(first_line(error) if isinstance(error, StoreError) else why, error)
            if self._role != "owner":
                with self.changed:
                    self.changed.wait_for(lambda: self._closed, LOOK_S)
        return not self._closed

    def _wait(self) -> bool:
        """Wait until there is something to do; False if this is closed."""
        until = time.monotonic() + RETRY_S
        with self.changed:
            while not (self._closed or self._is_due()):
                self.changed.wait(LOOK_S)
                if time.monotonic() > until:
                    self.caches.retry()
                    self._look = self._look or bool(self.problem)
                    until = time.monotonic() + RETRY_S
        return not self._closed

    def _is_due(self) -> bool:
        """Whether there is something to do. The caller holds `changed`."""
        return self._look or self.caches.due or not self.caches.is_noted or (not self._is_pausing and self._waits())

    def _waits(self) -> bool:
        """Whether uploads wait; False while that cannot be read."""
        with suppress(StoreError):
            return self._queue.is_waiting()
        return False

    @property
    def _is_pausing(self) -> bool:
        return time.monotonic() < self._resume_at

    def _work(self) -> None:
        """Do what is most urgent: index a batch, look at the index, or compute caches."""
        batch: _Batch | None = None
        with self.changed:
            self._busy = True
        try:
            batch = None if self._is_pausing else self._next_batch()
            self._updater.require_store()
            self._step(batch)
        except StoppedError:  # this corpus, or all that share its turns
            self._closed = True
        except Exception as error:  # an outage of the store or the disk
            self._rest(error, uploads=batch is not None)
        else:
            self._recover(uploads=batch is not None)

    def _step(self, batch: _Batch | None) -> None:
        with self.changed:
            looking = self._look and batch is None
            self._look = self._look and not looking
        if batch is not None:
            with self._turns.place(self._tenant):
                self._index(batch)
        elif not looking:
            self.caches.step()
        elif self._updater.documents() or self._queue.gone():
            with self._turns.place(self._tenant):
                self._apply(DividedDocuments(), ())
        with self.changed:
            progress, everything = self.caches.unnoted()
        if progress or everything:
            self._queue.note_progress(progress, anew=everything)

    def _next_batch(self) -> _Batch | None:
        """The batch of the first upload that waits; None without one."""
        waiting = self._queue.waiting()
        if not waiting:
            self._begun = []
            return None
        numbers = {upload.number for upload in waiting}
        self._begun = [batch for batch in self._begun if batch.numbers & numbers]
        for batch in self._begun:
            if waiting[0].number in batch.numbers:
                return batch
        begun = set[int]().union(*(batch.numbers for batch in self._begun))
        batch = _Batch(list(_together(upload for upload in waiting if upload.number not in begun)))
        batch.steps = self._divided(batch)
        self._begun.append(batch)
        return batch

    def _recover(self, *, uploads: bool) -> None:
        """End the pause and the reported problem, after a step that succeeded."""
        with self.changed:
            self._busy = False
            if uploads:
                self._pause_s = 0.0
            if not self._is_pausing:
                self.problem = self._undeleted
            self.changed.notify_all()

    def _rest(self, error: Exception, *, uploads: bool) -> None:
        """Report a step that failed, and delay the next try. While uploads pause, caches are computed."""
        self._report(first_line(error), error)
        with self.changed:
            self._busy = False
            if uploads:
                self._pause_s = min(RETRY_S, max(FIRST_RETRY_S, 2 * self._pause_s))
                self._resume_at = time.monotonic() + self._pause_s
            else:
                self._look = True
                self.changed.wait_for(lambda: self._closed or (not self._is_pausing and self._waits()), RETRY_S)

    def _report(self, problem: str, error: Exception | None = None) -> None:
        if error is not None and problem != self.problem:
            log_failure(error if not isinstance(error, OSError) else StoreNotWritableError(problem))
        with self.changed:
            self.problem = problem
            self.changed.notify_all()

    def _index(self, batch: _Batch) -> None:
        """Go on with a batch until it is indexed or others have their turn; on a failure each upload is tried again alone.

        Raises `StoppedError`, and transient errors.
        """
        failure: Exception | None = None
        try:
            documents = self._finished(batch)
            if documents is None:
                return
            if documents.ids or self._holds(batch.removed):
                self._apply(documents, batch.removed)
        except Exception as error:  # no document may end the thread
            failure = error
        self._begun.remove(batch)
        if failure is not None:
            self._failed(batch, failure)
        else:
            for queued in batch.readable:
                self._finish(queued)

    def _finished(self, batch: _Batch) -> DividedDocuments | None:
        """The batch's documents, divided and embedded; None if a more urgent upload or another corpus waits.

        Raises `SupersededError`, and what its steps raise.
        """
        place = min(upload.place for upload in batch.uploads)
        look_at = 0.0
        while True:
            if self._closed:
                raise StoppedError
            if time.monotonic() >= look_at:
                self._queue.require(batch.uploads)
                if look_at and (self._turns.awaited or self._queue.is_urgent(place)):
                    return None
                look_at = time.monotonic() + SLICE_S
            try:
                next(batch.steps)
            except StopIteration as end:
                documents: DividedDocuments = end.value
                return documents
            time.sleep(_BREATH_S)  # yields the interpreter to answering threads: Python's switch interval is 5 ms

    def _failed(self, batch: _Batch, failure: Exception) -> None:
        """Settle the batch's only upload, or queue its uploads again. Raises the failure if no upload is at fault."""
        fault = not (is_transient(failure) or isinstance(failure, StoppedError | SupersededError))
        if fault and len(batch.uploads) == 1:
            with self.changed:
                self._look = True  # caches that are still needed may have been deleted
            self._finish(batch.uploads[0], failure)
            return
        with suppress(StoreError):  # the next try counts this one
            self._queue.put_back(batch.uploads, behind=fault or is_transient(failure))
        if not fault and not isinstance(failure, SupersededError):
            raise failure

    def _divided(self, batch: _Batch) -> Generator[None, None, DividedDocuments]:
        """Read the batch's uploads, then divide and embed their documents."""
        documents: dict[str, Document] = {}
        for queued in batch.uploads:
            self._read(batch, queued, documents)
            yield
        return (yield from self._updater.divide(list(documents.values())))

    def _read(self, batch: _Batch, queued: QueuedUpload, documents: dict[str, Document]) -> None:
        """Add an upload's documents to `documents`, or its deletion to the batch; settle it if it is faulty.

        Raises `StoppedError`, `SupersededError`, and transient errors.
        """
        try:
            upload = self._queue.take(queued)
            if upload.kind == "delete":
                batch.removed.append(upload.id)
                for name in [name for name in documents if part_of(name, upload.id)]:
                    del documents[name]
            else:
                queued, added = self._documents(queued, upload, documents)
                documents |= added
        except Exception as error:
            if is_transient(error) or isinstance(error, StoppedError | SupersededError):
                raise
            batch.uploads = [pending for pending in batch.uploads if pending.number != queued.number]
            self._finish(queued, error)
            return
        self._queue.indexing(queued)
        batch.readable.append(queued)

    def _documents(
        self, queued: QueuedUpload, upload: Upload, pending: Collection[str]
    ) -> tuple[QueuedUpload, dict[str, Document]]:
        """The documents of an upload; the upload then says what was left out of it."""
        documents: tuple[Document, ...] = ()
        if upload.kind == "text":
            documents = (Document(upload.id, upload.title, upload.data.decode(), upload.id),)
        else:
            require = partial(self._queue.require, [queued])
            documents, skipped = self._reader.read(upload.id, upload.data, upload.text_field, require)
            reasons = "; ".join(f"{part.source} {part.reason}" for part in skipped)
            if not documents:
                raise DocumentsError(reasons or f"{upload.id} holds no document")
            lost = sum(part.lost for part in skipped)
            is_read = not lost or any(document.id == upload.id for document in documents)
            reason = f"{lost:,} left out: {reasons}" if lost else reasons
            queued = queued._replace(upload=queued.upload._replace(reason=reason, is_read=is_read))
        names = self._updater.documents() | set(pending) | {document.id for document in documents}
        if len(names) > self._limit:
            raise ConfigError(f"the corpus would have {len(names):,} documents, at most {self._limit:,} are taken")
        return queued, {document.id: document for document in documents}

    def _holds(self, removed: Sequence[str]) -> bool:
        """Whether the index holds a document of these uploads."""
        return any(part_of(name, upload) for name in self._updater.documents() for upload in removed)

    def _apply(self, documents: DividedDocuments, removed: Sequence[str]) -> None:
        self.caches.reset(*self._updater.apply(documents, removed, self._on_progress))
        try:
            self._updater.forget()
            self._undeleted = ""
        except (StoreError, OSError) as error:  # the new index is in use; the next look deletes the caches
            self._undeleted = first_line(error)
            if self._undeleted != self.problem:
                log_failure(error)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        """Stop when closed, and let answering threads run."""
        if self._closed:
            raise StoppedError
        time.sleep(_BREATH_S)

    def _finish(self, queued: QueuedUpload, error: Exception | None = None) -> None:
        """Settle an upload that is indexed, or has failed for good."""
        reason = queued.upload.reason
        whole = False
        if error is not None:
            log_failure(error)
            reason = reason_of(error)
            whole = isinstance(error, GivenUpError) or not isinstance(error, CLIENT_ERRORS)
        self._queue.settle(queued, reason, failed=error is not None, whole=whole)
        self.notice()


def _together(waiting: Iterator[QueuedUpload]) -> Iterator[QueuedUpload]:
    """The first uploads that may be indexed together."""
    nbytes = 0
    for number, queued in enumerate(waiting):
        nbytes += queued.nbytes
        if number == MOST_AT_ONCE or (number and (queued.alone or nbytes > MOST_BYTES_AT_ONCE)):
            return
        yield queued
        if queued.alone:
            return
