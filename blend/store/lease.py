"""What places on servers share: errors in a line of ours, and the lock of writers.

The lock is a lease, which ends half a minute after the process that holds it. A process that slept for longer (a machine that
was suspended, a network that was away) has lost it without knowing. So each write of the thread that holds it looks whose the
lease is, and is refused if it is another's. Redis looks and writes in one step. A bucket is asked right before the write: a
process that sleeps between the two, for longer than the lease, may still write.
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from blend.errors import StoreError
from blend.store.backend import Backend

WAIT_S = 600.0  # choosing and measuring takes minutes on a slow machine
LEASE_S = 30.0
LEASE = "writing"  # the name that holds it
_FREE = b"free"
_LOOK_EVERY_S = 0.2


class _Writer(threading.local):
    """The leases under which this thread writes."""

    def __init__(self) -> None:
        self.leases: list[_Lease] = []


_WRITER = _Writer()


class ServerBackend(Backend):
    """Moves bytes to a server. `put`, `swap` and `delete` look after the lease under which their thread writes."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Held by one thread of one process at a time. Raises `StoreError` when another keeps it for ten minutes.

        The thread's writes raise `StoreError` once another process has taken the lease. Other threads write as ever.
        """
        lease = _Lease(self)
        lease.acquire()
        end = threading.Event()
        renewal = threading.Thread(target=lease.renew_until, args=(end,), name="kvblend-lease", daemon=True)
        renewal.start()
        _WRITER.leases.append(lease)
        try:
            yield
        finally:
            _WRITER.leases.remove(lease)
            end.set()
            renewal.join()
            with suppress(StoreError):  # it ends by itself after `LEASE_S`
                lease.write(_FREE)

    @property
    def lease_owner(self) -> bytes:
        """What the lease begins with while it is this thread's; empty where this thread writes under none."""
        owners = [lease.owner for lease in _WRITER.leases if lease.backend is self]
        return owners[-1] if owners else b""

    def require_lease(self) -> None:
        """Raise `StoreError` if this thread writes under a lease here that is another's by now."""
        owner = self.lease_owner
        if owner and not _is_of(owner, self.read(LEASE)):
            raise self.lease_is_lost()

    def lease_is_lost(self) -> StoreError:
        """The error for a write under a lease that is another's by now."""
        return StoreError(
            f"another process may be writing to {self.place}, because this one slept or did not reach it for over "
            f"{LEASE_S:g} s: run the same command again"
        )

    @contextmanager
    def exchange(self, doing: str) -> Iterator[None]:
        """Whatever the server's client raises as one line of ours. doing: "read" or "written"."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise self._failed(error, doing) from None

    @abstractmethod
    def _failed(self, error: Exception, doing: str) -> StoreError:
        """The line for an error of the client."""


class _Lease:
    """The name holds the owner and a number that changes with every renewal, so that others see that the owner is alive."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.owner = uuid.uuid4().hex.encode()
        self._turns = count()

    def acquire(self) -> None:
        """Take it when it is free, or was not renewed for as long as it lasts."""
        token = self._token()
        began = unchanged_since = time.monotonic()
        last_content: bytes | None = b""
        while True:
            content = self.backend.read(LEASE)
            now = time.monotonic()
            if content != last_content:
                last_content = content
                unchanged_since = now
            is_free = content in (None, _FREE) or now - unchanged_since > LEASE_S
            # It may be ours by a swap whose answer got lost.
            if content == token or (is_free and self.backend.swap(LEASE, token, content)):
                return
            if now - began > WAIT_S:
                raise StoreError(
                    f"another process has been writing to {self.backend.place} for {WAIT_S:g} s; wait for it and try again"
                )
            time.sleep(_LOOK_EVERY_S)

    def renew_until(self, end: threading.Event) -> None:
        """Renew it, again and again."""
        while not end.wait(LEASE_S / 4):
            with suppress(StoreError):  # the next attempt may succeed
                self.write(self._token())

    def write(self, new: bytes) -> None:
        """Have the name hold `new`, if it is ours. Raises `StoreError` where that is not known."""
        content = self.backend.read(LEASE)
        if _is_of(self.owner, content):
            self.backend.swap(LEASE, new, content)

    def _token(self) -> bytes:
        return self.owner + f" {next(self._turns)}".encode()


def _is_of(owner: bytes, content: bytes | None) -> bool:
    """Whether the lease is this owner's."""
    return content is not None and content.startswith(owner)
