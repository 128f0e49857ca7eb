"""The log of a long prefill: how far it is, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from blend.serve.failures import LOG

EVERY_S = 10.0
"""Seconds between two lines. A prefill that takes less has none."""


class ProgressLog:
    """Logs how far a prefill is, every `EVERY_S` seconds.

    Args:
        request_id: the request's, as the log names it.
        prompt_rows: of the whole prompt.
        clock: gives seconds.

    """

    def __init__(self, request_id: str, prompt_rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._id = request_id
        self._prompt_rows = prompt_rows
        self._clock = clock
        self._logged_at = clock()
        self._logged_rows = 0

    def update(self, rows_run: int, rows_to_run: int) -> None:
        """Log a line if it is time for one. Of the rows to compute so many are computed."""
        now = self._clock()
        seconds = now - self._logged_at
        if seconds < EVERY_S or rows_run >= rows_to_run:
            return
        # Of the last rows alone: later rows take longer.
        rows_a_second = max(0, rows_run - self._logged_rows) / seconds
        self._logged_at = now
        self._logged_rows = rows_run
        fields = {"id": self._id, "prompt": self._prompt_rows, "computed": rows_run, "of": rows_to_run}
        speed = {"rows_s": round(rows_a_second, 1)}
        if rows_a_second:
            speed["left_s"] = round((rows_to_run - rows_run) / rows_a_second)
        LOG.info("prefill", extra={**fields, **speed})
