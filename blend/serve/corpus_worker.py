"""The thread that keeps one corpus: reads what was handed in, brings the index up to date, has the caches computed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from blend.errors import ConfigError, StoreError, first_line
from blend.serve.cache_feeder import CacheFeeder, Calibrate
from blend.serve.caching import Compute, DocumentState
from blend.serve.corpus_keeper import CorpusKeeper
from blend.serve.reasons import MENDABLE, is_passing, log_failure, reason_of
from blend.serve.spool import GivenUpError, Spool
from blend.serve.uploads import DocumentLimits, Upload, part_of, read
from blend_retrieval import Document
from blend_retrieval.apart import ApartReader, StoppedError
from blend_retrieval.errors import DocumentsError

MOST_AT_ONCE, MOST_BYTES_AT_ONCE = 16, 64 << 20  # that go into the index together
FIRST_RETRY_S, RETRY_S = (
    1.0,
    30.0,
)  # until what the store, the disk or memory refused is tried again, twice as long each time
LAST_S = 10.0  # until the thread is left to itself, which then ends with the process
_BREATH_S = 5e-5
MOST_FAILED = 1000  # that are remembered


class ClosingError(Exception):
    """The thread is to end; what it was at comes again with the next process."""


@dataclass(eq=False)
class Task:
    """An upload on its way into the index.

    upload: without its bytes. alone: it goes into the index without others, for one of them is at fault or too much. done: has
    the error of one that did not get there.
    """

    number: int
    upload: Upload
    nbytes: int
    alone: bool = False
    state: DocumentState = "queued"
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # from here on nobody who waits for it can cancel it


class CorpusWorker:
    """What is shared with it is read and changed under `changed`.

    tasks: what waits, in order. failed: numbers and uploads with their reasons, by the ids of uploads. problem: what the thread
    failed at in the background and will try again, in the words of the error, or empty.
    """

    def __init__(
        self,
        keeper: CorpusKeeper,
        spool: Spool,
        compute: Compute,
        calibrate: Calibrate | None,
        limits: DocumentLimits,
    ) -> None:
        self._keeper, self._spool, self._limit = keeper, spool, limits.documents
        self._reader = ApartReader(limits.reading)
        self._look, self._busy, self._closed = True, False, False
        self.changed = threading.Condition()
        self.caches = CacheFeeder(keeper, compute, calibrate, self.changed, lambda: bool(self.tasks) or self._closed)
        self.tasks = deque(Task(number, *spool.head(number), spool.alone(number)) for number in spool.numbers())
        self.failed = {upload.id: (number, upload) for number, upload in spool.failed().items()}
        self.problem = ""
        self._pause_s, self._resume_at = 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name="kvblend-documents", daemon=True)
        self._thread.start()

    def put(self, tasks: Sequence[Task]) -> None:
        """Let these wait. One that takes a document away is tried at once: it may make the room that others wait for."""
        with self.changed:
            self.tasks.extend(tasks)
            if any(task.upload.kind == "delete" for task in tasks):
                self._resume_at = 0.0
            self.changed.notify_all()

    def free(self, name: str) -> None:
        """Make room on a full disk by all that the upload of this id takes there, but for the index, which still holds it.

        Raises `StoreError`.
        """
        with self.changed:
            mine = [task for task in self.tasks if task.state == "queued" and task.upload.id == name]
            for task in mine:
                if task.upload.kind != "delete":
                    self._finish(task)
            self._note(name)
            self._look = True  # where it stays after all, its caches are computed again
        self._keeper.free(name)

    def saw(self, documents: Collection[str]) -> None:
        """The index holds these now. Where none of its own tasks made it so, another process did: it is looked at again."""
        with self.changed:
            if not self.tasks and not self.caches.knows(documents):
                self._look = True
                self.changed.notify_all()

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of uploads that are to be removed and may be in the index still."""
        with self.changed:
            return frozenset(task.upload.id for task in self.tasks if task.upload.kind == "delete")

    @property
    def quiet(self) -> bool:
        """Whether everything is in the index and everything computed, as far as it can be."""
        return self.caches.quiet and not (self.tasks or self._look or self._busy)

    def close(self) -> None:
        """End the thread, which is waited for `LAST_S` at most; what it has not done waits on disk."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.caches.cancel()
        self._reader.close()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                on_time = self.changed.wait_for(self._due, self._patience())
            if not self._store_is_there():
                return
            with self.changed:
                if not on_time:
                    self.caches.retry()
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
            except Exception as error:  # a store or a disk that is down; no document is the worse for it
                problem = self._failed_at(error)
            with self.changed:
                self.problem, self._busy = self.problem if problem is None else problem, False
                if batch:
                    self._pause_s = 0.0 if problem is None else min(RETRY_S, max(FIRST_RETRY_S, 2 * self._pause_s))
                    self._resume_at = time.monotonic() + self._pause_s
                self.changed.notify_all()

    def _store_is_there(self) -> bool:
        """Wait until the store can be read, and what is to be done with it; False when this is closed."""
        lost = ""
        while not self._closed:
            try:
                self._keeper.require_store()
            except StoreError as error:
                with self.changed:
                    self.problem = lost = self._failed_at(error)
                    self.changed.wait_for(lambda: self._closed, RETRY_S)
            else:
                with self.changed:
                    self.problem = "" if self.problem == lost else self.problem
                    self._look = self._look or bool(lost)
                return True
        return False

    def _failed_at(self, error: Exception) -> str:
        """What the thread failed at, in one line; the log has it once, however often it is tried."""
        line = first_line(error)
        if line != self.problem:
            log_failure(error)
        return line

    def _due(self) -> bool:
        return bool(self.tasks and not self._pausing) or self._look or self._closed or self.caches.due

    @property
    def _pausing(self) -> bool:
        return time.monotonic() < self._resume_at

    def _patience(self) -> float:
        return self._resume_at - time.monotonic() if self.tasks and self._pausing else RETRY_S

    def _step(self, batch: Sequence[Task], looking: bool) -> None:
        """One thing, the most urgent first: what is indexed can be asked for."""
        if batch:
            self._take(batch)
        elif looking:
            if self._keeper.documents() or self._spool.gone():
                self._apply((), ())
        else:
            self.caches.step()

    def _batch(self) -> Iterator[Task]:
        """The first tasks, as many as may go together."""
        nbytes = 0
        for number, task in enumerate(() if self._pausing else self.tasks):
            nbytes += task.nbytes
            if number == MOST_AT_ONCE or (number and (task.alone or nbytes > MOST_BYTES_AT_ONCE)):
                return
            yield task
            if task.alone:
                return

    def _take(self, batch: Sequence[Task]) -> None:
        """Read some uploads and put them into the index together; where that fails, each comes again alone.

        Raises `ClosingError`, and what is no document's fault.
        """
        documents: dict[str, Document] = {}
        removed: list[str] = []
        fine: list[Task] = []
        try:
            fine.extend(task for task in batch if self._read(task, documents, removed))
            if documents or any(part_of(name, one) for name in self._keeper.documents() for one in removed):
                self._apply(list(documents.values()), removed)
        except ClosingError:
            self._put_back(batch)
            raise
        except Exception as error:  # no document may end the thread
            if len(fine) == len(batch) == 1 and not is_passing(error):
                self._finish(fine[0], error)
                return
            self._put_back(batch)
            if is_passing(error):
                raise
        else:
            for task in fine:
                self._finish(task)

    def _put_back(self, batch: Sequence[Task]) -> None:
        """Those of them that are not done wait again, behind others that may fare better; what has one id keeps its order."""
        with self.changed:
            left = [task for task in batch if not task.done.done()]
            for task in left:
                task.state, task.alone = "queued", True
                with suppress(OSError):  # a folder that cannot be written: it is found by its number all the same
                    self._spool.put_back(task.number)
            files = {_file_of(task) for task in left}
            self.tasks = deque(sorted(self.tasks, key=lambda task: _file_of(task) in files))
            self.changed.notify_all()

    def _read(self, task: Task, documents: dict[str, Document], removed: list[str]) -> bool:
        """Whether an upload could be read; what it brings or takes is then in `documents` and `removed`.

        Raises `ClosingError`, and what is not its fault.
        """
        try:
            upload = self._spool.take(task.number)
            if upload.kind == "delete":
                removed.append(upload.id)
                for name in [name for name in documents if part_of(name, upload.id)]:
                    del documents[name]
            else:
                documents |= self._documents(task, upload, documents)
        except StoppedError:
            raise ClosingError from None
        except Exception as error:  # an upload that is damaged
            if is_passing(error):
                raise
            self._finish(task, error)
            return False
        with self.changed:
            task.state = "indexing"
        return True

    def _documents(self, task: Task, upload: Upload, others: dict[str, Document]) -> dict[str, Document]:
        found, skipped = read(upload, self._reader)
        reasons = [f"{one.source} {one.reason}" for one in skipped]
        if not found:
            raise DocumentsError(reasons[0] if reasons else f"{upload.id} holds no document")
        names = self._keeper.documents() | set(others) | {one.id for one in found}
        if len(names) > self._limit:
            raise ConfigError(f"the corpus would have {len(names):,} documents, at most {self._limit:,} are taken")
        reason = f"{len(reasons)} left out, the first: {reasons[0]}" if reasons else ""
        task.upload = task.upload._replace(reason=reason)
        return {one.id: one for one in found}

    def _apply(self, documents: Sequence[Document], removed: Sequence[str]) -> None:
        applied = self._keeper.apply(documents, removed, self._going_on)
        self.caches.change(applied)
        try:
            self.caches.forget()
            self.problem = ""
        except StoreError as error:  # the spool knows what is to go, and the index is as it is to be
            self.problem = self._failed_at(error)

    def _going_on(self, stage: str, done: int, total: int) -> None:
        """Ends what is under way when this is closed, and lets others have the interpreter meanwhile."""
        if self._closed:
            raise ClosingError
        time.sleep(_BREATH_S)  # else a thread that answers waits for Python's switch interval, 5 ms, again and again

    def _note(self, name: str, failed: tuple[int, Upload] | None = None) -> None:
        """Remember that an upload failed and why, or that it did not."""
        with self.changed:
            before = self.failed.pop(name, None)
            if failed is not None:
                self.failed[name] = failed
            gone = [before] if before else []
            while len(self.failed) > MOST_FAILED:
                gone.append(self.failed.pop(next(iter(self.failed))))
            for number, _ in gone:
                self._remove(number)

    def _remove(self, number: int) -> None:
        with suppress(OSError):  # a folder that cannot be written: then the next process does it again, to the same end
            self._spool.remove(number)

    def _finish(self, task: Task, error: Exception | None = None) -> None:
        """An upload is in the index, or never will be."""
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
                    whole = isinstance(error, GivenUpError) or not isinstance(error, MENDABLE)
                    self._spool.fail(number, upload, whole=error is not None and whole)
            else:
                self._remove(number)
            self.tasks.remove(task)
            self.changed.notify_all()
        if error is None:
            task.done.set_result(None)
        else:
            task.done.set_exception(error)


def _file_of(task: Task) -> str:
    """The id of the upload that brings, or brought, what the task is about."""
    return task.upload.id.partition("#")[0]
