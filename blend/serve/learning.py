"""What is decided and measured of learned texts, when nobody waits: a surrogate context and KV corrections.

Without documents nothing else gives a tenant's chunks these, and blends of them would stay further from full recompute.
A tenant's are made of its own texts alone, and lie in its own store. Where documents are there, theirs are used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blend.chunks.deciding import with_given_surrogate, with_surrogate
from blend.errors import StoreError
from blend.serve.caching import Compute
from blend.serve.corpus_keeper import current_index
from blend.serve.heard import SHARE, Tokens
from blend_retrieval import RetrievalError

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.chunks.open_library import Variant
    from blend.rag import Rag
    from blend.serve.passages.learned import Learned
    from blend.serve.room import Room

LOG = logging.getLogger("kvblend.serve")
Calibrate = Callable[["Rag", Sequence[Tokens]], bool]
"""Measures the missing KV corrections on these chunks when no request waits; returns whether it finished."""


class Learning:
    """A thread beside an engine. compute: of the engine. calibrate: waits by itself until nobody else does."""

    def __init__(self, compute: Compute, calibrate: Calibrate) -> None:
        self._compute, self._calibrate = compute, calibrate
        self._changed = threading.Condition()
        self._due: list[Room] = []
        self._left, self._busy, self._closed = 0, False, False
        self._thread = threading.Thread(target=self._run, name="kvblend-learning", daemon=True)
        self._thread.start()

    def told(self, room: Room) -> None:
        """A question has brought this tenant texts; takes no time."""
        if is_due(room):
            with self._changed:
                if room not in self._due:
                    self._due.append(room)
                    self._changed.notify_all()

    @property
    def quiet(self) -> bool:
        """Whether nothing is to be decided or measured."""
        return not (self._due or self._busy)

    def close(self) -> None:
        """End; what is not done is done another time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.wait_for(lambda: self._due or self._closed)
                if self._closed:
                    return
                room, self._busy = self._due.pop(0), True
            try:
                if is_due(room) and not _has_documents(room.rag()):
                    self._decide(room)
            except Exception as error:  # a store that is down, an engine that closes; the next question reminds
                quotes_nobody = isinstance(error, StoreError | RetrievalError)
                why = str(error) if quotes_nobody else type(error).__name__
                LOG.warning("learning_failed", extra={"told": {"why": why}})

    def _decide(self, room: Room) -> None:
        """Choose the surrogate context, have the caches computed that it calls for, measure on them."""
        rag, learned = room.rag(), room.learned
        assert learned is not None
        library = _with_surrogate(rag, _latest(room, learned))
        chunks = _latest(room, learned)  # what came meanwhile was still computed without a surrogate context
        room.enter("", chunks, learned)
        self._have_computed(library, library.missing(chunks))
        if self._closed:
            return
        if self._calibrate(rag, chunks):
            learned.decided = True
            learned.save()

    def _have_computed(self, library: ChunkLibrary, missing: Sequence[Variant]) -> None:
        """Piece by piece, beside what is asked meanwhile."""
        if not missing:
            return
        with self._changed:
            self._left = len(missing)
        handle = self._compute(library, missing, self._on_done)
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0 or self._closed)
        handle.cancel()

    def _on_done(self, one: Variant, error: Exception | None) -> None:
        with self._changed:
            self._left -= 1
            self._changed.notify_all()


def is_due(room: Room) -> bool:
    """Whether enough was learned to choose a surrogate context, and none was chosen yet."""
    learned, tokens = room.learned, room.rag().corpus_config.surrogate_tokens
    if learned is None or not tokens or learned.decided:
        return False
    return room.heard.tokens >= SHARE * tokens


def _latest(room: Room, learned: Learned) -> list[Tokens]:
    """As much as the budget has room for: a chunk has two caches."""
    return room.heard.latest(learned.budget // (2 * room.token_bytes))


def _has_documents(rag: Rag) -> bool:
    index = current_index(rag)
    return index is not None and bool(index.chunks)


def _with_surrogate(rag: Rag, chunks: Sequence[Tokens]) -> ChunkLibrary:
    config, library = rag.corpus_config, rag.blender.library(rag.template.prefix)
    if config.surrogate_text:
        return with_given_surrogate(
            library, tuple(rag.template.encode(config.surrogate_text)[: config.surrogate_tokens])
        )
    return with_surrogate(library, chunks, config.surrogate_tokens)
