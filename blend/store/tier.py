"""A place of a tiered store behind its circuit breaker: the far one raises its errors, a nearer one may lack anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from blend.errors import EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.backend import Backend, Blob
from blend.store.breaker import CircuitBreaker, CircuitOpenError, WarnOnce
from blend.store.fetch import EntrySource

T = TypeVar("T")


class FarTier:
    """The place that has everything. Its outage is raised, from then on without another try until the breaker closes."""

    def __init__(
        self,
        backend: Backend,
        pause_s: float,
        warnings: WarnOnce,
    ) -> None:
        self.backend = backend
        self._warnings = warnings
        self._breaker = CircuitBreaker(pause_s, lambda error: isinstance(error, StoreUnreachableError))

    @contextmanager
    def guard(self) -> Iterator[Backend]:
        """The backend, for one call. Raises `StoreError`."""
        try:
            with self._breaker():
                yield self.backend
        except CircuitOpenError:
            raise
        except StoreUnreachableError as error:
            self._warnings.warn(self.backend.place, "down", f"{error}; only what is in nearer tiers is used meanwhile")
            raise

    def source(self, blob: Blob) -> EntrySource:
        """A copy to download from; its errors are raised."""
        return EntrySource(blob, self.guard, report=lambda error: None)


class CacheTier:
    """A nearer place, which may lack anything. Its errors are logged, and the next tier is asked instead."""

    def __init__(
        self,
        backend: Backend,
        pause_s: float,
        warnings: WarnOnce,
    ) -> None:
        self.backend = backend
        self._warnings = warnings
        self._reading = CircuitBreaker(pause_s, lambda error: isinstance(error, StoreError))
        self._writing = CircuitBreaker(pause_s, _is_write_outage)

    def read(self, call: Callable[[Backend], T], otherwise: T) -> T:
        """The result of `call`, or `otherwise` when the tier fails or its breaker is open."""
        try:
            with self._reading():
                return call(self.backend)
        except EntryDamagedError:
            return otherwise
        except StoreError as error:
            self._warn("read", error)
            return otherwise

    def write(self, call: Callable[[Backend], object]) -> None:
        """Do `call` if the tier works; one that cannot be read is not written to."""
        if self._reading.open:
            return
        try:
            with self._writing():
                call(self.backend)
        except StoreError as error:
            self._warn("written", error)

    @contextmanager
    def guard(self) -> Iterator[Backend]:
        """The backend, for one read. Raises `StoreError`, at once while the breaker is open."""
        with self._reading():
            yield self.backend

    def source(self, name: str, blob: Blob) -> EntrySource:
        """A copy to read from."""
        return EntrySource(blob, self.guard, report=partial(self.report, name))

    def report(self, name: str, error: StoreError) -> None:
        """Log an error of a copy, and delete a damaged one."""
        if not isinstance(error, EntryDamagedError):
            self._warn("read", error)
            return
        place = self.backend.place
        self._warnings.warn(place, "damaged", f"{place} held bytes that were never written: they are fetched again")
        with suppress(StoreError):
            self.write(lambda backend: backend.delete(name))

    def _warn(self, doing: str, error: StoreError) -> None:
        if isinstance(error, CircuitOpenError):
            return
        kind = doing
        outcome = "the store goes on without this tier meanwhile"
        if isinstance(error, EntryTooLargeError):
            kind = "too large"
            outcome = "the store goes on without a copy there"
        elif isinstance(error, StoreUnreachableError):
            kind = "down"
        self._warnings.warn(self.backend.place, kind, f"{error}; {outcome}")


def _is_write_outage(error: Exception) -> bool:
    return isinstance(error, StoreError) and not isinstance(error, EntryTooLargeError)
