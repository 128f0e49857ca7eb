"""Names within a budget of bytes: which of them leave for new ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from cachetools import LRUCache

from blend.serve.token_index import Name

_REMEMBERED = 1 << 14  # names that were used


class Budget(Generic[Name]):
    """Names with sizes in bytes that together stay within a budget.

    The least recently used name leaves first, and names that were used once leave before names that recur. Pinned names stay.
    """

    def __init__(self, nbytes: int) -> None:
        self.most = nbytes
        self.nbytes = 0
        self._used: LRUCache[Name, bool] = LRUCache(_REMEMBERED)  # lately, also if they left since
        self._once: OrderedDict[Name, int] = OrderedDict()
        self._recurring: OrderedDict[Name, int] = OrderedDict()
        self._pinned: OrderedDict[Name, int] = OrderedDict()

    @property
    def _queues(self) -> tuple[OrderedDict[Name, int], ...]:
        return self._once, self._recurring, self._pinned

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, name: object) -> bool:
        return any(name in queue for queue in self._queues)

    def use(
        self,
        name: Name,
        nbytes: int,
        *,
        pinned: bool = False,
    ) -> list[Name]:
        """Note a use of a name, known or new. Returns the names to evict for it: itself, if there is no room for it."""
        queue = self._recurring if name in self._used else self._once
        self._used[name] = True
        self.forget(name)
        if nbytes > self.most:
            return [name]
        (self._pinned if pinned else queue)[name] = nbytes
        self.nbytes += nbytes
        evicted: list[Name] = []
        while self.nbytes > self.most:
            oldest = next(iter(self._once), name)
            if oldest == name:
                oldest = next(iter(self._recurring), name)
            if oldest not in self:  # more is pinned than there is room for
                oldest = next(iter(self._pinned))
            self.forget(oldest)
            evicted.append(oldest)
        return evicted

    def pin(self, name: Name) -> None:
        """Keep a name that is here."""
        for queue in (self._once, self._recurring):
            if name in queue:
                self._pinned[name] = queue.pop(name)

    def unpin(self, name: Name) -> None:
        """Treat a name as others again, if it is here."""
        if name in self._pinned:
            self._recurring[name] = self._pinned.pop(name)

    def forget(self, name: Name) -> None:
        """Remove a name."""
        self.nbytes -= sum(queue.pop(name, 0) for queue in self._queues)
