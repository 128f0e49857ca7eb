"""A place that does not answer costs its timeout once; then it is left alone for a while, and told about once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError

LOG = logging.getLogger("kvblend.store")


class LeftAloneError(StoreUnreachableError):
    """A place was not asked, because it has just failed: what it failed with then was told then."""


class Breaker:
    """Lets calls through until one fails with an outage, none for `pause_s` seconds, then one to see.

    An outage: what `counts` says, of errors that are no damage.
    """

    def __init__(self, pause_s: float, counts: Callable[[StoreError], bool]) -> None:
        self._pause_s, self._counts = pause_s, counts
        self._lock = threading.Lock()
        self._error: StoreError | None = None
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether calls are refused."""
        with self._lock:
            return self._error is not None and time.monotonic() < self._until

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one call. Raises what the last one failed with while that counts, without trying."""
        self._enter()
        try:
            yield
        except EntryDamagedError:
            self._answered()
            raise
        except StoreError as error:
            if self._counts(error):
                self._trip(error)
            else:
                self._answered()
            raise
        except BaseException:
            raise
        else:
            self._answered()

    def _enter(self) -> None:
        with self._lock:
            if self._error is None:
                return
            now = time.monotonic()
            if now < self._until:
                raise LeftAloneError(str(self._error))
            self._until = now + self._pause_s  # this call looks; the others go on without

    def _trip(self, error: StoreError) -> None:
        with self._lock:
            self._error, self._until = error, time.monotonic() + self._pause_s

    def _answered(self) -> None:
        with self._lock:
            self._error = None


class Told:
    """Warnings in the log `kvblend.store`, each kind once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: set[tuple[str, str]] = set()

    def once(self, place: str, kind: str, line: str) -> None:
        """Warn, unless this kind was told of this place before."""
        with self._lock:
            known = (place, kind) in self._kinds
            self._kinds.add((place, kind))
        if not known:
            LOG.warning("%s", line)
