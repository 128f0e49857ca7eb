"""What an outage costs: timeouts of servers, circuit breakers that leave a failed place alone, warnings once a place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreUnreachableError

LOG = logging.getLogger("kvblend.store")


class Timeouts(NamedTuple):
    """Seconds: for a connection, for one answer, and until a server that did not answer is asked again."""

    connect_s: float = 2.0
    answer_s: float = 10.0
    pause_s: float = 15.0


class CircuitOpenError(StoreUnreachableError):
    """The breaker is open: the place has just failed. Its error was reported then."""


class CircuitBreaker:
    """Refuses calls for `pause_s` seconds after one failed with an outage, then lets one at a time through to try.

    counts: whether an error is an outage; damage never is. Others show that the place answers.
    """

    def __init__(self, pause_s: float, counts: Callable[[Exception], bool]) -> None:
        self._pause_s = pause_s
        self._counts = counts
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._until = 0.0
        self._trying = False

    @property
    def open(self) -> bool:
        """Whether calls are refused."""
        with self._lock:
            return self._refuses()

    def _refuses(self) -> bool:
        return self._error is not None and (self._trying or time.monotonic() < self._until)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Guards one call. Raises `CircuitOpenError` with the last error while the breaker is open."""
        with self._lock:
            if self._refuses():
                raise CircuitOpenError(str(self._error))
            tries = self._error is not None
            self._trying = self._trying or tries
        outage: Exception | None = None
        try:
            yield
        except Exception as error:
            if not isinstance(error, EntryDamagedError) and self._counts(error):
                outage = error
            raise
        except BaseException:  # the caller gave up: nothing is known of the place
            outage = self._error
            raise
        finally:
            with self._lock:
                self._error = outage
                self._until = time.monotonic() + self._pause_s
                self._trying = self._trying and not tries


class WarnOnce:
    """Warnings in the log `kvblend.store`, each kind once a place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: set[tuple[str, str]] = set()

    def warn(
        self,
        place: str,
        kind: str,
        line: str,
    ) -> None:
        """Warn, unless this kind of warning was given for this place before."""
        with self._lock:
            is_known = (place, kind) in self._kinds
            self._kinds.add((place, kind))
        if not is_known:
            LOG.warning("%s", line)
