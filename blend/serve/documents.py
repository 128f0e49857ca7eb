"""The documents of a corpus, added, replaced and deleted while the server answers from it.

`Documents` checks an upload and writes it to disk. `CorpusWorker` reads it and updates the index: from then on its chunks are
retrieved. `CorpusCaches` queues the missing caches. A killed process loses nothing: accepted uploads stay on disk until
they are indexed, and the index names the caches that should exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from blend.errors import ConfigError, StoreError
from blend.serve.background import Compute
from blend.serve.corpus_caches import CalibrateCorpus, CorpusUpdater, current_index
from blend.serve.corpus_worker import CorpusWorker
from blend.serve.failures import CORPUS_FAILS
from blend.serve.types import GivenDocument
from blend.serve.uploads import (
    INCOMING,
    DocumentLimits,
    DocumentState,
    DocumentStatus,
    QueuedUpload,
    Upload,
    UploadedFile,
    UploadQueue,
    UploadsFullError,
    checked,
    part_of,
    spellings,
)
from blend.types import Tokens

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import Chunk, ChunkIndex

_ORDER: tuple[DocumentState, ...] = ("failed", "queued", "reading", "indexing", "computing", "ready")


class Documents:
    """The documents of one corpus. Thread-safe; accepted changes survive the process.

    compute: computes caches.
    calibrate: measures the KV corrections when all caches exist; None does not.
    on_gone: deletes other data of the text of removed documents.
    A document that cannot be read is "failed", and its earlier version stays.
    """

    def __init__(
        self,
        rag: Rag,
        compute: Compute,
        *,
        calibrate: CalibrateCorpus | None = None,
        on_gone: Callable[[Collection[Tokens]], None] = lambda gone: None,
        limits: DocumentLimits | None = None,
    ) -> None:
        self._rag, self._limits = rag, limits or DocumentLimits()
        self._queue = UploadQueue(rag.index_dir.parent / INCOMING)
        self._putting = threading.Lock()
        updater = CorpusUpdater(rag, self._queue, on_gone)
        self._worker = CorpusWorker(updater, self._queue, compute, calibrate, self._limits)
        self._seen: tuple[ChunkIndex | None, dict[str, DocumentStatus]] = None, {}

    def add(
        self, files: Sequence[UploadedFile] = (), texts: Sequence[GivenDocument] = ()
    ) -> tuple[DocumentStatus, ...]:
        """Accept documents; each replaces the one with its id when it is indexed. Bad files among good ones have failed.

        The id of a text without one is its digest. Raises `ConfigError` for too many, too large or empty texts,
        `DocumentsError` if no file can be taken, `UploadsFullError` if too much waits, `StoreError` if they cannot be
        written. Then nothing is accepted.
        """
        uploads = checked(files, texts, self._limits)
        taken = [upload for upload in uploads if not upload.reason]
        with self._putting:
            self._require_room(taken)
            self._put(taken)
            self._worker.refuse([upload for upload in uploads if upload.reason])
        return tuple(
            DocumentStatus(upload.id, upload.title, "failed" if upload.reason else "queued", reason=upload.reason)
            for upload in uploads
        )

    def listing(self) -> tuple[DocumentStatus, ...]:
        """All documents by id, including queued and failed ones. Raises `RetrievalError` for a damaged index."""
        waiting, failed = self._queued()  # before reading the index: what is indexed meanwhile is listed as queued
        indexed = self._indexed()
        with self._worker.changed:
            found = {name: self._worker.caches.status(one) or self._unknown(one) for name, one in indexed.items()}
        for upload in (one.upload for one in failed):
            state: DocumentState = "ready" if upload.is_read else "failed"
            one = found.get(upload.id, DocumentStatus(upload.id, upload.title or upload.id, state))
            found[upload.id] = one._replace(state=one.state if upload.is_read else "failed", reason=upload.reason)
        for upload, state in ((one.upload, one.state) for one in waiting):
            if upload.kind == "delete":
                found = {name: one for name, one in found.items() if not part_of(name, upload.id)}
            else:
                chunks = found[upload.id].chunks if upload.id in found else 0
                found[upload.id] = DocumentStatus(upload.id, upload.title, state, chunks)
        return tuple(found[name] for name in sorted(found))

    def get(self, name: str) -> DocumentStatus | None:
        """A document by its id or the name it was uploaded under; a file of many documents as one."""
        statuses = self.listing()
        for wanted in spellings(name):
            parts = [one for one in statuses if part_of(one.id, wanted)]
            if len(parts) == 1 and parts[0].id == wanted:
                return parts[0]
            if parts:
                return _together(wanted, parts)
        return None

    def delete(self, name: str) -> Future[None] | None:
        """Delete a document, or all of one file; None for an unknown id. No new answer uses it afterwards.

        The result completes when it is out of the index too, or has the error. Raises `StoreError` if the deletion cannot be
        written; the document then stays.
        """
        status = self.get(name)
        if status is None:
            return None
        removal = [Upload("delete", status.id)]
        with self._putting:
            try:
                (queued,) = self._put(removal)
            except StoreError:  # a full disk: deleting the caches makes room for the note
                self._worker.free(status.id)
                (queued,) = self._put(removal)
        return queued.done

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of uploads to remove that the index may still hold."""
        return frozenset(one.upload.id for one in self._queued()[0] if one.upload.kind == "delete")

    @property
    def problem(self) -> str:
        """The background failure that is being retried, in one line for the operator; empty without one."""
        return self._worker.problem

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything possible is indexed and computed; False if time runs out first."""
        with self._worker.changed:
            return self._worker.changed.wait_for(lambda: self._worker.quiet, timeout_s)

    def close(self) -> None:
        """Stop working; unfinished uploads wait on disk for the next process."""
        self._worker.close()

    def _queued(self) -> tuple[list[QueuedUpload], list[QueuedUpload]]:
        """Uploads that wait, and those that failed."""
        with self._worker.changed:
            return list(self._queue.waiting), list(self._queue.failed.values())

    def _require_room(self, uploads: Sequence[Upload]) -> None:
        waiting, _ = self._queued()
        nbytes = sum(one.nbytes for one in waiting)
        if nbytes + sum(len(upload.data) for upload in uploads) > self._limits.waiting_bytes:
            raise UploadsFullError(nbytes)
        names = {*self._indexed(), *(one.upload.id for one in waiting), *(upload.id for upload in uploads)}
        if len(names) > self._limits.documents:
            raise ConfigError(
                f"the corpus would have {len(names):,} documents, at most {self._limits.documents:,} are taken: "
                "delete some, or use another corpus"
            )

    def _put(self, uploads: Sequence[Upload]) -> list[QueuedUpload]:
        queued = self._queue.put(uploads)
        self._worker.put(queued)
        return queued

    def _indexed(self) -> dict[str, DocumentStatus]:
        """The status of each document in the index, by id."""
        index = current_index(self._rag)
        seen, found = self._seen
        if index is not seen:
            chunks: dict[str, list[Chunk]] = {}
            for chunk in index.chunks if index else ():
                chunks.setdefault(chunk.document_id, []).append(chunk)
            found = {
                name: DocumentStatus(name, own[0].title.partition(" > ")[0], "computing", len(own))
                for name, own in chunks.items()
            }
            self._seen = index, found
            self._worker.saw(found)
        return found

    def _unknown(self, one: DocumentStatus) -> DocumentStatus:
        """The status of a document whose caches are not known yet."""
        return one._replace(state="failed", reason=CORPUS_FAILS) if self.problem else one


def _together(name: str, parts: Sequence[DocumentStatus]) -> DocumentStatus:
    """A file of several documents: as ready as the least ready one."""
    least = min(parts, key=lambda one: _ORDER.index(one.state))
    chunks, done, total = (sum(counts) for counts in zip(*(one[3:6] for one in parts), strict=True))
    return DocumentStatus(name, name, least.state, chunks, done, total, least.reason)
