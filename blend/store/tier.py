"""One of several places for the same bytes: asked while it answers, left alone while it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from blend.errors import EntryDamagedError, EntryTooLargeError, StoreError, StoreUnreachableError
from blend.store.backend import Backend, Breaker, LeftAloneError, Told

T = TypeVar("T")


class Authority:
    """The place that has everything: an outage of it is one, and is raised, at once after the first time."""

    def __init__(self, backend: Backend, pause_s: float, told: Told) -> None:
        self.backend, self._told = backend, told
        self._breaker = Breaker(pause_s, lambda error: isinstance(error, StoreUnreachableError))

    @contextmanager
    def asked(self) -> Iterator[Backend]:
        """The backend, for one call. Raises `StoreError`."""
        try:
            with self._breaker():
                yield self.backend
        except LeftAloneError:
            raise
        except StoreUnreachableError as error:
            self._told.once(self.backend.place, "down", f"{error}; only what is in nearer tiers is used meanwhile")
            raise


class Nearer:
    """A place that is nearer and may lack anything: whatever is wrong with it, the others are asked instead."""

    def __init__(self, backend: Backend, pause_s: float, told: Told) -> None:
        self.backend, self._told = backend, told
        self._reading = Breaker(pause_s, lambda error: True)
        self._writing = Breaker(pause_s, lambda error: not isinstance(error, EntryTooLargeError))

    def read(self, call: Callable[[Backend], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` where the place fails or is left alone."""
        try:
            with self._reading():
                return call(self.backend)
        except EntryDamagedError:
            return otherwise
        except StoreError as error:
            self._tell("read", error)
            return otherwise

    def write(self, call: Callable[[Backend], object]) -> None:
        """Do it if it can be done; a place that cannot even be read is not written to."""
        if self._reading.open:
            return
        try:
            with self._writing():
                call(self.backend)
        except StoreError as error:
            self._tell("written", error)

    @contextmanager
    def asked(self) -> Iterator[Backend]:
        """The backend, for one read. Raises `StoreError`, at once while it is left alone."""
        with self._reading():
            yield self.backend

    def failed(self, name: str, error: StoreError) -> None:
        """Take note of what was wrong with a blob of this name: one that is damaged goes."""
        if not isinstance(error, EntryDamagedError):
            self._tell("read", error)
            return
        place = self.backend.place
        self._told.once(place, "damaged", f"{place} held bytes that were never written: they are fetched again")
        with suppress(StoreError):
            self.write(lambda backend: backend.delete(name))

    def _tell(self, doing: str, error: StoreError) -> None:
        if isinstance(error, LeftAloneError):
            return
        if isinstance(error, EntryTooLargeError):
            self._told.once(self.backend.place, "too large", f"{error}; the store goes on without a copy there")
            return
        kind = "down" if isinstance(error, StoreUnreachableError) else doing
        self._told.once(self.backend.place, kind, f"{error}; the store goes on without this tier meanwhile")
