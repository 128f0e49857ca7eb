"""How far the reader of a long file is.

Readers call `report` now and then, and know nothing of who listens. Without a listener it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int, str], None]
"""(what is read, of how much, the unit, such as "pages"). The total is 0 if it is unknown."""
REPORT_EVERY_S = 0.2


class _Reports:
    """Passes on a report now and then."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._passed_on = time.monotonic()

    def report(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._passed_on >= REPORT_EVERY_S:
            self._passed_on = now
            self._listener(done, total, unit)


_reports: ContextVar[_Reports | None] = ContextVar("reports", default=None)


@contextmanager
def reported_to(listener: Listener) -> Iterator[None]:
    """Tell the listener how far a reader is while the block runs, in this thread, at most five times a second."""
    token = _reports.set(_Reports(listener))
    try:
        yield
    finally:
        _reports.reset(token)


def report(done: int, total: int, unit: str) -> None:
    """Say that so much of a file is read. total: 0 if it is unknown. Raises what the listener raises."""
    reports = _reports.get()
    if reports is not None:
        reports.report(done, total, unit)
