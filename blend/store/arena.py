"""Memory that is allocated once and handed out in pieces, which come back when the last reference to them is gone.

Locking pages takes as long as copying them, so a machine with a GPU locks those of a pool once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256  # bytes; a kernel reads 16 at a time


class Arena:
    """One piece of memory, uint8 `[nbytes]`, whose first free place that fits is handed out. Threads may share it."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, memory.numel())]  # start and stop, ascending
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> Tensor | None:
        """A piece, uint8 `[nbytes]`, or None if no free place is large enough.

        The piece is given back when the returned tensor is gone; views of it do not keep it.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._join_returned()
            places = (index for index, (start, stop) in enumerate(self._free) if stop - start >= size)
            index = next(places, None)
            if index is None:
                return None
            start, stop = self._free[index]
            self._free[index] = (start + size, stop)
        piece = self._memory[start : start + nbytes]
        weakref.finalize(piece, self._give_back, start, start + size).atexit = False
        return piece

    def _give_back(self, start: int, stop: int) -> None:
        """Takes no lock: the interpreter may call it in the middle of `take`."""
        self._returned.append((start, stop))

    def _join_returned(self) -> None:
        free = self._free
        while self._returned:
            free.append(self._returned.popleft())
        self._free = []
        for start, stop in sorted(free):
            if self._free and self._free[-1][1] == start:
                start, _ = self._free.pop()
            self._free.append((start, stop))
