"""What an outage costs: timeouts of servers, and circuit breakers that leave a failed place alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from blend.errors import StoreError, StoreUnreachableError


class Timeouts(NamedTuple):
    """Seconds: for a connection, for one answer, and until a server that did not answer is asked again."""

    connect_s: float = 2.0
    answer_s: float = 10.0
    pause_s: float = 15.0


class CircuitOpenError(StoreUnreachableError):
    """The breaker is open: the place has just failed. Its error was reported then."""


class CircuitBreaker:
    """Refuses calls for `pause_s` seconds after one met an outage, then lets one through to try.

    Other errors, damage among them, show that the place answers.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._outage: StoreUnreachableError | None = None
        self._until = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Guards one call. Raises `CircuitOpenError` with the last error while the breaker is open."""
        with self._lock:
            if self._outage is not None:
                if time.monotonic() < self._until:
                    raise CircuitOpenError(str(self._outage))
                self._until = time.monotonic() + self._pause_s  # while this call tries
        try:
            yield
        except StoreUnreachableError as error:
            self._until = time.monotonic() + self._pause_s
            self._outage = error
            raise
        except StoreError:
            self._outage = None
            raise
        self._outage = None
