"""Which caches are pinned: those are neither pruned nor evicted from a disk, whatever machine's that is.

pins/<digest>   "pinned": that there is such a name says it

They are kept in the place that decides; disks in front of it are told by `FarPins`. To remove a document removes its caches all
the same.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from blend.errors import StoreError
from blend.store.backend import PINS, Backend, close_all

PINNED = b"pinned"
_DIGEST = re.compile(r"[0-9a-f]{8,128}")
_EVERY_S = 30.0
_AT_ONCE = 500


def pinned(backend: Backend) -> frozenset[str]:
    """Digests of the caches that are pinned."""
    return frozenset(name.removeprefix(PINS) for page in backend.names(PINS) for name in page)


def still_pinned(backend: Backend, digests: Collection[str]) -> frozenset[str]:
    """Which of these caches are pinned, each asked for by its name: listings may be of a moment ago. Raises `StoreError`."""
    found, wanted = set[str](), list(digests)
    for begin in range(0, len(wanted), _AT_ONCE):
        batch = wanted[begin : begin + _AT_ONCE]
        blobs = backend.stored([PINS + digest for digest in batch], 0)
        close_all(blobs)
        found |= {digest for digest, blob in zip(batch, blobs, strict=True) if blob is not None}
    return frozenset(found)


def pin(backend: Backend, digest: str, *, on: bool) -> None:
    """Pin a cache, or let it go again. Raises `StoreError`."""
    if not _DIGEST.fullmatch(digest):
        raise StoreError(f"{digest!r:.80} is no digest of a cache: `blend store ls` shows them")
    if on:
        backend.put(PINS + digest, [PINNED])
    else:
        backend.delete(PINS + digest)


class FarPins:
    """The pins of a store elsewhere, for a disk in front of it: asked for now and then, and noted on the disk for outages."""

    def __init__(self, far: Backend, near: Backend, *, every_s: float = _EVERY_S) -> None:
        self._far, self._near, self._every_s = far, near, every_s
        self._lock = threading.Lock()
        self._known: frozenset[str] | None = None
        self._after = float("-inf")

    def __call__(self) -> frozenset[str]:
        """Digests of the caches that are pinned, as far as is known. Raises `StoreError` for the disk alone."""
        with self._lock:
            if self._known is None or time.monotonic() >= self._after:
                self._known = self._asked()
                self._after = time.monotonic() + self._every_s
            return self._known

    def _asked(self) -> frozenset[str]:
        try:
            pins = pinned(self._far)
        except StoreError:
            return pinned(self._near) if self._known is None else self._known
        with suppress(StoreError):  # a disk that is full, or read-only: it is asked again in the next process
            noted = pinned(self._near)
            _each(self._near, pins - noted, on=True)
            _each(self._near, noted - pins, on=False)
        return pins


def _each(backend: Backend, digests: Iterable[str], *, on: bool) -> None:
    for digest in digests:
        pin(backend, digest, on=on)
