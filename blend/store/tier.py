"""A place of a tiered store behind its circuit breaker, and open copies of entries in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.backend import Backend, Blob, Found
from blend.store.breaker import CircuitBreaker, CircuitOpenError
from blend.store.format import EntryHeader

LOG = logging.getLogger("kvblend.store")
T = TypeVar("T")
_MEANWHILE = "the store goes on without this tier meanwhile"


class Tier:
    """One place, which is left alone for a while after it did not answer.

    Each kind of failure is logged once. kind: "far", "hot" or "local".
    """

    def __init__(self, kind: str, backend: Backend, pause_s: float) -> None:
        self.kind = kind
        self.backend = backend
        self._breaker = CircuitBreaker(pause_s)
        self._lock = threading.Lock()
        self._told: set[str] = set()

    @contextmanager
    def guard(self) -> Iterator[Backend]:
        """The backend, for one call. Raises `StoreError`, at once while the breaker is open."""
        try:
            with self._breaker():
                yield self.backend
        except StoreUnreachableError as error:
            self._warn(error, f"{error}; {_MEANWHILE}")
            raise

    def attempt(self, call: Callable[[Backend], T], otherwise: T) -> T:
        """The result of `call`, or `otherwise` when the place fails or its breaker is open."""
        try:
            with self.guard() as backend:
                return call(backend)
        except StoreError as error:
            if not isinstance(error, EntryDamagedError):
                self._warn(error, f"{error}; {_MEANWHILE}")
        return otherwise

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """See `Backend.open_many`; a nearer place that fails has nothing."""
        if self.kind != "far":
            return self.attempt(lambda backend: backend.open_many(names), [None] * len(names))
        with self.guard() as far:
            return far.open_many(names)

    def report(self, name: str, error: StoreError) -> None:
        """A copy met this error: delete it if its bytes are not those that were written, but not in the far place."""
        if isinstance(error, EntryDamagedError) and self.kind != "far":
            place = self.backend.place
            self._warn(error, f"{place} held bytes that were never written: they are fetched again")
            self.attempt(lambda backend: backend.delete(name), None)

    def _warn(self, error: StoreError, line: str) -> None:
        if not isinstance(error, CircuitOpenError):
            self.warn_once(type(error).__name__, line)

    def warn_once(self, kind: str, line: str) -> None:
        """Log the line, unless one of this kind was logged before."""
        with self._lock:
            is_told = kind in self._told
            self._told.add(kind)
        if not is_told:
            LOG.warning("%s", line)


class Copy(NamedTuple):
    """An open copy of an entry. header: verified."""

    tier: Tier
    blob: Blob
    header: EntryHeader

    def read(self, offset: int, into: memoryview) -> None:
        """See `Blob.read`."""
        with self.tier.guard():
            self.blob.read(offset, into)

    def whole(self) -> memoryview:
        """Read the whole entry, verify it and close the copy. Raises `EntryDamagedError` or `StoreError`."""
        header = self.header
        try:
            content = _memory_for(header)
            begin = len(header.beginning)
            self.read(begin, content[begin:])
            for index, layer in enumerate(header.layers):
                if not header.holds(index, content[layer.offset :][: layer.nbytes]):
                    raise EntryDamagedError(f"layer {index} is not what was written")
            return content
        finally:
            self.blob.close()


def _memory_for(header: EntryHeader) -> memoryview:
    """Memory that begins with the header. Raises `EntryDamagedError` when there is too little: a header can be forged."""
    try:
        content = memoryview(bytearray(header.nbytes))
    except (MemoryError, OverflowError):
        raise EntryDamagedError(f"it claims {header.nbytes:,} bytes, which there is no memory for") from None
    content[: len(header.beginning)] = header.beginning
    return content
