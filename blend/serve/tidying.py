"""Freed memory goes back to the system, where it can be when nobody waits for a token."""

from __future__ import annotations

import time

from blend.model import cpu

# Seconds between two times: .2 s for a gigabyte, in which no token is computed.
IDLE_S, BUSY_S = 60.0, 600.0


class Tidying:
    """Of one engine's thread."""

    def __init__(self) -> None:
        self._tidied, self._untidy = time.monotonic(), False

    def used(self) -> None:
        """Memory was used, and may have been freed."""
        self._untidy = True

    @property
    def due_s(self) -> float | None:
        """Seconds in which to `tidy` where nothing else is to be done; None where there is nothing to give back."""
        return IDLE_S if self._untidy else None

    def tidy(self, *, busy: bool) -> None:
        """Give back what is free, if there may be any and it is time. busy: whether somebody waits for a token."""
        if self._untidy and time.monotonic() - self._tidied >= (BUSY_S if busy else IDLE_S):
            cpu.give_back()
            self._tidied, self._untidy = time.monotonic(), False
