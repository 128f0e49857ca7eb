"""How far the reader of a long file is.

Readers call `report` now and then, and know nothing of who listens. Without a listener it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Listener = Callable[[int, int, str], None]
"""(what is read, of how much, the unit, such as "pages"). The total is 0 if it is unknown. The unit is "" at the end."""
REPORT_EVERY_S = 0.2
Item = TypeVar("Item")


class _Reports:
    """Passes on a report now and then."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._passed_on = time.monotonic()
        self._has_reported = False

    def report(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._passed_on >= REPORT_EVERY_S:
            self._passed_on = now
            self._has_reported = True
            self._listener(done, total, unit)

    def end(self) -> None:
        if self._has_reported:
            self._listener(0, 0, "")


_reports: ContextVar[_Reports | None] = ContextVar("reports", default=None)


@contextmanager
def reported_to(listener: Listener) -> Iterator[None]:
    """Tell the listener how far a reader is while the block runs, in this thread, at most five times a second.

    A reader that ends within .2 s says nothing. Others end with (0, 0, "").
    """
    reports = _Reports(listener)
    token = _reports.set(reports)
    try:
        yield
    finally:
        _reports.reset(token)
        reports.end()


def report(done: int, total: int, unit: str) -> None:
    """Say that so much of a file is read. total: 0 if it is unknown. Raises what the listener raises."""
    reports = _reports.get()
    if reports is not None:
        reports.report(done, total, unit)


def reported(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """The items. Each is reported as read when the next one is asked for."""
    for number, item in enumerate(items, 1):
        yield item
        report(number, total, unit)
