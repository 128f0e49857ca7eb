"""Which learned pieces stay within a budget: those that recur, so that novel text cannot wash them out.

W-TinyLFU (Einziger, Friedman and Manes, 2017, "TinyLFU: a highly efficient cache admission policy"): a new piece enters a
window, least recently used. What falls out of the window stays only if it was used more often than what would go for it. A
sketch of bounded size counts uses, and forgets by halving.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

_WINDOW_SHARE = 5  # one byte in so many belongs to the window
_ROWS, _WIDTH = 4, 1 << 14  # of the sketch: 64 KiB
_MOST = 15  # of a counter
_COMPARED = 32  # oldest names, of which the least used goes
_HALVED_EVERY = 10 * _WIDTH  # uses

Name = TypeVar("Name", bound=Hashable)


class FrequencySketch:
    """Counts uses approximately (a count-min sketch). Before it halves, a count is never too low."""

    def __init__(self) -> None:
        self._counters = np.zeros((_ROWS, _WIDTH), np.uint8)
        self._uses = 0

    def add(self, name: Hashable) -> None:
        """Count a use."""
        places = self._places(name)
        mine = self._counters[places]
        self._counters[places] = np.where((mine == mine.min()) & (mine < _MOST), mine + 1, mine)
        self._uses += 1
        if self._uses == _HALVED_EVERY:
            self._counters >>= 1
            self._uses //= 2

    def count(self, name: Hashable) -> int:
        """About how often it was used lately."""
        return int(self._counters[self._places(name)].min())

    def _places(self, name: Hashable) -> tuple[np.ndarray, np.ndarray]:
        mixed = hash(name)  # 64 bits of text or bytes; every row takes its own
        return np.arange(_ROWS), np.array([(mixed >> 16 * row) % _WIDTH for row in range(_ROWS)])


class Budget(Generic[Name]):
    """Names with sizes in bytes that together stay within a budget."""

    def __init__(self, nbytes: int) -> None:
        self.most = nbytes
        self._sketch = FrequencySketch()
        self._window: OrderedDict[Name, int] = OrderedDict()
        self._main: OrderedDict[Name, int] = OrderedDict()
        self.nbytes = self._window_bytes = 0

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def __contains__(self, name: object) -> bool:
        return name in self._window or name in self._main

    def use(self, name: Name, nbytes: int) -> list[Name]:
        """Note a use of a name, known or new. Returns the names to evict for it; it may be among them itself."""
        self._sketch.add(name)
        if nbytes > self.most:
            self.forget(name)
            return [name]
        if self._window.get(name, self._main.get(name)) != nbytes:
            self.forget(name)
        if name in self._main:
            self._main.move_to_end(name)
            return []
        if name not in self._window:
            self.nbytes += nbytes
            self._window_bytes += nbytes
        self._window[name] = nbytes
        self._window.move_to_end(name)
        return list(self._shrunk())

    def forget(self, name: Name) -> None:
        """It is gone."""
        if (size := self._window.pop(name, None)) is not None:
            self._window_bytes -= size
        elif (size := self._main.pop(name, None)) is None:
            return
        self.nbytes -= size

    def _shrunk(self) -> Iterator[Name]:
        """Move what falls out of the window, and evict what does not fit."""
        while self._window and (self._window_bytes > self.most // _WINDOW_SHARE or self.nbytes > self.most):
            name, size = self._window.popitem(last=False)
            self._window_bytes -= size
            self._main[name] = size  # as the most recent one, and goes at once if it is used less than the oldest
            while self._main and self.nbytes > self.most:
                oldest = [*islice(self._main, _COMPARED)]
                if name in self._main and name not in oldest:
                    oldest.append(name)
                victim = min(oldest, key=self._sketch.count)  # of the least used the oldest
                self.nbytes -= self._main.pop(victim)
                yield victim
