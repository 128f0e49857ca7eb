"""Threads that fetch what matters first first, and are there only while there is something to fetch."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count
from typing import NamedTuple


class _Job(NamedTuple):
    """Jobs of a lower rank run first, and of one rank those that came first."""

    rank: int
    turn: int
    run: Callable[[], None]


class Fetchers:
    """Runs jobs in `most` threads at once. A job must not raise."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turn = threading.Condition()
        self._jobs: list[_Job] = []
        self._turns = count()
        self._threads = 0

    def add(self, rank: int, run: Callable[[], None]) -> None:
        """Have it run."""
        with self._turn:
            heapq.heappush(self._jobs, _Job(rank, next(self._turns), run))
            if self._threads < min(self._most, len(self._jobs) + self._threads):
                self._threads += 1
                threading.Thread(target=self._work, name="kvblend-fetch", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to do; whether that came in time."""
        with self._turn:
            return self._turn.wait_for(lambda: self._threads == 0, timeout_s)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except BaseException:
                self._ended()
                raise

    def _next(self) -> _Job | None:
        """The first that waits; where there is none this thread is at its end, decided together."""
        with self._turn:
            if self._jobs:
                return heapq.heappop(self._jobs)
            self._end()
            return None

    def _ended(self) -> None:
        with self._turn:
            self._end()

    def _end(self) -> None:
        self._threads -= 1
        self._turn.notify_all()
