"""The lock of writers on a server: a lease, which ends half a minute after the process that holds it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from blend.errors import StoreError
from blend.store.backend import Backend

WAIT_S = 600.0  # choosing and measuring takes minutes on a slow machine
LEASE_S = 30.0
_NAME = "writing"
_LONGEST = 1 << 10  # bytes of its content
_FREE = b"free"
_FIRST_DELAY_S = 0.02
_LONGEST_DELAY_S = 1.0


class _Writers(threading.local):
    """The leases that this thread writes under."""

    def __init__(self) -> None:
        self.leases: list[_Lease] = []


_WRITERS = _Writers()


@contextmanager
def leased(
    backend: Backend,
    *,
    lease_s: float = LEASE_S,
    wait_s: float = WAIT_S,
) -> Iterator[None]:
    """Held by one thread of one process at a time. Raises `StoreError` when another keeps it for `wait_s` seconds."""
    lease = _Lease(backend, lease_s)
    end = threading.Event()
    lease.acquire(wait_s)
    renewal = threading.Thread(target=lease.renew_until, args=(end,), name="kvblend-lease", daemon=True)
    renewal.start()
    _WRITERS.leases.append(lease)
    try:
        yield
    finally:
        _WRITERS.leases.remove(lease)
        end.set()
        renewal.join()
        with suppress(StoreError):  # it ends by itself after `lease_s`
            lease.write(_FREE)


def require_lease(backend: Backend, name: str) -> None:
    """Before a write to a name: raise `StoreError` where this thread writes under a lease of that backend and has lost it."""
    for lease in _WRITERS.leases:
        if lease.backend is backend and name != _NAME:
            lease.require()


class _Lease:
    """The name holds the owner and a number that changes with every renewal, so that others see that the owner is alive.

    It was certainly ours at the moment `_since` of the monotonic clock.
    """

    def __init__(self, backend: Backend, lease_s: float) -> None:
        self.backend = backend
        self._lease_s = lease_s
        self._owner = uuid.uuid4().hex
        self._turns = count()
        self._since = float("-inf")
        self._lost = False
        self._lock = threading.Lock()

    def acquire(self, wait_s: float) -> None:
        """Take it when it is free, or was not renewed for as long as it lasts."""
        token = self._token()
        began = time.monotonic()
        delay_s = _FIRST_DELAY_S
        last_content = b""
        unchanged_since = began
        while True:
            content = self.backend.read(_NAME, _LONGEST)
            now = time.monotonic()
            if content != last_content:
                last_content = content or b""
                unchanged_since = now
            is_free = content in (None, _FREE) or now - unchanged_since > self._lease_s
            # It may be ours by a swap whose answer got lost.
            if content == token or (is_free and self.backend.swap(_NAME, token, content)):
                self._since = now
                return
            if time.monotonic() - began > wait_s:
                raise StoreError(
                    f"another process has been writing to {self.backend.place} for {wait_s:g} s; wait for it and try again"
                )
            time.sleep(delay_s)
            delay_s = min(1.5 * delay_s, _LONGEST_DELAY_S)

    def renew_until(self, end: threading.Event) -> None:
        """Renew it, again and again."""
        while not end.wait(self._lease_s / 4):
            with suppress(StoreError):  # the next attempt or the next write meets the error
                self.write(self._token())

    def require(self) -> None:
        """Raise `StoreError` unless it is certainly ours."""
        if not self._is_certain():
            self.write(self._token())
        if not self._is_certain():
            raise StoreError(
                f"{self.backend.place} did not answer for {self._lease_s:g} s, and another process may be writing to it: "
                "run the same command again"
            )

    def write(self, new: bytes) -> None:
        """Have the name hold `new`, if it is ours. Raises `StoreError` where that is not known."""
        with self._lock:
            now = time.monotonic()
            content = self.backend.read(_NAME, _LONGEST)
            if self._lost or content is None or not content.startswith(self._owner.encode()):
                self._lost = True
            elif self.backend.swap(_NAME, new, content):
                self._since = now

    def _is_certain(self) -> bool:
        return not self._lost and time.monotonic() - self._since <= self._lease_s

    def _token(self) -> bytes:
        return f"{self._owner} {next(self._turns)}".encode()
