"""A lock between machines, on a name that is swapped: held for as long as its owner lives, and no longer.

The owner writes the name anew every few seconds. Who waits takes it over when it has not changed for `LEASE_S` seconds of its
own clock, so clocks need not agree. Nobody who swaps another's content away can do so twice, so one of many wins.

An owner that could not write it anew for so long, or finds another's content there, has lost it: what its thread would then
put, swap or delete in that backend is refused, since another process may be writing.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from blend.errors import StoreError
from blend.store.backend import Backend
from blend.store.files import WAIT_S

LEASE_S = 30.0
_NAME = "writing"
_MOST = 1 << 10
_FREE = b"free"
_LOOK_AFTER_S, _LOOK_EVERY_S = 0.02, 1.0  # at first, and in the end


class _Writers(threading.local):
    """The leases that this thread writes under."""

    def __init__(self) -> None:
        self.leases: list[_Lease] = []


_WRITERS = _Writers()


@contextmanager
def leased(backend: Backend, *, lease_s: float = LEASE_S, wait_s: float = WAIT_S) -> Iterator[None]:
    """Held by one thread of one process at a time. Raises `StoreError` when another keeps it for `wait_s` seconds."""
    lease = _acquired(backend, lease_s, wait_s)
    done = threading.Event()
    renewal = threading.Thread(target=lease.keep, args=(done,), name="kvblend-lease", daemon=True)
    renewal.start()
    _WRITERS.leases.append(lease)
    try:
        yield
    finally:
        _WRITERS.leases.remove(lease)
        done.set()
        renewal.join()
        with suppress(StoreError):  # it ends by itself after `lease_s`
            lease.release()


def require_lease(backend: Backend, name: str) -> None:
    """Before a write to a name: raise `StoreError` where this thread writes under a lease of that backend and has lost it."""
    for lease in _WRITERS.leases:
        if lease.backend is backend and name != _NAME:
            lease.require()


class _Lease:
    """held: what the name holds, as far as is known, and held at the moment `since` of the monotonic clock."""

    def __init__(self, backend: Backend, held: bytes, since: float, lease_s: float) -> None:
        self.backend, self._lease_s = backend, lease_s
        self._held, self._since = held, since
        self._tried: set[bytes] = set()  # the name may hold one of these: the answer may have got lost
        self._lost = False
        self._lock = threading.Lock()

    def keep(self, done: threading.Event) -> None:
        """Write it anew until then."""
        while not done.wait(self._lease_s / 4):
            with suppress(StoreError):  # the next attempt, or whoever writes, finds out
                self._write(_token())

    def require(self) -> None:
        """Raise `StoreError` unless it is ours for certain."""
        if not self._certain():
            self._write(_token())
        if not self._certain():
            raise StoreError(
                f"{self.backend.place} did not answer for {self._lease_s:g} s, and another process may be writing to it: "
                "run the same command again"
            )

    def release(self) -> None:
        """It is anybody's."""
        self._write(_FREE)

    def _certain(self) -> bool:
        return not self._lost and time.monotonic() - self._since <= self._lease_s

    def _write(self, new: bytes) -> None:
        """Have the name hold `new`, if it is ours. Raises `StoreError` where that is not known."""
        with self._lock:
            began = time.monotonic()
            if self._lost:
                return
            if not self._swapped(new):
                found = self.backend.read(_NAME, _MOST)
                if found is None or found not in {self._held, *self._tried}:
                    self._lost = True
                    return
                self._held = found
                if not self._swapped(new):
                    return
            self._since = began

    def _swapped(self, new: bytes) -> bool:
        self._tried.add(new)
        if not self.backend.swap(_NAME, new, self._held):
            return False
        self._held, self._tried = new, set()
        return True


def _acquired(backend: Backend, lease_s: float, wait_s: float) -> _Lease:
    mine, began = _token(), time.monotonic()
    seen, since, delay = b"", began, _LOOK_AFTER_S
    while True:
        content = backend.read(_NAME, _MOST)
        looked = time.monotonic()
        if content != seen:
            seen, since = content or b"", looked
        stale = looked - since > lease_s
        taken = content == mine  # by a swap whose answer got lost
        if taken or ((content in (None, _FREE) or stale) and backend.swap(_NAME, mine, content)):
            return _Lease(backend, mine, looked, lease_s)
        if time.monotonic() - began > wait_s:
            raise StoreError(
                f"another process has been writing to {backend.place} for {wait_s:g} s; wait for it and try again"
            )
        time.sleep(delay)
        delay = min(1.5 * delay, _LOOK_EVERY_S)


def _token() -> bytes:
    return uuid.uuid4().hex.encode()
