"""The thread of one corpus: reads uploads, updates the index, has missing caches computed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from blend.errors import ConfigError, StoreError, first_line
from blend.serve.corpus_caches import CacheBuilder, CalibrateCorpus, Compute, CorpusUpdater, DocumentState
from blend.serve.failures import CLIENT_ERRORS, is_transient, log_failure, reason_of
from blend.serve.uploads import DocumentLimits, GivenUpError, Upload, UploadQueue, part_of, read
from blend_retrieval import Document
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import IsolatedReader, StoppedError

MOST_AT_ONCE, MOST_BYTES_AT_ONCE = 16, 64 << 20  # uploads that are indexed together
FIRST_RETRY_S, RETRY_S = 1.0, 30.0  # delay after a transient failure; doubles from the first to the last
LAST_S = 10.0  # how long `close` waits for the thread
MOST_FAILED = 1000  # failures to remember
_BREATH_S = 5e-5


class ClosingError(Exception):
    """The worker is closing; its uploads wait for the next process."""


@dataclass(eq=False)
class UploadTask:
    """An upload on its way into the index.

    upload: without its bytes.
    alone: index it without others, because one of them is at fault or they are too large.
    done: completes when it is indexed, or with the error.
    """

    number: int
    upload: Upload
    nbytes: int
    alone: bool = False
    state: DocumentState = "queued"
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # so that no waiter can cancel it

    @property
    def file(self) -> str:
        """The id of the upload that brought the document."""
        return self.upload.id.partition("#")[0]


class CorpusWorker:
    """Works on one corpus. `changed` guards its attributes.

    tasks: uploads that wait, in order.
    failed: numbers and uploads with reasons, by upload id.
    problem: the transient failure of background work, in the error's words; empty without one.
    """

    def __init__(
        self,
        updater: CorpusUpdater,
        uploads: UploadQueue,
        compute: Compute,
        calibrate: CalibrateCorpus | None,
        limits: DocumentLimits,
    ) -> None:
        self._updater, self._uploads, self._limit = updater, uploads, limits.documents
        self._reader = IsolatedReader(limits.reading)
        self._look, self._busy, self._closed = True, False, False
        self.changed = threading.Condition()
        self.builder = CacheBuilder(updater, compute, calibrate, self.changed, lambda: bool(self.tasks) or self._closed)
        self.tasks = deque(UploadTask(one, *uploads.head(one), uploads.alone(one)) for one in uploads.numbers())
        self.failed = {upload.id: (number, upload) for number, upload in uploads.failed().items()}
        self.problem = ""
        self._pause_s, self._resume_at = 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name="kvblend-documents", daemon=True)
        self._thread.start()

    def put(self, tasks: Sequence[UploadTask]) -> None:
        """Queue these. A deletion ends a pause: it may make the room that others wait for."""
        with self.changed:
            self.tasks.extend(tasks)
            if any(task.upload.kind == "delete" for task in tasks):
                self._resume_at = 0.0
            self.changed.notify_all()

    def free(self, name: str) -> None:
        """Make room on a full disk: delete everything of this upload except the index. Raises `StoreError`."""
        with self.changed:
            for task in [task for task in self.tasks if task.state == "queued" and task.upload.id == name]:
                if task.upload.kind != "delete":
                    self._finish(task)
            self._note(name)
            self._look = True  # if it stays after all, its caches are computed again
        self._updater.free(name)

    def saw(self, documents: Collection[str]) -> None:
        """The index holds these documents. Looks at it again if another process changed it."""
        with self.changed:
            if not self.tasks and not self.builder.table.knows(documents):
                self._look = True
                self.changed.notify_all()

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of uploads to remove that the index may still hold."""
        with self.changed:
            return frozenset(task.upload.id for task in self.tasks if task.upload.kind == "delete")

    @property
    def quiet(self) -> bool:
        """Whether everything possible is indexed and computed."""
        return self.builder.quiet and not (self.tasks or self._look or self._busy)

    def close(self) -> None:
        """Stop the thread, waiting at most `LAST_S`; what is not done waits on disk."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.builder.cancel()
        self._reader.close()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                on_time = self.changed.wait_for(self._due, self._timeout())
            if not self._wait_for_store():
                return
            with self.changed:
                if not on_time:
                    self.builder.table.retry()
                    self._look = self._look or bool(self.problem)
                batch, looking = list(self._batch()), self._look
                for task in batch:
                    task.state = "reading"
                self._look, self._busy = looking and bool(batch), True
            try:
                self._step(batch, looking)
                problem = None
            except ClosingError:
                return
            except Exception as error:  # an outage of the store or the disk
                problem = self._log_once(error)
            with self.changed:
                self.problem, self._busy = self.problem if problem is None else problem, False
                if batch:
                    self._pause_s = 0.0 if problem is None else min(RETRY_S, max(FIRST_RETRY_S, 2 * self._pause_s))
                    self._resume_at = time.monotonic() + self._pause_s
                self.changed.notify_all()

    def _wait_for_store(self) -> bool:
        """Wait until the store is readable; False when closed."""
        lost = ""
        while not self._closed:
            try:
                self._updater.require_store()
            except StoreError as error:
                with self.changed:
                    self.problem = lost = self._log_once(error)
                    self.changed.wait_for(lambda: self._closed, RETRY_S)
            else:
                with self.changed:
                    self.problem = "" if self.problem == lost else self.problem
                    self._look = self._look or bool(lost)
                return True
        return False

    def _log_once(self, error: Exception) -> str:
        """Log an error unless it is the current problem; returns its first line."""
        line = first_line(error)
        if line != self.problem:
            log_failure(error)
        return line

    def _due(self) -> bool:
        return bool(self.tasks and not self._pausing) or self._look or self._closed or self.builder.due

    @property
    def _pausing(self) -> bool:
        return time.monotonic() < self._resume_at

    def _timeout(self) -> float:
        return self._resume_at - time.monotonic() if self.tasks and self._pausing else RETRY_S

    def _step(self, batch: Sequence[UploadTask], looking: bool) -> None:
        """One step, the most urgent: indexing comes before computing, because indexed documents can be retrieved."""
        if batch:
            self._take(batch)
        elif looking:
            if self._updater.documents() or self._uploads.gone():
                self._apply((), ())
        else:
            self.builder.step()

    def _batch(self) -> Iterator[UploadTask]:
        """The first tasks that may be indexed together."""
        nbytes = 0
        for number, task in enumerate(() if self._pausing else self.tasks):
            nbytes += task.nbytes
            if number == MOST_AT_ONCE or (number and (task.alone or nbytes > MOST_BYTES_AT_ONCE)):
                return
            yield task
            if task.alone:
                return

    def _take(self, batch: Sequence[UploadTask]) -> None:
        """Read uploads and index them together; on a failure each is tried again alone.

        Raises `ClosingError`, and transient errors.
        """
        documents: dict[str, Document] = {}
        removed: list[str] = []
        readable: list[UploadTask] = []
        try:
            readable.extend(task for task in batch if self._read(task, documents, removed))
            if documents or any(part_of(name, one) for name in self._updater.documents() for one in removed):
                self._apply(list(documents.values()), removed)
        except ClosingError:
            self._put_back(batch)
            raise
        except Exception as error:  # no document may end the thread
            if len(readable) == len(batch) == 1 and not is_transient(error):
                self._finish(readable[0], error)
                return
            self._put_back(batch)
            if is_transient(error):
                raise
        else:
            for task in readable:
                self._finish(task)

    def _put_back(self, batch: Sequence[UploadTask]) -> None:
        """Queue unfinished tasks again, behind the others; tasks of one file keep their order."""
        with self.changed:
            left = [task for task in batch if not task.done.done()]
            for task in left:
                task.state, task.alone = "queued", True
                with suppress(OSError):  # a read-only folder: the number still finds it
                    self._uploads.put_back(task.number)
            files = {task.file for task in left}
            self.tasks = deque(sorted(self.tasks, key=lambda task: task.file in files))
            self.changed.notify_all()

    def _read(self, task: UploadTask, documents: dict[str, Document], removed: list[str]) -> bool:
        """Add what an upload brings to `documents`, or what it deletes to `removed`; False if it is at fault.

        Raises `ClosingError`, and transient errors.
        """
        try:
            upload = self._uploads.take(task.number)
            if upload.kind == "delete":
                removed.append(upload.id)
                for name in [name for name in documents if part_of(name, upload.id)]:
                    del documents[name]
            else:
                documents |= self._documents(task, upload, documents)
        except StoppedError:
            raise ClosingError from None
        except Exception as error:
            if is_transient(error):
                raise
            self._finish(task, error)
            return False
        with self.changed:
            task.state = "indexing"
        return True

    def _documents(self, task: UploadTask, upload: Upload, others: dict[str, Document]) -> dict[str, Document]:
        found, skipped = read(upload, self._reader)
        reasons = [f"{one.source} {one.reason}" for one in skipped]
        if not found:
            raise DocumentsError(reasons[0] if reasons else f"{upload.id} holds no document")
        names = self._updater.documents() | set(others) | {one.id for one in found}
        if len(names) > self._limit:
            raise ConfigError(f"the corpus would have {len(names):,} documents, at most {self._limit:,} are taken")
        reason = f"{len(reasons)} left out, the first: {reasons[0]}" if reasons else ""
        task.upload = task.upload._replace(reason=reason)
        return {one.id: one for one in found}

    def _apply(self, documents: Sequence[Document], removed: Sequence[str]) -> None:
        applied = self._updater.apply(documents, removed, self._on_progress)
        self.builder.change(applied)
        try:
            self.builder.forget()
            self.problem = ""
        except StoreError as error:  # the index is right, and the upload folder names the caches to delete
            self.problem = self._log_once(error)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        """Stop when closed, and yield the interpreter to answering threads: Python's switch interval is 5 ms."""
        if self._closed:
            raise ClosingError
        time.sleep(_BREATH_S)

    def _note(self, name: str, failed: tuple[int, Upload] | None = None) -> None:
        """Remember that an upload failed, or that it did not."""
        with self.changed:
            before = self.failed.pop(name, None)
            if failed is not None:
                self.failed[name] = failed
            dropped = [before] if before else []
            while len(self.failed) > MOST_FAILED:
                dropped.append(self.failed.pop(next(iter(self.failed))))
            for number, _ in dropped:
                self._remove(number)

    def _remove(self, number: int) -> None:
        with suppress(OSError):  # a read-only folder: the next process repeats the upload, with the same result
            self._uploads.remove(number)

    def _finish(self, task: UploadTask, error: Exception | None = None) -> None:
        """An upload is indexed, or failed for good."""
        number, upload = task.number, task.upload
        if error is not None:
            upload = upload._replace(reason=reason_of(error))
            log_failure(error)
        with self.changed:
            if upload.kind == "delete":
                for name in [name for name in self.failed if error is None and part_of(name, upload.id)]:
                    self._note(name)
            else:
                self._note(upload.id, (number, upload) if upload.reason else None)
            if upload.reason and upload.kind != "delete":
                with suppress(StoreError):
                    whole = isinstance(error, GivenUpError) or not isinstance(error, CLIENT_ERRORS)
                    self._uploads.fail(number, upload, whole=error is not None and whole)
            else:
                self._remove(number)
            self.tasks.remove(task)
            self.changed.notify_all()
        if error is None:
            task.done.set_result(None)
        else:
            task.done.set_exception(error)
