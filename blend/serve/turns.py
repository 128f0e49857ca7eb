"""Shares places and idle time among clients: each gets one slice of work at a time, in turn.

Without turns, the many or long requests of one client come first, and a short request of another waits for all of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from math import exp2, inf
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

from blend.serve.events import QueueFullError

T = TypeVar("T")
Client = TypeVar("Client", bound=Hashable)
Item = TypeVar("Item")
Slices = Generator[None, None, T]
"""Work in slices: each step runs in a thread, and another client may have its turn before the next."""
LITTLE_USE_S = 5.0
_RECENT = 0.2  # weight of the latest request in the mean
_HALF_LIFE_S = 60.0
_FORGOTTEN_S = 0.01


class TurnQueue(Generic[Client, Item]):
    """Items of clients who take turns; those of one client keep their order. Not thread-safe.

    most: items; beyond them the client with the most loses its oldest one.
    """

    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._items = OrderedDict[Client, deque[Item]]()  # the client whose turn is next comes first

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._items.values())

    def add(self, client: Client, item: Item) -> None:
        """Let this item wait behind the client's others."""
        self._items.setdefault(client, deque()).append(item)
        if len(self) > self._most:
            self._take_oldest(max(self._items, key=lambda name: len(self._items[name])))

    def pop(
        self,
        eligible: Callable[[Client], bool] = lambda client: True,
        rank: Callable[[Client], float] = lambda client: 0,
    ) -> tuple[Client, Item] | None:
        """Remove and return the next item of the eligible clients of least rank, with its client; None without one."""
        client = min(filter(eligible, self._items), key=rank, default=None)
        return None if client is None else (client, self._take_oldest(client))

    def clear(self) -> list[Item]:
        """Remove and return all."""
        items = list(self)
        self._items.clear()
        return items

    def _take_oldest(self, client: Client) -> Item:
        items = self._items[client]
        item = items.popleft()
        self._items.move_to_end(client)
        if not items:
            del self._items[client]
        return item


class RecentUse:
    """How long clients occupied places lately. A second counts half after a minute. Not thread-safe."""

    def __init__(self) -> None:
        self._seconds = dict[str, tuple[float, float]]()  # of each client, and when they were counted

    def add(self, client: str, seconds: float) -> None:
        """Count seconds that end now."""
        total = self.seconds(client) + seconds
        self._seconds = {name: entry for name, entry in self._seconds.items() if self.seconds(name) > _FORGOTTEN_S}
        self._seconds[client] = (total, time.monotonic())

    def seconds(self, client: str) -> float:
        """The seconds of a client, older ones counted less."""
        seconds, at = self._seconds.get(client, (0.0, 0.0))
        return seconds * exp2((at - time.monotonic()) / _HALF_LIFE_S)


class Turns:
    """Places in which clients work in turn. Threads may share it; `run` is for one event loop.

    Args:
        places: slices that run at a time.
        share: places of one client.
        most: requests of `run` that run or wait; half of them at most are of one client.
        use: what `leave` counts; clients of little use come first.
        reserved: places for clients of less than `LITTLE_USE_S`.

    """

    def __init__(
        self, places: int, share: int, most: float = inf, *, use: RecentUse | None = None, reserved: int = 0
    ) -> None:
        self._places = places
        self._share = share
        self._most = most
        self._use = use or RecentUse()
        self._reserved = reserved
        self._threads = CapacityLimiter(places)
        self._lock = threading.Lock()
        self._requests = Counter[str]()  # of each client
        self._running = Counter[str]()
        self._waiting = TurnQueue[str, Future[None]]()
        self._request_s = 0.0  # in which a request occupies a place: the recent mean
        self._closed: Callable[[], Exception] | None = None

    @property
    def running(self) -> int:
        """How many slices run now."""
        return self._running.total()

    @property
    def awaited(self) -> bool:
        """Whether someone waits for a place."""
        return bool(self._waiting)

    async def run(self, client: str, work: Slices[T]) -> T:
        """Run this client's work in threads to its end, and return its result.

        Raises `QueueFullError` beyond the bounds, what the work raises, and after `close` its error.
        """
        self._require_room(client)
        self._requests[client] += 1
        seconds = 0.0
        try:
            while True:
                place = self._line_up(client)
                try:
                    await asyncio.wrap_future(place)
                except asyncio.CancelledError:
                    self._give_up(client, place)
                    raise
                begun = time.monotonic()
                try:
                    result = await to_thread.run_sync(_run_slice, work, limiter=self._threads)
                finally:
                    seconds += time.monotonic() - begun
                    self._leave(client)
                if result:
                    return result[0]
        finally:
            _decrement(self._requests, client)
            self._request_s += _RECENT * (seconds - self._request_s)

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """A place for a slice of the calling thread, which waits for the client's turn. Raises the error of `close`."""
        self._line_up(client).result()
        try:
            yield
        finally:
            self._leave(client)

    def line_up(self, client: str) -> Future[None]:
        """What is done when a place is the client's; then it must `leave`. Raises the error of `close`."""
        return self._line_up(client)

    def leave(self, client: str, place: Future[None], seconds: float) -> None:
        """Give a place back that was occupied for so long, or do not wait for it any longer."""
        with self._lock:
            self._use.add(client, seconds)
        self._give_up(client, place)

    def close(self, error: Callable[[], Exception]) -> None:
        """End all work before its next slice with this error."""
        with self._lock:
            self._closed = error
            for place in self._waiting.clear():
                if place.set_running_or_notify_cancel():
                    place.set_exception(error())

    def _require_room(self, client: str) -> None:
        requests = self._requests[client]
        total = self._requests.total()
        if total >= self._most:
            raise QueueFullError(total, max(1.0, total * self._request_s / self._places))
        if requests + 1 > max(1, self._most / 2):
            raise QueueFullError(requests, max(1.0, requests * self._request_s / self._share))

    def _line_up(self, client: str) -> Future[None]:
        """What is done when it is the client's turn."""
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            place = Future[None]()
            self._waiting.add(client, place)
            self._give_places()
        return place

    def _give_up(self, client: str, place: Future[None]) -> None:
        if not place.cancel() and place.exception() is None:  # it was the client's turn already
            self._leave(client)

    def _leave(self, client: str) -> None:
        with self._lock:
            _decrement(self._running, client)
            self._give_places()

    def _give_places(self) -> None:
        """Give free places to the clients whose turn it is."""
        while self.running < self._places:
            turn = self._waiting.pop(self._may_run, self._use.seconds)
            if turn is None:
                return
            client, place = turn
            if place.set_running_or_notify_cancel():
                self._running[client] += 1
                place.set_result(None)

    def _may_run(self, client: str) -> bool:
        if self._running[client] >= self._share:
            return False
        return self.running < self._places - self._reserved or self._use.seconds(client) < LITTLE_USE_S


def _run_slice(work: Slices[T]) -> tuple[T] | None:
    """Run the next slice; the result if it was the last one."""
    try:
        next(work)
    except StopIteration as end:
        return (end.value,)
    return None


def _decrement(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]
