"""What a worker stores: caches that prompts missed, and texts of clients within a budget.

Rows are computed in the engine's thread, a few at a time: in some of its steps while answers run, in all while none do. A
thread reads and writes the store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import ConfigError, StoreError, first_line
from blend.integrations.vllm.contract import OutageLog
from blend.integrations.vllm.decoder import PagedDecoder
from blend.limits import check_number
from blend.prefill.blender import Blender
from blend.serve.engine.background import EncodingQueue, IOPool
from blend.serve.limits import LEARN_BUDGET
from blend.serve.prompts.learned import LearnedCaches
from blend.types import CacheKey, PlaceOrigin, Tokens

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.types import PromptLayout

CPU_ROWS, GPU_ROWS = 32, 256
"""Rows of a piece, meant to take about as long as a step that decodes a few answers; measured on a CPU."""
TURN = 4  # while answers run, one step in so many computes a piece, as in `blend serve`
_WAIT_S = 0.01  # for the store while nothing runs, so that the engine does not spin


def learn_budget(options: Mapping[str, Any]) -> int:
    """Bytes of the store for clients' texts; 0 stores none. Raises `ValueError`, in one line."""
    learn = options.get("learn", True)
    budget = options.get("learn_budget", LEARN_BUDGET / 1e9)
    if not isinstance(learn, bool):
        raise ValueError(f"kvblend: learn is {learn!r}; give true or false")
    try:
        check_number("learn_budget", budget)
    except ConfigError as error:
        raise ValueError(f"kvblend: {error}") from None
    return round(budget * 1e9) if learn else 0


class BackgroundEncoder:
    """Computes and stores caches that prompts missed. The engine's thread calls it.

    learned: decides which caches of clients' texts are stored; None stores none.
    """

    def __init__(self, decoder: PagedDecoder, learned: LearnedCaches | None) -> None:
        rows = CPU_ROWS if decoder.device.type == "cpu" else GPU_ROWS
        self._decoder = decoder
        self._learned = learned
        self._news = threading.Event()
        self._thread = IOPool("kvblend-rows", 1, self._news.set)
        self._encodings = EncodingQueue(self._thread, rows, self._on_stored)
        self._turn = 0
        self._outage = OutageLog()

    def __len__(self) -> int:
        """How many caches are left, so far known."""
        return len(self._encodings)

    def remember(
        self,
        filler: Blender,
        layout: PromptLayout,
        missing: Sequence[CacheKey],
        user: str = "",
    ) -> None:
        """A prompt was blended, and the store lacked these caches.

        user: whose client's texts in it are learned; they count as used even if nothing is missing.
        """
        self._encodings.remember(lambda: self._allowed(filler, layout, missing, user))

    def run(self, *, alone: bool) -> None:
        """A step of the engine: run a piece, if it is time for one. alone: no request computes anything in the step."""
        self._turn += 1
        if not alone and self._turn % TURN:
            return
        self._news.clear()
        if self._encodings.ready():
            self._run_piece()
        elif alone and len(self):
            self._news.wait(_WAIT_S)

    def close(self) -> None:
        """Compute no more, and end."""
        self._encodings.close()
        self._thread.close()

    def _run_piece(self) -> None:
        try:
            self._decoder.run_rows(self._encodings.next_rows())
        except Exception as error:  # of this cache; the next one may be computed
            self._encodings.fail(error)
        else:
            self._encodings.took(torch.empty((1, 0)))  # a chunk's logits are not used

    def _allowed(
        self,
        filler: Blender,
        layout: PromptLayout,
        missing: Sequence[CacheKey],
        user: str,
    ) -> tuple[ChunkLibrary, Sequence[CacheKey]]:
        """The missing caches that may be stored, and those of new texts. In the store's thread."""
        library = filler.library(layout.kept_behind)
        corpus = {place.whole for place in layout.places if place.origin is PlaceOrigin.CORPUS}
        brought = {place.whole for place in layout.places if place.is_brought} - corpus
        learned = self._admitted(library, sorted(brought), user)
        allowed = [key for key in missing if key.chunk not in brought or key.chunk in learned]
        return library, list(dict.fromkeys([*allowed, *library.missing(sorted(learned))]))

    def _admitted(self, library: ChunkLibrary, texts: Sequence[Tokens], user: str) -> set[Tokens]:
        if self._learned is None or not texts:
            return set()
        try:
            return self._learned.admitted(library, texts, user)
        except StoreError as error:
            self._warn(error)
            return set()

    def _on_stored(self, key: CacheKey, error: Exception | None) -> None:
        if error is not None:
            self._warn(error)
        else:
            self._outage.works()

    def _warn(self, error: Exception) -> None:
        self._outage.failed("kvblend: a chunk's cache could not be stored: %s", first_line(error))
