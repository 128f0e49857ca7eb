"""Memory that nobody uses any more goes back to the system.

glibc keeps what a thread freed for that thread's later use, in pieces between others that are still in use. Prompts of all
lengths leave many such gaps: a server that held 5 GB had 8.5 GB of the machine's.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

EVERY_S = 15.0  # it takes some 0.1 s a GB that goes back, in which nothing is computed


class Heap:
    """Gives back at most every `every_s` seconds; where the C library is another than glibc it does nothing."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s, self._last = every_s, time.monotonic()
        self._trim = _trim()

    def tidy(self) -> None:
        """Give back what is free, if it is time again."""
        if time.monotonic() - self._last >= self._every_s:
            self._trim(0)
            self._last = time.monotonic()


def _trim() -> Callable[[int], object]:
    if sys.platform != "linux":
        return lambda pad: None
    return getattr(ctypes.CDLL(None), "malloc_trim", None) or (lambda pad: None)
