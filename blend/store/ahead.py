"""Entries that are fetched before anybody reads them: a few at a time, so that a long list of them takes little memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from blend.errors import StoreError
from blend.store.backend import close_all
from blend.store.fetch import Fetchers, TieredBlob
from blend.store.tiered import Found

IN_FLIGHT_BYTES = 64 << 20
_BATCH = 64
_FIRST = -1  # the rank of looking where they are


class Ahead:
    """opening: looks where several entries are. At most `most_bytes` of them are on their way, or one that is larger."""

    def __init__(
        self, opening: Callable[[Sequence[str]], list[Found]], fetchers: Fetchers, most_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._opening, self._fetchers, self._most_bytes = opening, fetchers, most_bytes
        self._lock = threading.Lock()
        self._names: deque[tuple[str, int | None]] = deque()
        self._opened: deque[TieredBlob] = deque()
        self._in_flight_bytes = 0
        self._looking = False

    def add(self, names: Iterable[str], most_bytes: int | None = None) -> None:
        """Have these fetched, in their order. Returns at once; what fails is met by who reads it.

        most_bytes: that any of them may take; what takes more is not fetched.
        """
        with self._lock:
            self._names.extend((name, most_bytes) for name in names)
        self._go_on()

    def _go_on(self) -> None:
        """Start what there is room for, and look for more where nothing is left to start."""
        while (blob := self._next()) is not None:
            nbytes = blob.nbytes
            blob.start(lambda nbytes=nbytes: self._came(nbytes))  # type: ignore[misc]
            blob.close()

    def _next(self) -> TieredBlob | None:
        with self._lock:
            if self._opened and (
                not self._in_flight_bytes or self._in_flight_bytes + self._opened[0].nbytes <= self._most_bytes
            ):
                self._in_flight_bytes += self._opened[0].nbytes
                return self._opened.popleft()
            if self._names and not self._opened and not self._looking:
                self._looking = True
                self._fetchers.add(_FIRST, self._look)
            return None

    def _look(self) -> None:
        with self._lock:
            batch = dict(self._names.popleft() for _ in range(min(_BATCH, len(self._names))))
        found: list[Found] = []
        try:
            found = self._opening(list(batch))
        except StoreError:
            pass  # who reads them meets it
        finally:
            allowed = zip(found, batch.values(), strict=False)
            blobs = [
                blob
                for blob, most in allowed
                if isinstance(blob, TieredBlob) and blob.on_its_way and (most is None or blob.nbytes <= most)
            ]
            close_all([blob for blob in found if blob not in blobs])
            with self._lock:
                self._opened.extend(blobs)
                self._looking = False
        self._go_on()

    def _came(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight_bytes -= nbytes
        self._go_on()
