"""Which entries stay in memory: Greedy-Dual-Size-Frequency, an order by what keeping each of them saves per byte.

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69, 1998:

    priority = clock + frequency * cost / size

frequency: how often the entry was used since it came. clock: the highest priority that ever had to go, so that what was used
often long ago goes in the end. The lowest priorities go; a newcomer that would be among them is not kept, and nothing goes.

cost: what a hit saves, counted in bytes that could be read in that time: the entry's own, and one exchange with the backend.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

EXCHANGE_BYTES = 1 << 20
"""Opening a file of a local disk and parsing its header takes as long as reading so much of it: some 0.8 ms."""

Name = TypeVar("Name")


class _Place(NamedTuple, Generic[Name]):
    """An entry's place in the order: among equals, who was ranked first goes first."""

    priority: float
    turn: int
    name: Name


class _Entry(NamedTuple, Generic[Name]):
    place: _Place[Name]
    nbytes: int
    frequency: int


class Gdsf(Generic[Name]):
    """The order alone; whoever holds the entries calls it from one thread at a time.

    clock: see above.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._turns = count()
        self._entries: dict[Name, _Entry[Name]] = {}
        self._heap: list[_Place[Name]] = []  # some of its places are out of date: those that no entry has any more

    def add(self, name: Name, nbytes: int) -> None:
        """A new entry, used once; nbytes: of it, positive."""
        self._rank(name, nbytes, 1)

    def use(self, name: Name) -> None:
        """It was used once more."""
        entry = self._entries[name]
        self._rank(name, entry.nbytes, entry.frequency + 1)

    def remove(self, name: Name) -> None:
        """It went for another reason than that there was no room."""
        del self._entries[name]

    def evict(self, nbytes: int, excess: int, busy: Callable[[Name], bool]) -> list[Name] | None:
        """Remove entries of `excess` bytes or more in favour of a newcomer of `nbytes`; their names.

        None, and nothing goes, where the newcomer is worth less or there are not enough.
        busy: entries that would free nothing if they went; they stay.
        """
        newcomer = self.clock + _saved_per_byte(nbytes)
        lowest: list[_Place[Name]] = []
        going: list[_Place[Name]] = []
        freed = 0
        while freed < excess and self._heap and self._heap[0].priority <= newcomer:
            place = heapq.heappop(self._heap)
            entry = self._entries.get(place.name)
            if entry is None or entry.place is not place:
                continue
            lowest.append(place)
            if not busy(place.name):
                going.append(place)
                freed += entry.nbytes
        if freed < excess:
            going = []
        self._go(lowest, going)
        return [place.name for place in going] if freed >= excess else None

    def _go(self, lowest: list[_Place[Name]], going: list[_Place[Name]]) -> None:
        """Take `going` out, and put the others of `lowest` back."""
        for place in going:
            del self._entries[place.name]
            self.clock = max(self.clock, place.priority)
        for place in lowest:
            if place.name in self._entries:
                heapq.heappush(self._heap, place)

    def _rank(self, name: Name, nbytes: int, frequency: int) -> None:
        priority = self.clock + frequency * _saved_per_byte(nbytes)
        place = _Place(priority, next(self._turns), name)
        self._entries[name] = _Entry(place, nbytes, frequency)
        heapq.heappush(self._heap, place)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry.place for entry in self._entries.values()]
            heapq.heapify(self._heap)


def _saved_per_byte(nbytes: int) -> float:
    return (EXCHANGE_BYTES + nbytes) / nbytes
