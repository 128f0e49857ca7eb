"""The documents of a corpus that a server answers from: added, replaced and removed while it answers.

A change goes through three hands. `Documents` takes it, checks it and writes it down (`spool`). The corpus's own thread reads
it and brings the index up to date: from then on its chunks are retrieved, and those of a document that went are not. What
caches the corpus then lacks is handed, piece by piece, to whoever computes them (`caching`).

A process that is killed loses nothing: what was taken is on disk until it is in the index, and an index names the caches that
are to be there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError, StoreError
from blend.serve.cache_feeder import Calibrate
from blend.serve.caching import Compute, DocumentState, compute_here
from blend.serve.corpus_keeper import CorpusKeeper, current_index
from blend.serve.corpus_worker import CorpusWorker, Task
from blend.serve.reasons import CORPUS_FAILS
from blend.serve.spool import INCOMING, Spool
from blend.serve.types import GivenDocument
from blend.serve.uploads import DocumentLimits, Upload, UploadedFile, UploadsFullError, checked, part_of, spellings

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import Chunk, ChunkIndex

_ORDER: tuple[DocumentState, ...] = ("failed", "queued", "reading", "indexing", "computing", "ready")


class DocumentStatus(NamedTuple):
    """A document, or a file that is not read yet. state: "failed" for the reason given.

    chunks: of it that can be retrieved now, also while a new version of it is on its way. tokens_done, tokens_total: of its
    caches, as soon as it is indexed; a chunk has one or two.
    """

    id: str
    title: str
    state: DocumentState
    chunks: int = 0
    tokens_done: int = 0
    tokens_total: int = 0
    reason: str = ""


class _Indexed(NamedTuple):
    """A document in the index: its title, and how many chunks it has."""

    title: str
    chunks: int


class Documents:
    """The documents of the corpus of `rag`. Any thread may call it; what it is asked to do survives the process.

    compute: computes caches; by default in the corpus's own thread. calibrate: measures the KV corrections when all caches are
    there; None does not. A document that cannot be read is told as "failed", and what was there under its id stays.
    """

    def __init__(
        self,
        rag: Rag,
        compute: Compute = compute_here,
        *,
        calibrate: Calibrate | None = None,
        limits: DocumentLimits | None = None,
    ) -> None:
        self._rag, self._limits = rag, limits or DocumentLimits()
        self._spool = Spool(rag.index_dir.parent / INCOMING)
        self._putting = threading.Lock()
        self._worker = CorpusWorker(CorpusKeeper(rag, self._spool), self._spool, compute, calibrate, self._limits)
        self._seen: tuple[ChunkIndex | None, dict[str, _Indexed]] = None, {}

    def add(
        self, files: Sequence[UploadedFile] = (), texts: Sequence[GivenDocument] = ()
    ) -> tuple[DocumentStatus, ...]:
        """Take documents in; each takes the place of one with its id, when it is indexed.

        A text without an id gets one that depends on what it says. Raises `ConfigError` for too many, too large or empty
        documents, `DocumentsError` for a kind of file that cannot be read, `UploadsFullError` when too much waits, `StoreError`
        when they cannot be kept; none of them is then taken.
        """
        uploads = checked(files, texts, self._limits)
        with self._putting:
            self._require_room(uploads)
            tasks = self._put(uploads)
        return tuple(DocumentStatus(task.upload.id, task.upload.title, "queued") for task in tasks)

    def listing(self) -> tuple[DocumentStatus, ...]:
        """All documents by their ids, and what is on its way or failed. Raises `RetrievalError` for a damaged index."""
        with (
            self._worker.changed
        ):  # before the index: what gets there meanwhile is told as on its way, and not left out
            waiting = [(task.upload, task.state) for task in self._worker.tasks]
            failed = dict(self._worker.failed)
        indexed = self._indexed()
        with self._worker.changed:
            found = {name: self._held(name, one) for name, one in indexed.items()}
        for name, (_, upload) in failed.items():
            one = found.get(name, DocumentStatus(name, upload.title or name, "failed"))
            found[name] = one._replace(state="failed", reason=upload.reason)
        for upload, state in waiting:
            if upload.kind == "delete":
                found = {name: one for name, one in found.items() if not part_of(name, upload.id)}
            else:
                chunks = found[upload.id].chunks if upload.id in found else 0
                found[upload.id] = DocumentStatus(upload.id, upload.title, state, chunks)
        return tuple(found[name] for name in sorted(found))

    def get(self, name: str) -> DocumentStatus | None:
        """A document by its id, or the name that it was uploaded under; of a file of many documents all together."""
        statuses = self.listing()
        for wanted in spellings(name):
            mine = [one for one in statuses if part_of(one.id, wanted)]
            if mine:
                exact = next((one for one in mine if one.id == wanted), None)
                return exact if exact and len(mine) == 1 else _together(wanted, mine)
        return None

    def delete(self, name: str, wait_s: float = 10.0) -> bool:
        """Remove a document, or all that were uploaded in one file; False where there is none of that id.

        When it returns, nothing new is answered from it; it is out of the index too, unless that takes longer than `wait_s`.
        Raises `StoreError` when the removal cannot be written down; the document then stays.
        """
        removal = self.remove(name)
        if removal is None:
            return False
        with suppress(TimeoutError):
            removal.result(wait_s)
        return True

    def remove(self, name: str) -> Future[None] | None:
        """The same without waiting: what is returned is done when it is out of the index, or was kept from it."""
        status = self.get(name)
        if status is None:
            return None
        removal = Upload("delete", status.id)
        with self._putting:
            try:
                (task,) = self._put([removal])
            except StoreError:  # a full disk: what goes makes the room to write down that it goes
                self._worker.free(status.id)
                (task,) = self._put([removal])
        return task.done

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of uploads that are to be removed, though the index may hold them still."""
        return self._worker.leaving

    @property
    def problem(self) -> str:
        """What the background failed at and tries again, in one line for the operator, or empty."""
        return self._worker.problem

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is indexed and computed as far as it can be; whether it is."""
        with self._worker.changed:
            return self._worker.changed.wait_for(lambda: self._worker.quiet, timeout_s)

    def close(self) -> None:
        """Stop working; what is not done waits on disk for the next process."""
        self._worker.close()

    def _require_room(self, uploads: Sequence[Upload]) -> None:
        with self._worker.changed:
            tasks = list(self._worker.tasks)
        if (nbytes := sum(task.nbytes for task in tasks)) + sum(
            len(upload.data) for upload in uploads
        ) > self._limits.waiting_bytes:
            raise UploadsFullError(nbytes)
        names = {*self._indexed(), *(task.upload.id for task in tasks), *(upload.id for upload in uploads)}
        if len(names) > self._limits.documents:
            raise ConfigError(
                f"the corpus would have {len(names):,} documents, at most {self._limits.documents:,} are taken: "
                "delete some, or use another corpus"
            )

    def _put(self, uploads: Sequence[Upload]) -> Sequence[Task]:
        """Write all of them down, or none."""
        tasks: list[Task] = []
        try:
            for upload in uploads:
                head = upload._replace(data=b"")
                tasks.append(Task(self._spool.put(upload), head, len(upload.data)))
        except BaseException:
            for task in tasks:
                self._spool.remove(task.number)
            raise
        self._worker.put(tasks)
        return tasks

    def _indexed(self) -> dict[str, _Indexed]:
        """What the index holds, by document."""
        index = current_index(self._rag)
        seen, found = self._seen
        if index is not seen:
            chunks: dict[str, list[Chunk]] = {}
            for chunk in index.chunks if index else ():
                chunks.setdefault(chunk.document_id, []).append(chunk)
            found = {name: _Indexed(mine[0].title.partition(" > ")[0], len(mine)) for name, mine in chunks.items()}
            self._seen = index, found
            self._worker.saw(found)
        return found

    def _held(self, name: str, indexed: _Indexed) -> DocumentStatus:
        """Of a document that the index holds."""
        progress = self._worker.caches.progress(name)
        if progress is None:
            if self._worker.problem:
                return DocumentStatus(name, indexed.title, "failed", indexed.chunks, reason=CORPUS_FAILS)
            return DocumentStatus(name, indexed.title, "computing", indexed.chunks)
        return DocumentStatus(name, indexed.title, progress.state, indexed.chunks, *progress[1:])


def _together(name: str, parts: Sequence[DocumentStatus]) -> DocumentStatus:
    """A file of several documents: as far as the least of them is."""
    least = min(parts, key=lambda one: _ORDER.index(one.state))
    chunks, done, total = (sum(counts) for counts in zip(*(one[3:6] for one in parts), strict=True))
    return DocumentStatus(name, name, least.state, chunks, done, total, least.reason)
