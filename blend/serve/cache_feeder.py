"""What a corpus lacks goes to whoever computes it, piece by piece; what went from it takes its caches along."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from blend.chunks.library import Tokens, Variant
from blend.serve.caching import CacheProgress, Compute, Computing, Finished, LackingCaches
from blend.serve.corpus_keeper import Applied, CorpusKeeper
from blend.serve.reasons import log_failure

GiveUp = Callable[[], bool]
Calibrate = Callable[[Sequence[Tokens], bool, GiveUp], bool]
"""Measures the KV corrections on these chunks: those that are lacking, or all of them anew. False where it was given up."""


class CacheFeeder:
    """The corpus's own thread calls `change`, `forget` and `step`; what they share with others is under `changed`.

    interrupted: whether that thread has something to do that must not wait for a measurement.
    """

    def __init__(
        self,
        keeper: CorpusKeeper,
        compute: Compute,
        calibrate: Calibrate | None,
        changed: threading.Condition,
        interrupted: GiveUp,
    ) -> None:
        self._keeper, self._compute, self._calibrate, self._changed = keeper, compute, calibrate, changed
        self._interrupted, self._anew = interrupted, False
        self._caches = LackingCaches()
        self._handle: Computing = Finished()
        self._strays: list[Tokens] = []  # chunks that were computed when they had gone
        self._computed, self._settled = 0, True

    @property
    def due(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._strays) or (self._caches.idle and not (self._caches.complete and self._settled))

    @property
    def quiet(self) -> bool:
        """Whether everything is computed, as far as it can be, and nothing is left to be removed."""
        return not self._strays and self._caches.complete and self._settled

    def progress(self, document: str) -> CacheProgress | None:
        """Of a document; None for one that is not known."""
        return self._caches.progress(document)

    def knows(self, documents: Collection[str]) -> bool:
        """Whether these are the documents."""
        return self._caches.knows(documents)

    def retry(self) -> None:
        """Have those computed that could not be."""
        self._caches.retry()

    def cancel(self) -> None:
        """Have nothing more computed of what was handed over."""
        with self._changed:
            handle = self._handle
        handle.cancel()

    def change(self, applied: Applied) -> None:
        """The corpus has changed."""
        chunks, prepared = applied
        with self._changed:
            stale = self._caches.replace(prepared.library, chunks, prepared.variants, prepared.missing)
            self._settled = False
        if stale:  # not under the lock: who is told to stop may be waiting for it
            self.cancel()

    def step(self) -> None:
        """Remove what was computed for chunks that went; have the next caches computed; settle when all are there."""
        if self._strays:
            self.forget()
        else:
            self._hand_over()

    def forget(self) -> None:
        """Remove the caches of what went, also those that were computed meanwhile. Raises `StoreError`."""
        with self._changed:
            strays, self._strays = self._strays, []
            library, current = self._caches.library, self._caches.chunks
        if library is not None:
            self._keeper.forget(strays, library, current)

    def _hand_over(self) -> None:
        """Have the next caches computed; when all are there, see to what depends on them."""
        with self._changed:
            piece, library = self._caches.piece(), self._caches.library
        if library is None:
            return
        if not piece:
            self._settle()
            return
        try:
            handle = self._compute(library, piece, self._on_done)
        except Exception as error:  # whoever computes takes nothing in, or has ended
            for one in piece:
                self._on_done(one, error)
        else:
            with self._changed:
                self._handle = handle

    def _on_done(self, one: Variant, error: Exception | None) -> None:
        with self._changed:
            if error is not None and not self._caches.refused:  # a store that is full refuses thousands
                log_failure(error)
            self._computed += error is None
            if not self._caches.done(one, error):
                self._strays.append(one.chunk)
            self._changed.notify_all()

    def _settle(self) -> None:
        """All caches are there: remove those that are to make room for them, measure what is measured on them."""
        with self._changed:
            library, current = self._caches.library, self._caches.chunks
            self._anew = self._anew or 2 * self._computed > self._caches.count
            self._computed, done = 0, True
        assert library is not None
        try:
            if self._calibrate is not None:
                done = self._calibrate(current, self._anew, self._interrupted)
        finally:
            with self._changed:
                self._settled, self._anew = done, self._anew and not done
                self._changed.notify_all()
