"""The documents of a corpus, added, replaced and deleted while the server answers from it.

`Documents` checks an upload and writes it to disk. `CorpusWorker`, in one of the servers over the corpus, reads it and updates
the index: from then on its chunks are retrieved. `CorpusCaches` queues the missing caches. A killed process loses nothing:
accepted uploads stay on disk until they are indexed, and the index names the caches that should exist.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError, StoreError
from blend.layout import Tokens
from blend.serve.documents.caches import CalibrateCorpus, CorpusUpdater, current_index
from blend.serve.documents.lanes import ReaderLanes
from blend.serve.documents.queue import INCOMING, CacheProgress, UploadQueue
from blend.serve.documents.uploads import (
    DocumentLimits,
    DocumentState,
    DocumentStatus,
    Upload,
    UploadedFile,
    UploadsFullError,
    checked,
    part_of,
    spellings,
)
from blend.serve.documents.worker import CorpusWorker
from blend.serve.engine.background import Compute
from blend.serve.failures import CORPUS_FAILS
from blend.serve.request import GivenDocument
from blend.serve.turns import Turns
from blend.text import shown

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import Chunk

_ORDER: tuple[DocumentState, ...] = ("failed", "queued", "reading", "indexing", "computing", "ready")
_LOOK_S = 0.1
_INDEXING, _SHARE = 3, 2  # corpora that index at a time; of one tenant


class IndexingTurns(NamedTuple):
    """Turns of tenants whose documents are indexed, and lanes for reading. Documents that share them are closed together."""

    turns: Turns
    lanes: ReaderLanes


def indexing_turns() -> IndexingTurns:
    """Turns for all corpora of a server."""
    return IndexingTurns(Turns(_INDEXING, _SHARE), ReaderLanes())


class Documents:
    """The documents of one corpus. Thread-safe; accepted changes survive the process.

    compute: computes caches.
    calibrate: measures the KV corrections when all caches exist; None does not.
    on_gone: deletes other data of the text of removed documents.
    tenant: whose documents these are. turns: among the corpora of all tenants, for reading and indexing.
    A document that cannot be read is "failed", and its earlier version stays.
    """

    def __init__(
        self,
        rag: Rag,
        compute: Compute,
        *,
        calibrate: CalibrateCorpus | None = None,
        on_gone: Callable[[Collection[Tokens]], None] = lambda texts: None,
        limits: DocumentLimits | None = None,
        tenant: str = "",
        turns: IndexingTurns | None = None,
    ) -> None:
        self._rag = rag
        self._limits = limits or DocumentLimits()
        self._queue = UploadQueue(rag.index_dir.parent / INCOMING)
        self._putting = threading.Lock()
        self._updater = CorpusUpdater(rag, self._queue, on_gone)
        self._worker = CorpusWorker(
            self._updater, self._queue, compute, calibrate, self._limits, *(turns or indexing_turns()), tenant
        )

    def add(
        self, files: Sequence[UploadedFile] = (), texts: Sequence[GivenDocument] = ()
    ) -> tuple[DocumentStatus, ...]:
        """Accept documents; each replaces the one with its id when it is indexed. Bad files among good ones have failed.

        The id of a text without one is its digest. Raises `ConfigError` for too many, too large or empty texts in one request,
        `DocumentsError` if no file can be taken, `UploadsFullError` if too much waits, `StoreError` if they cannot be
        written. Then nothing is accepted.
        """
        uploads = checked(files, texts, self._limits)
        taken = [upload for upload in uploads if not upload.reason]
        with self._putting:
            self._require_room(taken)
            self._queue.put(uploads)
        self._worker.notice()
        return tuple(
            DocumentStatus(upload.id, upload.title, "failed" if upload.reason else "queued", reason=upload.reason)
            for upload in uploads
        )

    def listing(self) -> tuple[DocumentStatus, ...]:
        """All documents by id, including queued and failed ones. Raises `RetrievalError` for a damaged index."""
        # The queue before the index: what is indexed meanwhile is queued.
        waiting = self._queue.waiting()
        failed = self._queue.failed()
        indexed = self._indexed()
        progress = self._queue.progress()
        if not waiting and progress.keys() != indexed.keys():
            self._worker.look()  # another process has changed the index
        statuses = {name: self._status(document, progress.get(name)) for name, document in indexed.items()}
        for queued in failed:
            upload = queued.upload
            title = upload.title or upload.id
            status = statuses.get(upload.id, DocumentStatus(upload.id, title, "ready"))
            state = status.state if queued.state == "ready" else "failed"
            statuses[upload.id] = status._replace(state=state, reason=upload.reason)
        for queued in waiting:
            upload = queued.upload
            if upload.kind == "delete":
                statuses = {name: status for name, status in statuses.items() if not part_of(name, upload.id)}
            else:
                chunks = statuses[upload.id].chunks if upload.id in statuses else 0
                statuses[upload.id] = DocumentStatus(upload.id, upload.title, queued.state, chunks)
        return tuple(statuses[name] for name in sorted(statuses))

    def get(self, name: str) -> DocumentStatus | None:
        """A document by its id or the name it was uploaded under; a file of many documents as one."""
        statuses = self.listing()
        for spelling in spellings(name):
            parts = [status for status in statuses if part_of(status.id, spelling)]
            if len(parts) == 1 and parts[0].id == spelling:
                return parts[0]
            if parts:
                return _together(spelling, parts)
        return None

    def delete(self, name: str) -> str | None:
        """Delete a document, or all of one file; None for an unknown id. No new answer uses it afterwards.

        Returns what is `leaving` until it is out of the index. Raises `StoreError` if that cannot be noted; the document then
        stays.
        """
        status = self.get(name)
        if status is None:
            return None
        removal = [Upload("delete", status.id)]
        with self._putting:
            try:
                self._queue.put(removal)
            except StoreError:
                if not os.access(self._queue.folder, os.W_OK):
                    raise
                # A full disk: deleting what the document takes makes room for the note.
                self._worker.look()  # if it stays after all, its caches are computed again
                self._queue.free(status.id)
                self._updater.free(status.id)
                self._queue.put(removal)
        self._worker.notice()
        return status.id

    def retry(self, name: str) -> DocumentStatus | None:
        """Try a failed document again; None for an unknown one. Raises `ConfigError` if that is in vain, and `StoreError`."""
        status = self.get(name)
        if status is None:
            return None
        if not self._queue.retry(status.id):
            raise ConfigError(f"{shown(status.id)} has not failed: its state is {status.state}")
        self._worker.notice()
        return self.get(status.id)

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of uploads to remove that the index may still hold."""
        return self._queue.leaving()

    @property
    def problem(self) -> str:
        """The background failure that is being retried, in one line for the operator; empty without one."""
        return self._worker.problem

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything possible is indexed and computed; False if time runs out first."""
        deadline = time.monotonic() + timeout_s
        while not (self._worker.quiet and all(status.state in ("ready", "failed") for status in self.listing())):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            with self._worker.changed:
                self._worker.changed.wait(min(remaining_s, _LOOK_S))
        return True

    def close(self) -> None:
        """Stop working; unfinished uploads wait on disk for the next process."""
        self._worker.close()

    def _require_room(self, uploads: Sequence[Upload]) -> None:
        nbytes = sum(queued.nbytes for queued in self._queue.waiting())
        if nbytes + sum(len(upload.data) for upload in uploads) > self._limits.waiting_bytes:
            raise UploadsFullError(nbytes)

    def _indexed(self) -> dict[str, DocumentStatus]:
        """The status of each document in the index, by id."""
        index = current_index(self._rag)
        chunks: dict[str, list[Chunk]] = {}
        for chunk in index.chunks if index else ():
            chunks.setdefault(chunk.document_id, []).append(chunk)
        return {
            name: DocumentStatus(name, parts[0].title.partition(" > ")[0], "computing", len(parts))
            for name, parts in chunks.items()
        }

    def _status(self, document: DocumentStatus, progress: CacheProgress | None) -> DocumentStatus:
        """The status of an indexed document. Without its progress it is not known yet which caches it has."""
        if progress is None:
            return document._replace(state="failed", reason=CORPUS_FAILS) if self.problem else document
        computed, total, reason = progress
        state: DocumentState = "failed" if reason else "computing" if computed < total else "ready"
        return document._replace(state=state, tokens_done=computed, tokens_total=total, reason=reason)


def _together(name: str, parts: Sequence[DocumentStatus]) -> DocumentStatus:
    """A file of several documents: as ready as the least ready one."""
    least = min(parts, key=lambda part: _ORDER.index(part.state))
    return DocumentStatus(
        id=name,
        title=name,
        state=least.state,
        chunks=sum(part.chunks for part in parts),
        tokens_done=sum(part.tokens_done for part in parts),
        tokens_total=sum(part.tokens_total for part in parts),
        reason=least.reason,
    )
