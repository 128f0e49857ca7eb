"""Instruments of a soak of stores: the time of breakers, how late threads are waked, what the store tells."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter

_KINDS = (("damaged", "never written"), ("too large", "without a copy"), ("down", "cannot be|half of"), ("refused", ""))


class Clock:
    """The time of breakers."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        """As `time` has it, and ahead of it."""
        return time.monotonic() + self.ahead_s


class Pulse(threading.Thread):
    """How late this process's threads are waked, at worst since `late_s` was set to 0."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_s, self._done = 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        """Until `end`."""
        while not self._done.is_set():
            began = time.monotonic()
            time.sleep(0.02)
            self.late_s = max(self.late_s, time.monotonic() - began - 0.02)

    def end(self) -> None:
        """No more."""
        self._done.set()


class Lines(logging.Handler):
    """What the store tells."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Kept."""
        self.lines.append(record.getMessage())

    def told(self) -> dict[tuple[str, str], int]:
        """How often each kind of failure of each place."""
        return Counter((line.split(" ")[0], _kind(line)) for line in self.lines)


def _kind(line: str) -> str:
    return next(kind for kind, words in _KINDS if re.search(words, line))
