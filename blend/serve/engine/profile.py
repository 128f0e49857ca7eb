"""What full prefill would take: measured for prompts that were computed in full, estimated for the others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cachetools import LRUCache

from blend.layout import PromptLayout
from blend.model.decoder import full_prefill
from blend.model.outline import query_numbers

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

PROFILED_ROWS = 256
TIMINGS = 3  # the first warms up; other programs only make one slower
MEASURED_PROMPTS = 1024


class PrefillProfile:
    """Estimates what full prefill takes by prompt length: operations, at the measured rate. Threads may share it.

    A row takes 2 operations a parameter, and its attention 4 for each key, query head and head dimension in every layer.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._lock = threading.Lock()
        self._of_row = 2.0 * decoder.layer_weights
        self._of_pair = 4.0 * query_numbers(decoder.config) * len(decoder.layers)
        self._rate: float | None = None
        self._prompts: LRUCache[int, float] = LRUCache(MEASURED_PROMPTS)
        token = 1 % decoder.vocabulary
        rows = min(PROFILED_ROWS, (decoder.context_length or PROFILED_ROWS) - 1)
        self._sample = PromptLayout((token,), (), (token,) * (rows - 1))  # an answer of one token fits behind it

    def measure(self) -> None:
        """Time full prefill now; nothing else may be computed meanwhile."""
        self.timed(min(full_prefill(self._decoder, self._sample).ttft_s for _ in range(TIMINGS)))

    def timed(self, seconds: float) -> None:
        """Full prefill of the sample took so long; this replaces earlier timings."""
        self._rate = self._operations(self._sample.rows) / max(seconds, 1e-9)

    def took(self, prompt: int, seconds: float) -> None:
        """Full prefill of this prompt, named by a hash, took so long."""
        with self._lock:
            self._prompts[prompt] = seconds

    def measured(self, prompt: int) -> float | None:
        """Seconds of its last full prefill; None if unknown."""
        with self._lock:
            return self._prompts.get(prompt)

    def seconds(self, rows: int) -> float | None:
        """The estimate for a prompt of so many rows; None while nothing was measured."""
        return None if self._rate is None else self._operations(rows) / self._rate

    def _operations(self, rows: int) -> float:
        return rows * self._of_row + rows * (rows + 1) // 2 * self._of_pair
