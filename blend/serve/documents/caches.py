"""A corpus's index and chunk caches: apply a change, compute what is missing, delete what is no longer used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from blend.chunks.library import ChunkLibrary
from blend.corpus import Corpus, CorpusChange, DividedDocuments, PreparedCorpus, plan_change, prepare, render_passage
from blend.errors import ConfigError, StoreError
from blend.layout import Tokens
from blend.serve.documents.queue import CacheProgress, UploadQueue
from blend.serve.documents.uploads import part_of
from blend.serve.engine.background import Compute
from blend.serve.failures import LOG, log_failure, reason_of
from blend.serve.removed import removed_from
from blend.types import CacheKey
from blend_retrieval import Document, divide_in_steps, passage_text
from blend_retrieval.errors import IndexDamagedError, IndexMissingError
from blend_retrieval.index import salvaged

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from blend.rag import Rag
    from blend_retrieval import Chunk, ChunkIndex

EMBEDDED_AT_ONCE = 32  # chunks
PIECE = 4  # caches that are computed before their progress is noted and changes of the corpus are looked for

CalibrateCorpus = Callable[[Sequence[Tokens], bool, Callable[[], bool]], bool]
"""Measures the KV corrections on these chunks: the missing ones, or all anew; asks whether to give up. False if it did."""

ChunksOf = Mapping[str, frozenset[Tokens]]
"""Token ids of each document's chunks."""


def current_index(rag: Rag) -> ChunkIndex | None:
    """The index of the corpus as it is now; None before its first document."""
    try:
        return rag.index
    except (IndexMissingError, ConfigError):  # the latter if the store has other corpora only
        return None


class CorpusUpdater:
    """Applies changes to the index of one corpus; one thread uses it.

    uploads: records the chunks whose caches must be deleted, in case the process dies first. on_gone: deletes other data of
    these texts.
    """

    def __init__(self, rag: Rag, uploads: UploadQueue, on_gone: Callable[[Collection[Tokens]], None]) -> None:
        self._rag = rag
        self._uploads = uploads
        self._on_gone = on_gone
        self._known: dict[str, Tokens] = {}

    def require_store(self) -> None:
        """Raise `StoreError` if the store cannot be read."""
        _ = self._rag.store.generation

    def documents(self) -> set[str]:
        """Ids of the documents in the index."""
        return {chunk.document_id for chunk in self._indexed()}

    def tokenise(self) -> Generator[None, None, None]:
        """Tokenise the chunks of the index that are not known yet, which takes long after a start; pauses often."""
        corpus = self._corpus()
        for chunk in self._indexed():
            if chunk.id not in self._known:
                self._known[chunk.id] = corpus.token_ids(chunk)
                yield

    def divide(self, documents: Sequence[Document]) -> Generator[None, None, DividedDocuments]:
        """Divide documents, and tokenise and embed their new chunks; pauses often. Raises `RetrievalError`."""
        corpus = self._corpus()
        chunks: list[Chunk] = []
        for document in documents:
            chunks += yield from divide_in_steps(
                document, corpus.template.encode, corpus.config.chunk_tokens, render_passage
            )
        indexed = {chunk.id for chunk in self._indexed()}
        new = [chunk for chunk in chunks if chunk.id not in indexed]
        tokens: dict[str, Tokens] = {}
        for chunk in new:
            tokens[chunk.id] = corpus.token_ids(chunk)
            yield
        vectors: dict[str, npt.NDArray[np.float32]] = {}
        for start in range(0, len(new), EMBEDDED_AT_ONCE):
            batch = new[start : start + EMBEDDED_AT_ONCE]
            texts = [passage_text(chunk) for chunk in batch]
            vectors |= zip((chunk.id for chunk in batch), corpus.embedder().embed(texts), strict=True)
            yield
        return DividedDocuments(frozenset(document.id for document in documents), chunks, vectors, tokens)

    def apply(self, documents: DividedDocuments, removed: Sequence[str]) -> tuple[ChunksOf, PreparedCorpus]:
        """Add documents to the index, replacing those with the same ids, and remove uploads.

        Caches of removed chunks remain until `forget`. Raises `RetrievalError` and `StoreError`; then apply the same change
        again.
        """
        change = self._plan(documents, removed)
        useless = {*self._uploads.gone(), *change.gone}.difference(change.ids)
        if removed:  # first, because a full disk needs the room; `forget` retries what fails
            with suppress(StoreError):
                self._delete(useless)
        # Written first: a process that dies after writing the new index would not know what to delete.
        self._uploads.write_gone(useless)
        prepared = prepare(change)
        if prepared.update is not None and prepared.update.reason:
            LOG.warning("index_built_anew", extra={"why": prepared.update.reason})
        self._known = {chunk.id: change.corpus.token_ids(chunk) for chunk in change.chunks}
        library = prepared.library
        removed_from(self._rag.store).allow(map(library.key, library.variants(change.ids)))
        self._rag.store.advance()
        chunks: dict[str, set[Tokens]] = {}
        for chunk in change.chunks:
            chunks.setdefault(chunk.document_id, set()).add(self._known[chunk.id])
        return {name: frozenset(texts) for name, texts in chunks.items()}, prepared

    def forget(self) -> None:
        """Delete the caches of removed chunks. Raises `StoreError` and OSError."""
        if useless := self._uploads.gone():
            self._delete(useless)
            self._uploads.write_gone(())

    def free(self, removed: str) -> None:
        """Delete the caches of an upload that is to leave the index, without writing anything. Raises `StoreError`."""
        self._delete(self._plan(DividedDocuments(), [removed]).gone)

    def _delete(self, gone: Iterable[Tokens]) -> None:
        """Delete the caches of removed chunks. Running prompts keep those that they opened, and write none again."""
        chunks = list(gone)
        spare = self._corpus().spare(chunks)
        removed_from(self._rag.store).add(spare)
        for key in spare:
            self._rag.store.delete(key)
        self._on_gone(chunks)

    def _plan(self, documents: DividedDocuments, removed: Sequence[str]) -> CorpusChange:
        return plan_change(
            self._corpus(), documents, stays=lambda document: not any(part_of(document, upload) for upload in removed)
        )

    def _corpus(self) -> Corpus:
        return replace(self._rag.corpus(), known=self._known)

    def _indexed(self) -> Sequence[Chunk]:
        """The chunks of the index. Of a damaged one those that are sound; then the next `apply` builds it anew."""
        try:
            index = current_index(self._rag)
        except IndexDamagedError:
            return salvaged(self._rag.index_dir)
        return index.chunks if index else ()


class CorpusCaches:
    """The caches that a corpus should have: computes the missing ones piece by piece, then calibrates.

    The corpus's thread calls `reset` and `step`; `changed` guards all else.
    interrupted: whether that thread has more urgent work than calibration.
    """

    def __init__(
        self,
        compute: Compute,
        calibrate: CalibrateCorpus | None,
        changed: threading.Condition,
        interrupted: Callable[[], bool],
    ) -> None:
        self._compute = compute
        self._calibrate = calibrate
        self._changed = changed
        self._interrupted = interrupted
        self._library: ChunkLibrary | None = None
        self._chunks: ChunksOf = {}
        self._variants: dict[Tokens, list[CacheKey]] = {}
        self._missing: dict[CacheKey, None] = {}
        self._failed: dict[CacheKey, str] = {}
        self._computing: set[CacheKey] = set()
        self._finished: set[Tokens] = set()  # chunks whose progress has changed
        self._computed = 0
        self._settled = True
        self._anew = False

    @property
    def due(self) -> bool:
        """Whether `step` has something to do."""
        return not self._computing and (bool(self._missing or self._finished) or not self._settled)

    @property
    def quiet(self) -> bool:
        """Whether everything possible is computed."""
        return not self._computing and not self.due

    def progress(self) -> dict[str, CacheProgress]:
        """How far the caches of each document are whose progress has changed since the last call, by its id."""
        with self._changed:
            finished = self._finished
            self._finished = set()
            return {name: self._progress(texts) for name, texts in self._chunks.items() if texts & finished}

    def _progress(self, texts: frozenset[Tokens]) -> CacheProgress:
        variants = [variant for ids in texts for variant in self._variants.get(ids, ())]
        unfinished = [variant for variant in variants if variant in self._missing or variant in self._failed]
        total = _tokens(variants)
        reasons = (self._failed[variant] for variant in unfinished if variant in self._failed)
        return CacheProgress(total - _tokens(unfinished), total, next(reasons, ""))

    def reset(self, chunks: ChunksOf, prepared: PreparedCorpus) -> None:
        """Take in a changed corpus."""
        with self._changed:
            self._library = prepared.library
            self._chunks = chunks
            self._variants = {}
            for variant in prepared.variants:
                self._variants.setdefault(variant.chunk, []).append(variant)
            self._missing = dict.fromkeys(prepared.missing)
            self._failed = {}
            self._finished = set().union(*chunks.values())
            self._settled = False

    def retry(self) -> None:
        """Count failed caches as missing again."""
        self._missing |= dict.fromkeys(self._failed)
        self._failed = {}

    def step(self) -> None:
        """Queue the next missing caches, or calibrate if none is missing; does nothing while earlier ones are computed."""
        with self._changed:
            if self._computing:
                return
            piece = list(islice(self._missing, PIECE))
            self._computing = set(piece)
        if self._library is not None and piece:
            try:
                self._compute(self._library, piece, self._on_done)
            except Exception as error:  # the engine accepts nothing more, or has ended
                for variant in piece:
                    self._on_done(variant, error)
        elif not self._settled:
            self._settle()

    def _on_done(self, variant: CacheKey, error: Exception | None) -> None:
        with self._changed:
            self._computing.discard(variant)
            self._finished.add(variant.chunk)
            if error is None:
                self._computed += 1
            elif variant in self._missing:
                if not self._failed:  # once: a full store fails thousands
                    log_failure(error)
                self._failed[variant] = reason_of(error)
            self._missing.pop(variant, None)
            self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            current = list(self._variants)
            total = sum(map(len, self._variants.values()))
            self._anew = self._anew or 2 * self._computed > total
            self._computed = 0
            self._settled = True
        if self._calibrate is not None:
            self._settled = self._calibrate(current, self._anew, self._interrupted)
        self._anew = self._anew and not self._settled


def _tokens(variants: Iterable[CacheKey]) -> int:
    return sum(len(variant.chunk) for variant in variants)
