"""A thread that loads what will be needed, and is there only while there is something to load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from blend.errors import StoreError

MOST_WAITING = 256


class ReadAhead:
    """Calls `load(name, ahead, most_bytes)` for one name after another, in the order in which they came, in one thread.

    ahead: whether somebody will use it, and has not yet. most_bytes: that it may take, where that is known. A `StoreError` of
    `load`, damage among them, is not reported: whoever needs the entry meets it.
    """

    def __init__(self, load: Callable[[str, bool, int | None], None]) -> None:
        self._load = load
        self._turn = threading.Condition()
        self._waiting: dict[str, tuple[bool, int | None]] = {}  # in order
        self._thread: threading.Thread | None = None

    def add(self, names: Iterable[str], *, ahead: bool, most_bytes: int | None = None) -> None:
        """Load these, unless they wait already; what is too much is forgotten."""
        with self._turn:
            for name in names:
                if len(self._waiting) < MOST_WAITING:
                    self._waiting.setdefault(name, (ahead, most_bytes))
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvblend-read-ahead", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to load; whether that came in time."""
        with self._turn:
            return self._turn.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        try:
            while (waiting := self._next()) is not None:
                with suppress(StoreError):
                    self._load(*waiting)
        except BaseException:
            self._ended()
            raise

    def _next(self) -> tuple[str, bool, int | None] | None:
        """The first that waits; where there is none this thread is at its end, decided together."""
        with self._turn:
            if not self._waiting:
                self._ended()
                return None
            name = next(iter(self._waiting))
            return name, *self._waiting.pop(name)

    def _ended(self) -> None:
        with self._turn:
            self._thread = None
            self._turn.notify_all()
