"""A lock between machines, on a name that is swapped: held for as long as its owner lives, and no longer.

The owner writes the name anew every few seconds. Who waits takes it over when it has not changed for `LEASE_S` seconds of its
own clock, so clocks need not agree. Nobody who swaps another's content away can do so twice, so one of many wins.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from blend.errors import StoreError
from blend.store.backend import Backend

LEASE_S = 30.0
WAIT_S = 600.0  # choosing and measuring takes minutes on a slow machine
_NAME = "writing"
_MOST = 1 << 10
_FREE = b"free"
_LOOK_AFTER_S, _LOOK_EVERY_S = 0.02, 1.0  # at first, and in the end


@contextmanager
def leased(backend: Backend, *, lease_s: float = LEASE_S, wait_s: float = WAIT_S) -> Iterator[None]:
    """Held by one thread of one process at a time. Raises `StoreError` when another keeps it for `wait_s` seconds."""
    held = _acquired(backend, lease_s, wait_s)
    done = threading.Event()
    renewal = threading.Thread(target=_renew, args=(backend, held, lease_s, done), name="kvblend-lease", daemon=True)
    renewal.start()
    try:
        yield
    finally:
        done.set()
        renewal.join()
        with suppress(StoreError):  # it ends by itself after `lease_s`
            backend.swap(_NAME, _FREE, held[0])


def _acquired(backend: Backend, lease_s: float, wait_s: float) -> list[bytes]:
    """What the name holds now that it is ours, in a list that `_renew` keeps up to date."""
    mine, began = _token(), time.monotonic()
    seen, since, delay = b"", began, _LOOK_AFTER_S
    while True:
        content = backend.read(_NAME, _MOST)
        if content != seen:
            seen, since = content or b"", time.monotonic()
        stale = time.monotonic() - since > lease_s
        if (content in (None, _FREE) or stale) and backend.swap(_NAME, mine, content):
            return [mine]
        if time.monotonic() - began > wait_s:
            raise StoreError(
                f"another process has been writing to {backend.place} for {wait_s:g} s; wait for it and try again"
            )
        time.sleep(delay)
        delay = min(1.5 * delay, _LOOK_EVERY_S)


def _renew(backend: Backend, held: list[bytes], lease_s: float, done: threading.Event) -> None:
    while not done.wait(lease_s / 4):
        new = _token()
        with suppress(StoreError):  # the next attempt, or whoever waits, finds out
            if backend.swap(_NAME, new, held[0]):
                held[0] = new


def _token() -> bytes:
    return uuid.uuid4().hex.encode()
