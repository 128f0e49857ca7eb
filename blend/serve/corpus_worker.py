"""The thread of one corpus: reads uploads, updates the index, queues missing caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence

from blend.errors import ConfigError, StoreError, first_line
from blend.serve.background import Compute
from blend.serve.corpus_caches import CalibrateCorpus, CorpusCaches, CorpusUpdater
from blend.serve.failures import CLIENT_ERRORS, is_transient, log_failure, reason_of
from blend.serve.uploads import DocumentLimits, GivenUpError, QueuedUpload, Upload, UploadQueue, part_of
from blend_retrieval import Document
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import IsolatedReader, StoppedError

MOST_AT_ONCE, MOST_BYTES_AT_ONCE = 16, 64 << 20  # uploads that are indexed together
FIRST_RETRY_S, RETRY_S = 1.0, 30.0  # delay after a transient failure; doubles from the first to the last
LAST_S = 10.0  # how long `close` waits for the thread
_BREATH_S = 5e-5


class CorpusWorker:
    """Works on one corpus: on uploads first, because indexed documents can be retrieved, then on caches.

    changed: guards the queue, `caches` and `problem`.
    problem: the transient failure that is being retried, in the error's words; empty without one.
    """

    def __init__(
        self,
        updater: CorpusUpdater,
        queue: UploadQueue,
        compute: Compute,
        calibrate: CalibrateCorpus | None,
        limits: DocumentLimits,
    ) -> None:
        self._updater, self._queue, self._limit = updater, queue, limits.documents
        self._reader = IsolatedReader(limits.reading)
        self._look, self._busy, self._closed = True, False, False
        self.changed = threading.Condition()
        self.caches = CorpusCaches(compute, calibrate, self.changed, lambda: bool(queue.waiting) or self._closed)
        self.problem = self._undeleted = ""
        self._pause_s, self._resume_at = 0.0, 0.0  # of uploads
        self._thread = threading.Thread(target=self._run, name="kvblend-documents", daemon=True)
        self._thread.start()

    def put(self, uploads: Sequence[QueuedUpload]) -> None:
        """Queue uploads. A deletion ends a pause, because it may free the space that others wait for."""
        with self.changed:
            self._queue.waiting.extend(uploads)
            if any(one.upload.kind == "delete" for one in uploads):
                self._resume_at = 0.0
            self.changed.notify_all()

    def refuse(self, uploads: Sequence[Upload]) -> None:
        """Remember uploads that are not taken, each with its reason."""
        with self.changed:
            for upload in uploads:
                self._queue.refuse(upload)

    def free(self, name: str) -> None:
        """Make room on a full disk: delete everything of this upload except the index. Raises `StoreError`."""
        with self.changed:
            for one in [one for one in self._queue.waiting if one.state == "queued" and one.upload.id == name]:
                if one.upload.kind != "delete":
                    self._finish(one)
            self._queue.forget(name)
            self._look = True  # if it stays after all, its caches are computed again
        self._updater.free(name)

    def saw(self, documents: Collection[str]) -> None:
        """Compare with the documents that the index holds now. Reads it again if another process has changed it."""
        with self.changed:
            if not self._queue.waiting and not self.caches.holds(documents):
                self._look = True
                self.changed.notify_all()

    @property
    def quiet(self) -> bool:
        """Whether everything possible is indexed and computed."""
        return self.caches.quiet and not (self._queue.waiting or self._look or self._busy)

    def close(self) -> None:
        """Stop the thread, waiting at most `LAST_S`; unfinished uploads wait on disk."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.caches.cancel()
        self._reader.close()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                if not self.changed.wait_for(self._due, self._timeout()):
                    self.caches.retry()
                    self._look = self._look or bool(self.problem)
                if self._closed:
                    return
                uploads, looking = list(self._batch()), self._look
                self._look, self._busy = looking and bool(uploads), True
            try:
                self._updater.require_store()
                self._step(uploads, looking)
            except StoppedError:
                return
            except Exception as error:  # an outage of the store or the disk
                self._rest(error, uploads)
            else:
                self._recover(uploads)

    def _due(self) -> bool:
        return self._urgent() or self._look or self.caches.due

    def _urgent(self) -> bool:
        return self._closed or bool(self._queue.waiting and not self._pausing)

    @property
    def _pausing(self) -> bool:
        return time.monotonic() < self._resume_at

    def _timeout(self) -> float:
        return self._resume_at - time.monotonic() if self._queue.waiting and self._pausing else RETRY_S

    def _batch(self) -> Iterator[QueuedUpload]:
        """The first uploads that may be indexed together."""
        nbytes = 0
        for number, one in enumerate(() if self._pausing else self._queue.waiting):
            nbytes += one.nbytes
            if number == MOST_AT_ONCE or (number and (one.alone or nbytes > MOST_BYTES_AT_ONCE)):
                return
            yield one
            if one.alone:
                return

    def _step(self, uploads: Sequence[QueuedUpload], looking: bool) -> None:
        if uploads:
            self._index(uploads)
        elif not looking:
            self.caches.step()
        elif self._updater.documents() or self._queue.gone():
            self._apply((), ())

    def _recover(self, uploads: Sequence[QueuedUpload]) -> None:
        """End the pause and the reported problem, after a step that succeeded."""
        with self.changed:
            self._busy = False
            if uploads:
                self._pause_s = 0.0
            if not self._pausing:
                self.problem = self._undeleted
            self.changed.notify_all()

    def _rest(self, error: Exception, uploads: Sequence[QueuedUpload]) -> None:
        """Report a step that failed, and delay the next try. While uploads pause, caches are computed."""
        problem = first_line(error)
        if problem != self.problem:
            log_failure(error)
        with self.changed:
            self.problem, self._busy = problem, False
            self.changed.notify_all()
            if uploads:
                self._pause_s = min(RETRY_S, max(FIRST_RETRY_S, 2 * self._pause_s))
                self._resume_at = time.monotonic() + self._pause_s
            else:
                self._look = True
                self.changed.wait_for(self._urgent, self._timeout())

    def _index(self, uploads: Sequence[QueuedUpload]) -> None:
        """Read uploads and index them together; on a failure each is tried again alone.

        Raises `StoppedError`, and transient errors.
        """
        documents: dict[str, Document] = {}
        removed: list[str] = []
        try:
            readable = [one for one in uploads if self._read(one, documents, removed)]
            if documents or any(part_of(name, one) for name in self._updater.documents() for one in removed):
                self._apply(list(documents.values()), removed)
        except Exception as error:  # no document may end the thread
            again = is_transient(error) or isinstance(error, StoppedError)
            if len(uploads) == 1 and not again and not uploads[0].done.done():
                self._look = True  # caches that are still needed may have been deleted
                self._finish(uploads[0], error)
                return
            with self.changed:
                self._queue.put_back(uploads)
                self.changed.notify_all()
            if again:
                raise
        else:
            for one in readable:
                self._finish(one)

    def _read(self, one: QueuedUpload, documents: dict[str, Document], removed: list[str]) -> bool:
        """Add an upload's documents to `documents`, or its deletion to `removed`; False if the upload is faulty.

        Raises `StoppedError`, and transient errors.
        """
        try:
            with self.changed:
                if one.done.done():  # `free` was faster
                    return False
                one.state = "reading"
            upload = self._queue.take(one)
            if upload.kind == "delete":
                removed.append(upload.id)
                for name in [name for name in documents if part_of(name, upload.id)]:
                    del documents[name]
            else:
                documents |= self._documents(one, upload, documents)
        except Exception as error:
            if is_transient(error) or isinstance(error, StoppedError):
                raise
            self._finish(one, error)
            return False
        with self.changed:
            one.state = "indexing"
        return True

    def _documents(self, one: QueuedUpload, upload: Upload, others: Collection[str]) -> dict[str, Document]:
        if upload.kind == "text":
            found: tuple[Document, ...] = (Document(upload.id, upload.title, upload.data.decode(), upload.id),)
        else:
            found, skipped = self._reader.read(upload.id, upload.data, upload.text_field)
            reasons = "; ".join(f"{part.source} {part.reason}" for part in skipped)
            if not found:
                raise DocumentsError(reasons or f"{upload.id} holds no document")
            lost = sum(part.lost for part in skipped)
            is_read = not lost or any(document.id == upload.id for document in found)
            reason = f"{lost:,} left out: {reasons}" if lost else reasons
            one.upload = one.upload._replace(reason=reason, is_read=is_read)
        names = self._updater.documents() | set(others) | {document.id for document in found}
        if len(names) > self._limit:
            raise ConfigError(f"the corpus would have {len(names):,} documents, at most {self._limit:,} are taken")
        return {document.id: document for document in found}

    def _apply(self, documents: Sequence[Document], removed: Sequence[str]) -> None:
        self.caches.reset(*self._updater.apply(documents, removed, self._on_progress))
        try:
            self._updater.forget()
            self._undeleted = ""
        except (StoreError, OSError) as error:  # the new index is in use; the next look deletes the caches
            self._undeleted = first_line(error)
            if self._undeleted != self.problem:
                log_failure(error)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        """Stop when closed, and yield the interpreter to answering threads: Python's switch interval is 5 ms."""
        if self._closed:
            raise StoppedError
        time.sleep(_BREATH_S)

    def _finish(self, one: QueuedUpload, error: Exception | None = None) -> None:
        """Settle an upload that is indexed, or has failed for good."""
        reason, whole = one.upload.reason, False
        if error is not None:
            log_failure(error)
            reason = reason_of(error)
            whole = isinstance(error, GivenUpError) or not isinstance(error, CLIENT_ERRORS)
        with self.changed:
            self._queue.settle(one, reason, failed=error is not None, whole=whole)
            self.changed.notify_all()
        if error is None:
            one.done.set_result(None)
        else:
            one.done.set_exception(error)
