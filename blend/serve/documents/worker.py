"""The thread of one corpus: reads uploads, updates the index, queues missing caches.

Of all servers over a corpus's folder one works, the owner of its lock; the lock ends with the process. The others stand by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from blend.corpus import DividedDocuments
from blend.errors import ConfigError, StoreError, StoreNotWritableError, first_line
from blend.files import make_private_folder, set_aside
from blend.serve.documents.caches import CorpusCaches, CorpusUpdater
from blend.serve.documents.queue import GivenUpError, SupersededError, UploadQueue
from blend.serve.documents.upload_list import QueuedUpload
from blend.serve.documents.uploads import DocumentLimits, Upload
from blend.serve.failures import CLIENT_ERRORS, is_transient, log_failure, reason_of
from blend.serve.turns import Turns
from blend_retrieval import Document
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import IsolatedReader, StoppedError

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from blend.serve.documents.caches import CalibrateCorpus
    from blend.serve.engine.background import Compute

MOST_AT_ONCE = 16  # uploads that are indexed together
MOST_BYTES_AT_ONCE = 1 << 20
PAUSE_S = 5.0  # after a transient failure
RETRY_S = 30.0  # how often failed caches are tried again
LAST_S = 10.0  # how long `close` waits for the thread
LOOK_S = 0.5  # how often to look for uploads that other servers accepted, and for the owner's end
SLICE_S = 0.2  # how long an upload is worked on before others are looked for
_BREATH_S = 5e-5
_NO_FAULT = (StoreError, OSError, StoppedError, SupersededError)
"""Failures for which an upload that is worked on is not to blame."""


@dataclass(eq=False)
class _Batch:
    """Uploads that are indexed together, all to be removed or none; without any, the index is looked at.

    Attributes:
        steps: reads, divides and embeds their documents; pauses often.
        begun: the upload that is worked on.
        documents: those that are divided and embedded.
        outcomes: by the numbers of uploads of which something was left out: their state, and what.

    """

    uploads: list[QueuedUpload]
    steps: Generator[None, None, None] = field(init=False)
    begun: QueuedUpload | None = None
    documents: list[DividedDocuments] = field(default_factory=list)
    outcomes: dict[int, tuple[Literal["ready", "failed"], str]] = field(default_factory=dict)

    @property
    def removed(self) -> list[str]:
        """The uploads that are to leave the index."""
        return [queued.upload.id for queued in self.uploads if queued.upload.kind == "delete"]

    @property
    def divided(self) -> DividedDocuments:
        """All documents together."""
        return DividedDocuments(
            frozenset().union(*(documents.ids for documents in self.documents)),
            [chunk for documents in self.documents for chunk in documents.chunks],
            {name: vector for documents in self.documents for name, vector in documents.vectors.items()},
            {name: ids for documents in self.documents for name, ids in documents.tokens.items()},
        )


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
        self._owner = self._look = self._closed = False
        self._working = True
        self.changed = threading.Condition()
        self.caches = CorpusCaches(compute, calibrate, self.changed, lambda: self._closed or self._waits())
        self.problem = ""
        self._begun: list[_Batch] = []
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
        self._reader.close()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        from filelock import FileLock

        lock = FileLock(self._queue.folder / ".owner", timeout=0, mode=0o600)
        try:
            if self._take_lock(lock):
                while self._wait():
                    self._work()
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
            while not (self._closed or self._look or self.caches.due or self._waits()):
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

    def _next_batch(self) -> _Batch | None:
        """The batch of the first upload that waits, or one that looks at the index; None without either."""
        waiting = self._queue.waiting()
        numbers = {upload.number for upload in waiting}
        self._begun = [batch for batch in self._begun if numbers & {queued.number for queued in batch.uploads}]
        batch_of = {queued.number: batch for batch in self._begun for queued in batch.uploads}
        if waiting and waiting[0].number in batch_of:
            return batch_of[waiting[0].number]
        if not (waiting or self._look):
            return None
        self._look = self._look and bool(waiting)
        batch = _Batch(list(_together(upload for upload in waiting if upload.number not in batch_of)))
        batch.steps = self._steps(batch)
        self._begun.append(batch)
        return batch

    def _index(self, batch: _Batch) -> None:
        """Go on with a batch until it is indexed, or others have their turn. Raises `StoppedError`, and transient errors."""
        try:
            if not self._is_divided(batch):
                self._look = self._look or not batch.uploads
                return
            self._apply(batch)
        except Exception as error:  # no document may end the thread
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

    def _is_divided(self, batch: _Batch) -> bool:
        """Divide and embed the batch's documents; False if a more urgent upload or another corpus waits.

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
            time.sleep(_BREATH_S)  # yields the interpreter to answering threads: Python's switch interval is 5 ms

    def _steps(self, batch: _Batch) -> Generator[None, None, None]:
        """Read the batch's uploads, and divide and embed their documents; settle those that are at fault.

        Raises `StoppedError`, `SupersededError`, and transient errors.
        """
        yield from self._updater.tokenise()
        for queued in list(batch.uploads):
            batch.begun = queued
            try:
                upload = self._queue.take(queued)
                documents = self._read(batch, queued, upload) if upload.kind != "delete" else ()
                self._queue.indexing(queued)
                yield
                batch.documents.append((yield from self._updater.divide(documents)))
            except Exception as error:
                if is_transient(error) or isinstance(error, _NO_FAULT):
                    raise
                batch.uploads.remove(queued)
                self._fail(queued, error)
            batch.begun = None

    def _read(self, batch: _Batch, queued: QueuedUpload, upload: Upload) -> Sequence[Document]:
        """The documents of an upload; the batch then knows what was left out of it."""
        if upload.kind == "text":
            documents: Sequence[Document] = (Document(upload.id, upload.title, upload.data.decode(), upload.id),)
        else:
            require = partial(self._queue.require, [queued])
            documents, skipped = self._reader.read(upload.id, upload.data, upload.text_field, require)
            reason = "; ".join(f"{part.source} {part.reason}" for part in skipped)
            if not documents:
                raise DocumentsError(reason or f"{upload.id} holds no document")
            if lost := sum(part.lost for part in skipped):
                is_whole = any(document.id == upload.id for document in documents)
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

    def _apply(self, batch: _Batch) -> None:
        """Write the index, unless it is empty before and after, and take in what caches it needs."""
        divided = batch.divided
        if divided.ids or self._updater.documents() or self._queue.gone():
            self.caches.reset(*self._updater.apply(divided, batch.removed))
            self._queue.note_progress(self.caches.progress(), anew=True)

    def _settle_failed(self, batch: _Batch, error: Exception) -> None:
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


def _together(waiting: Iterator[QueuedUpload]) -> Iterator[QueuedUpload]:
    """The first uploads that may be indexed together."""
    nbytes = 0
    removes: bool | None = None
    for number, queued in enumerate(waiting):
        is_removal = queued.upload.kind == "delete"
        nbytes += queued.nbytes
        ends = queued.alone or nbytes > MOST_BYTES_AT_ONCE or removes not in (None, is_removal)
        if number and (ends or number == MOST_AT_ONCE):
            return
        yield queued
        if queued.alone:
            return
        removes = is_removal
