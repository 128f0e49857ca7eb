"""Whether a store can be reached: asked before every question, and told in the log when that changes, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from blend.errors import EntryDamagedError, StoreError

if TYPE_CHECKING:
    from blend.store import ChunkStore

LOG = logging.getLogger("kvblend.serve")
STORE_UNREACHABLE = "store_unreachable"
"""Why a prompt was computed in full: its store could not be asked what it holds."""


def is_outage(error: BaseException) -> bool:
    """Whether the store is out of reach, and not one entry damaged."""
    return isinstance(error, StoreError) and not isinstance(error, EntryDamagedError)


class StoreWatch:
    """Of one store. Threads may share it.

    store: opens it, at the first call. above: of the store that this one lies in; where that one is gone, nothing is opened,
    for it would be made anew in an empty place.
    """

    def __init__(self, store: Callable[[], ChunkStore], above: StoreWatch | None = None) -> None:
        self._store, self._above = store, above
        self._lock, self._lost = threading.Lock(), False

    def reachable(self) -> bool:
        """Whether the store can be read now."""
        try:
            self.require()
        except StoreError:
            return False
        return True

    def require(self) -> None:
        """Raise `StoreError` where it cannot."""
        if self._above is not None:
            self._above.require()
        try:
            _ = self._store().generation
        except StoreError as error:
            self.lost(str(error))
            raise
        self._set(False, lambda: LOG.info("store_back", extra={"told": {}}))

    def lost(self, why: str) -> None:
        """It could not be read just now."""
        self._set(True, lambda: LOG.warning(STORE_UNREACHABLE, extra={"told": {"why": why}}))

    def _set(self, lost: bool, tell: Callable[[], None]) -> None:
        with self._lock:
            changed, self._lost = self._lost != lost, lost
        if changed:
            tell()
