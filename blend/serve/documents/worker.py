"""The thread of one corpus: reads uploads, updates the index, queues missing caches.

Of all servers over a corpus's folder one works, the owner of its lock; the lock ends with the process. The others stand by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from blend.errors import ConfigError, StoreError, StoreNotWritableError, first_line
from blend.files import make_private_folder, set_aside
from blend.serve.documents.batches import Batch, together
from blend.serve.documents.caches import CorpusCaches, CorpusUpdater
from blend.serve.documents.lanes import ReaderLanes
from blend.serve.documents.queue import GivenUpError, SupersededError, UploadQueue
from blend.serve.documents.upload_list import QueuedUpload
from blend.serve.documents.uploads import DocumentLimits, file_of
from blend.serve.failures import CLIENT_ERRORS, is_transient, log_failure, reason_of
from blend.serve.turns import Turns
from blend_retrieval import Document
from blend_retrieval.document import LoadedDocuments
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import BeyondLimitsError, ReadingLimits, StoppedError, load_short

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from blend.serve.documents.caches import CalibrateCorpus
    from blend.serve.engine.background import Compute

PAUSE_S = 5.0  # after a transient failure
RETRY_S = 30.0  # how often failed caches are tried again
LAST_S = 10.0  # how long `close` waits for the thread
LOOK_S = 0.5  # how often to look for uploads that other servers accepted, and for the owner's end
SLICE_S = 0.2  # how long an upload is worked on before others are looked for
_BREATH_S = 5e-5
_NO_FAULT = (StoreError, OSError, StoppedError, SupersededError)
"""Failures for which an upload that is worked on is not to blame."""


class CorpusWorker:
    """Works on one corpus: on uploads first, because indexed documents can be retrieved, then on caches.

    turns: among the corpora of all tenants, for indexing. lanes: for reading. tenant: whose corpus this is.
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
        lanes: ReaderLanes,
        tenant: str,
    ) -> None:
        self._updater = updater
        self._queue = queue
        self._limit = limits.documents
        self._turns = turns
        self._tenant = tenant
        self._lanes = lanes
        self._reading = limits.reading
        self._owner = self._look = self._closed = False
        self._working = True
        self.changed = threading.Condition()
        self.caches = CorpusCaches(compute, calibrate, self.changed, lambda: self._closed or self._is_due())
        self.problem = ""
        self._begun: list[Batch] = []
        self._noticed = False
        self._thread = threading.Thread(target=self._run, name="kvblend-documents", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Look at the queue now, also in a pause: a deletion may free space."""
        with self.changed:
            self._noticed = True
            self.changed.notify_all()

    def look(self) -> None:
        """Look at the index, which another process has changed, or at its caches."""
        with self.changed:
            self._look = self._owner
            self.changed.notify_all()

    @property
    def quiet(self) -> bool:
        """Whether this server has indexed and computed everything possible, or stands by."""
        is_due = self._working or self._waits() or (self._look and not self.problem)
        return not is_due and self.caches.quiet

    def close(self) -> None:
        """Stop the thread, and all that share its turns. Waits at most `LAST_S`; unfinished uploads stay on disk."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._turns.close(StoppedError)
        self._lanes.close(StoppedError)
        self._thread.join(LAST_S)

    def _run(self) -> None:
        from filelock import FileLock

        lock = FileLock(self._queue.folder / ".owner", timeout=0, mode=0o600)
        try:
            if self._take_lock(lock):
                while self._wait():
                    self._work()
            for batch in self._begun:
                batch.steps.close()
            with suppress(StoreError):  # the next owner counts it as a try
                self._queue.put_back([upload for batch in self._begun for upload in batch.uploads])
        finally:
            lock.release(force=True)  # it counts what was acquired, also before a failure

    def _take_lock(self, lock: BaseFileLock) -> bool:
        """Wait until this server is the owner; False if it is closed first."""
        from filelock import Timeout

        while not self._closed:
            try:
                make_private_folder(self._queue.folder)
                if Path(lock.lock_file).is_dir():
                    set_aside(Path(lock.lock_file))
                lock.acquire()
                self._queue.sweep()
                self._owner = self._look = True
                return True
            except Timeout:
                self._working = False
                self._report("")
            except StoreError as error:
                self._report(first_line(error), error)
            except OSError as error:
                self._report(f"documents cannot be kept in {self._queue.folder} ({error.strerror or error})", error)
            with self.changed:
                self.changed.wait_for(lambda: self._closed, LOOK_S)
        return False

    def _wait(self) -> bool:
        """Wait until there is something to do; False if this is closed."""
        until = time.monotonic() + RETRY_S
        with self.changed:
            self._working = False
            while not (self._closed or self._looks or self.caches.due or self._is_due()):
                self.changed.notify_all()
                self.changed.wait(LOOK_S)
                if time.monotonic() > until:
                    self._sweep()
                    self.caches.retry()
                    self._look = bool(self.problem)
                    until = time.monotonic() + RETRY_S
            self._working = True
        return not self._closed

    def _sweep(self) -> None:
        """Look for what damage and killed servers left; the next look comes if that cannot be done now."""
        with suppress(StoreError):
            self._queue.sweep()

    def _waits(self) -> bool:
        """Whether uploads wait; False while that cannot be read."""
        with suppress(StoreError):
            return self._queue.is_waiting()
        return False

    def _is_due(self) -> bool:
        """Whether an upload can be worked on, or one that is being read was superseded."""
        if not any(batch.is_reading for batch in self._begun):
            return self._waits()
        with suppress(StoreError):
            return self._first_workable(self._queue.waiting()) is not None
        return False

    @property
    def _looks(self) -> bool:
        """Whether to look at the index now; a file in its first try is indexed first."""
        return self._look and not any(batch.is_reading and not batch.is_long for batch in self._begun)

    def _notify(self) -> None:
        """Wake the thread: a file was read, or may be."""
        with self.changed:
            self.changed.notify_all()

    def _work(self) -> None:
        """Do what is most urgent: index a batch, look at the index, or compute caches. After a failure, pause."""
        try:
            batch = self._next_batch()
            self._updater.require_store()
            if batch is not None:
                with self._turns.place(self._tenant):
                    self._index(batch)
            else:
                self.caches.step()
            self._queue.note_progress(self.caches.progress())
        except StoppedError:  # this corpus, or all that share its turns
            self._closed = True
        except Exception as error:  # an outage of the store or the disk
            self._pause(first_line(error), error)

    def _pause(self, problem: str, error: Exception) -> None:
        """Report a step that failed, and delay the next try, for which the index is looked at, too."""
        self._report(problem, error)
        with self.changed:
            self._working = False
            self._noticed = False
            self._look = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._closed or self._noticed, PAUSE_S)

    def _report(self, problem: str, error: Exception | None = None) -> None:
        if error is not None and problem != self.problem:
            log_failure(error if not isinstance(error, OSError) else StoreNotWritableError(problem))
        with self.changed:
            self.problem = problem
            self.changed.notify_all()

    def _next_batch(self) -> Batch | None:
        """The batch of the first upload that can be worked on, or one that looks at the index; None without either."""
        waiting = self._queue.waiting()
        numbers = {upload.number for upload in waiting}
        for batch in self._begun:
            if not numbers & batch.numbers:
                batch.steps.close()
        self._begun = [batch for batch in self._begun if numbers & batch.numbers]
        workable = self._first_workable(waiting)
        if isinstance(workable, Batch):
            return workable
        if workable is None and not self._looks:
            return None
        self._look = self._look and workable is not None
        batch = Batch(list(together(filter(self._can_begin(), waiting))))
        batch.steps = self._steps(batch)
        self._begun.append(batch)
        return batch

    def _first_workable(self, waiting: Sequence[QueuedUpload]) -> Batch | QueuedUpload | None:
        """A batch whose uploads were superseded, or the first upload that can be worked on, as its batch if that has begun."""
        numbers = {upload.number for upload in waiting}
        for batch in self._begun:
            if not batch.numbers <= numbers:
                return batch
        batch_of = {number: batch for batch in self._begun for number in batch.numbers}
        can_begin = self._can_begin()
        for queued in waiting:
            begun = batch_of.get(queued.number)
            if begun is not None and not begun.is_reading:
                return begun
            if begun is None and can_begin(queued):
                return queued
        return None

    def _can_begin(self) -> Callable[[QueuedUpload], bool]:
        """Says of an upload whether it can begin now.

        One file has its first try at a time; short texts need no reader. Uploads of one file keep their order.
        """
        reading = [batch for batch in self._begun if batch.is_reading]
        files = {file_of(queued.upload.id) or queued.upload.id for batch in reading for queued in batch.uploads}
        numbers = set[int]().union(*(batch.numbers for batch in self._begun))
        tries_first = any(not batch.is_long for batch in reading)

        def can_begin(queued: QueuedUpload) -> bool:
            upload = queued.upload
            if queued.number in numbers or (tries_first and not queued.is_short):
                return False
            return (file_of(upload.id) or upload.id) not in files

        return can_begin

    def _index(self, batch: Batch) -> None:
        """Go on with a batch until it is indexed, or others have their turn. Raises `StoppedError`, and transient errors."""
        try:
            if not self._is_divided(batch):
                self._look = self._look or not batch.uploads
                return
            self._apply(batch)
        except Exception as error:  # no document may end the thread
            batch.steps.close()
            self._begun.remove(batch)
            self._settle_failed(batch, error)
            return
        self._begun.remove(batch)
        for queued in batch.uploads:
            self._queue.settle(queued, *batch.outcomes.get(queued.number, ("ready", "")))
        try:
            self._updater.forget()
            self._report("")
        except (StoreError, OSError) as error:  # the new index is in use; the next look deletes the caches
            self._report(first_line(error), error)

    def _is_divided(self, batch: Batch) -> bool:
        """Read, divide and embed the batch's documents; False if a reader, a more urgent upload or another corpus waits.

        Raises `SupersededError`, and what its steps raise.
        """
        place = min((queued.place for queued in batch.uploads), default=inf)
        look_at = 0.0
        while True:
            if self._closed:
                raise StoppedError
            if time.monotonic() >= look_at:
                self._queue.require(batch.uploads)
                if look_at and (self._turns.awaited or self._queue.is_waiting(place)):
                    return False
                look_at = time.monotonic() + SLICE_S
            try:
                next(batch.steps)
            except StopIteration:
                return True
            if batch.is_reading:
                return False
            time.sleep(_BREATH_S)  # yields the interpreter to answering threads: Python's switch interval is 5 ms

    def _steps(self, batch: Batch) -> Generator[None, None, None]:
        """Read the batch's uploads, and divide and embed their documents; settle those that are at fault.

        Raises `StoppedError`, `SupersededError`, and transient errors.
        """
        yield from self._updater.tokenise()
        for queued in list(batch.uploads):
            batch.begun = queued
            try:
                documents = yield from self._read(batch, queued)
                if documents is None:
                    continue
                self._queue.indexing(queued)
                yield
                batch.documents.append((yield from self._updater.divide(documents)))
            except Exception as error:
                if is_transient(error) or isinstance(error, _NO_FAULT):
                    raise
                batch.uploads.remove(queued)
                self._fail(queued, error)
            batch.begun = None

    def _read(self, batch: Batch, queued: QueuedUpload) -> Generator[None, None, Sequence[Document] | None]:
        """The documents of an upload; the batch then knows what was left out of it. None if it has its own batch now."""
        kind = queued.upload.kind
        if kind == "delete":
            self._queue.take(queued)
            return ()
        if kind == "text":
            upload = self._queue.take(queued)
            documents: Sequence[Document] = (Document(upload.id, upload.title, upload.data.decode(), upload.id),)
        else:
            loaded = yield from self._loaded(batch, queued)
            if loaded is None:
                return None
            documents, skipped = loaded
            reason = "; ".join(f"{part.source} {part.reason}" for part in skipped)
            if not documents:
                raise DocumentsError(reason or f"{queued.upload.id} holds no document")
            if lost := sum(part.lost for part in skipped):
                is_whole = any(document.id == queued.upload.id for document in documents)
                batch.outcomes[queued.number] = "ready" if is_whole else "failed", f"{lost:,} left out: {reason}"
            else:
                batch.outcomes[queued.number] = "ready", reason
        pending = (divided.ids for divided in batch.documents)
        names = self._updater.documents().union(*pending, (document.id for document in documents))
        if len(names) > self._limit:
            raise ConfigError(
                f"the corpus would have {len(names):,} documents, at most {self._limit:,} are taken: "
                "delete some, or use another corpus"
            )
        return documents

    def _loaded(self, batch: Batch, queued: QueuedUpload) -> Generator[None, None, LoadedDocuments | None]:
        """Read a file: within the limits of a first try, then, if that is not enough, in the lane of those that take long.

        Waits for places and readers. None if the other uploads of the batch go on without it.
        """
        if queued.is_short:
            loaded = load_short(queued.upload.id, self._queue.take(queued).data)
            if loaded is not None:
                return loaded
            self._queue.put_back([queued])
            if len(batch.uploads) > 1:
                self._divide_off(batch, queued, is_long=False)
                return None
        if not batch.is_long:
            try:
                return (yield from self._attempt(batch, queued, self._reading.of_first_try))
            except BeyondLimitsError:
                self._queue.put_back([queued])
            if len(batch.uploads) > 1:
                self._divide_off(batch, queued, is_long=True)
                return None
            batch.is_long = True
        try:
            return (yield from self._attempt(batch, queued, self._reading))
        except BeyondLimitsError as error:
            return error.loaded

    def _attempt(
        self, batch: Batch, queued: QueuedUpload, limits: ReadingLimits
    ) -> Generator[None, None, LoadedDocuments]:
        place = self._lanes.place(self._tenant, is_long=batch.is_long)
        try:
            for batch.awaited in place.wait(self._notify):
                yield
            reading = place.read(limits, self._queue.take(queued), self._notify)
            while True:
                try:
                    batch.awaited = next(reading)
                except StopIteration as end:
                    loaded: LoadedDocuments = end.value
                    return loaded
                yield
        finally:
            batch.awaited = None
            place.leave()

    def _divide_off(self, batch: Batch, queued: QueuedUpload, *, is_long: bool) -> None:
        """Put a file that needs a reader process into a batch that holds it alone. is_long: the process may run long."""
        batch.uploads.remove(queued)
        alone = Batch([queued], is_long=is_long)
        alone.steps = self._steps(alone)
        self._begun.append(alone)

    def _apply(self, batch: Batch) -> None:
        """Write the index, unless it is empty before and after, and take in what caches it needs."""
        divided = batch.divided
        if divided.ids or self._updater.documents() or self._queue.gone():
            self.caches.reset(*self._updater.apply(divided, batch.removed))
            self._queue.note_progress(self.caches.progress(), anew=True)

    def _settle_failed(self, batch: Batch, error: Exception) -> None:
        """Queue the uploads of a batch again, or settle them after a bug. Raises the error if it may last."""
        if not (is_transient(error) or isinstance(error, _NO_FAULT) or batch.removed):
            for queued in batch.uploads:
                self._fail(queued, error)
            return
        to_blame = batch.begun if not isinstance(error, _NO_FAULT) else None  # its try counts
        with suppress(StoreError):  # the next try counts this one
            self._queue.put_back([queued for queued in batch.uploads if queued is not to_blame])
        if not isinstance(error, SupersededError):
            raise error

    def _fail(self, queued: QueuedUpload, error: Exception) -> None:
        """Settle an upload that has failed for good."""
        log_failure(error)
        whole = isinstance(error, GivenUpError) or not isinstance(error, CLIENT_ERRORS)
        self._queue.settle(queued, "failed", reason_of(error), whole=whole)
        self.notice()
