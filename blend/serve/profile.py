"""What full prefill would have taken on this machine, from what it was measured to take."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from blend.model.decoder import full_prefill
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

MEASURED_ROWS = 256
_TIMINGS = 3  # the first one warms up; other programs only make one slower
_MEASURED_PROMPTS = 1024


class Profile:
    """Seconds of full prefill by the length of the prompt: operations, at the rate that was measured.

    A row takes 2 operations a parameter, and its attention 4 for each key, query head and head dimension in every layer.
    Threads may share it.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self._decoder, self._lock = decoder, threading.Lock()
        weights = sum(part.numel() for layer in decoder.layers for part in layer.parameters())
        heads = getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
        self._of_row, self._of_pair = 2.0 * weights, 4.0 * heads * width * len(decoder.layers)
        self._rate: float | None = None
        self._prompts: OrderedDict[int, float] = OrderedDict()
        token = 1 % decoder.vocabulary
        rows = min(MEASURED_ROWS, (decoder.context_length or MEASURED_ROWS) - 1)
        self.sample = PromptLayout((token,), (), (token,) * (rows - 1))
        """The prompt that is timed; an answer of one token fits behind it."""

    def measure(self) -> None:
        """Time full prefill of some rows while nothing else is computed."""
        self.timed(min(full_prefill(self._decoder, self.sample).ttft_s for _ in range(_TIMINGS)))

    def timed(self, seconds: float) -> None:
        """Full prefill of the `sample` took so long; earlier timings count no more."""
        rows = self.sample.rows
        self.saw(rows, rows * (rows + 1) // 2, seconds, anew=True)

    def took(self, prompt: int, seconds: float) -> None:
        """Full prefill of this very prompt, named by a hash, took so long."""
        with self._lock:
            self._prompts[prompt] = seconds
            self._prompts.move_to_end(prompt)
            if len(self._prompts) > _MEASURED_PROMPTS:
                self._prompts.popitem(last=False)

    def measured(self, prompt: int) -> float | None:
        """Seconds that full prefill of this very prompt took the last time; None where that is not known."""
        return self._prompts.get(prompt)

    def saw(self, rows: int, pairs: int, seconds: float, *, anew: bool = False) -> None:
        """Rows that look at so many keys together were computed in so many seconds, in one pass."""
        rate = self._operations(rows, pairs) / max(seconds, 1e-9)
        with self._lock:
            known = None if anew else self._rate
            self._rate = rate if known is None else math.exp(0.9 * math.log(known) + 0.1 * math.log(rate))

    def seconds(self, rows: int) -> float | None:
        """What full prefill of a prompt of so many rows takes; None while nothing was measured."""
        return None if self._rate is None else self._operations(rows, rows * (rows + 1) // 2) / self._rate

    def _operations(self, rows: int, pairs: int) -> float:
        return rows * self._of_row + pairs * self._of_pair
