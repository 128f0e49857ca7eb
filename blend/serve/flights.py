"""Text that several requests in flight bring: which of it they share, so that it is computed once for all of them.

A request is in flight from when its prompt is made until its prefill ends. Nobody knows before which text will recur, so
prompts are compared as they arrive: the pieces that a prompt would bring to be learned are announced, and a later prompt finds
them as it finds learned text. Requests of other tenants and other end users are never compared.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet

from blend.layout import Tokens
from blend.serve.token_index import TokenIndex, digest_of

Event = TypeVar("Event")
UNKNOWN_S = 1.0
"""Seconds for which an owner that its store stalls is waited for, where nobody knows how long computing takes."""


Estimate = Callable[[int], float | None]
"""The seconds that computing so many rows takes; None if nobody knows."""


class Flight:
    """A request in flight. Threads may share it. One that is forgotten without an end has ended.

    Args:
        lengths: of the texts that it brings, by their digests.
        companions: the flights of the same end user.
        index: finds their texts.
        computed: the texts whose caches one of these has computed, by their digests; all of them share it.
        estimate: see `Estimate`.
        on_end: called when it ends.
        announced: how many others are known to bring a text, by its digest, though they have not begun here.

    Attributes:
        ended: whether it waits for no text any more: its prefill has ended.
        is_owner: whether it computes text now that others wait for.
        joined: how many requests with a text of it were in flight when it began, or have begun since.

    """

    def __init__(
        self,
        lengths: Mapping[bytes, int],
        companions: WeakSet[Flight],
        index: TokenIndex[bytes],
        computed: set[bytes],
        estimate: Estimate,
        on_end: Callable[[], None] = lambda: None,
        announced: Mapping[bytes, int] | None = None,
    ) -> None:
        self.lengths = dict(lengths)
        self.index = index
        self.computed = computed
        self._on_end = on_end
        self.ended = False
        self._announced = Counter(announced)
        self.joined = max(self._announced.values(), default=0)
        self._companions = companions
        self._estimate = estimate
        self._shared = set(self._announced)
        self.is_owner = False
        self._stalled_at: float | None = None
        self._stalled_s = 0.0
        self._compare(self.lengths)

    def _compare(self, names: Iterable[bytes]) -> None:
        for companion in list(self._companions):
            common = set(names) & companion.lengths.keys()
            if common and companion is not self and not companion.ended:
                for flight in (self, companion):
                    flight._shared |= common
                    flight.joined += 1

    def bring(self, texts: Iterable[Tokens]) -> None:
        """The request brings these texts, too: parts of its own that others bring."""
        lengths = {digest_of(text): len(text) for text in texts}
        added = lengths.keys() - self.lengths.keys()
        self.lengths = {**self.lengths, **lengths}
        joined = self.joined
        self._compare(added)
        self.joined = joined

    @property
    def shared(self) -> frozenset[bytes]:
        """Its texts that others in flight have brought, too, until now."""
        return frozenset(self._shared)

    def awaited(self) -> Counter[bytes]:
        """Its texts that others in flight would still compute, each with the number of these others."""
        counts = Counter[bytes]()
        for companion in list(self._companions) if self._shared else ():
            if companion is not self and not companion.ended:
                counts.update(self._shared & companion.lengths.keys())
        return counts | self._announced

    @contextmanager
    def owning(self) -> Iterator[None]:
        """The request computes text that others wait for."""
        self.is_owner = True
        try:
            yield
        finally:
            self.is_owner = False

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """The owner waits for the store."""
        begun = self._stalled_at = time.monotonic()
        try:
            yield
        finally:
            self._stalled_at = None
            self._stalled_s += time.monotonic() - begun

    def waits_for(self, owner: Flight) -> bool:
        """Whether it gains more from the owner's texts than it loses by waiting for the owner's store.

        While an owner computes, nobody waits for it alone: the engine prefills one prompt at a time. An owner that a store
        stalls is waited for as long as the waiting request would compute the texts itself, all stalls together.
        """
        common = self.lengths.keys() & owner.lengths.keys()
        return owner.is_owner and bool(common) and not owner.is_overdue(common)

    def is_overdue(self, names: Collection[bytes], times: int = 1) -> bool:
        """Whether the store has stalled this owner for as long as computing these of its texts takes, or so many times."""
        begun = self._stalled_at
        stalled_s = self._stalled_s + (time.monotonic() - begun if begun is not None else 0.0)
        patience_s = self._estimate(sum(self.lengths[name] for name in names))
        return stalled_s >= times * (UNKNOWN_S if patience_s is None else patience_s)

    @property
    def has_stalled_owner(self) -> bool:
        """Whether the store stalls a request that computes text of this one: it is then no place to put a cache.

        Also one that has ended: its client has left, or it goes on without the text. What it was putting is still on its way.
        """
        owners = [companion for companion in list(self._companions) if companion is not self and companion.is_owner]
        common = [(owner, self.lengths.keys() & owner.lengths.keys()) for owner in owners]
        return any(names and owner.is_overdue(names) for owner, names in common)

    def end(self) -> None:
        """It waits for no text any more."""
        if not self.ended:
            self.ended = True
            self._on_end()


class _UsersFlights:
    """The flights of an end user, the texts of those that were in flight when the last one began, and how many have begun."""

    def __init__(self) -> None:
        self.flights = WeakSet[Flight]()
        self.index = TokenIndex[bytes]()
        self.computed = set[bytes]()
        self.begun = 0


class Flights:
    """The requests of one tenant that are in flight. Threads may share it."""

    def __init__(self, estimate: Estimate = lambda rows: None) -> None:
        self._estimate = estimate
        self._lock = threading.Lock()
        self._users = dict[str, _UsersFlights]()

    def index(self, user: str) -> TokenIndex[bytes]:
        """Finds an end user's texts in flight in prompts; their digests are its names."""
        self.forget_ended()
        users_flights = self._users.get(user)
        return TokenIndex() if users_flights is None else users_flights.index

    def begun(self, user: str) -> int:
        """How many of an end user have begun lately; another number says that another one has."""
        users_flights = self._users.get(user)
        return 0 if users_flights is None else users_flights.begun

    def begin(
        self,
        user: str,
        texts: Collection[Tokens],
        begun: int | None = None,
        announced: Mapping[bytes, int] | None = None,
    ) -> Flight | None:
        """Announce the texts of a request.

        Args:
            user: whose it is.
            texts: those that it brings.
            begun: `Flights.begun` before the request's text was searched; None is returned if another one has begun since.
            announced: as of `Flight`.

        """
        named = {digest_of(text): text for text in texts}
        with self._lock:
            if begun is not None and begun != self.begun(user):
                return None
            self._forget_ended()
            users_flights = self._users.setdefault(user, _UsersFlights())
            lengths = {name: len(text) for name, text in named.items()}
            flight = Flight(
                lengths,
                users_flights.flights,
                users_flights.index,
                users_flights.computed,
                self._estimate,
                self.forget_ended,
                announced,
            )
            users_flights.flights.add(flight)
            users_flights.begun += 1
            users_flights.index.update(
                (), {name: text for name, text in named.items() if name not in users_flights.index}
            )
            return flight

    def forget_ended(self) -> None:
        """Forget the texts of which no request is in flight any more: nothing of a deleted session may stay."""
        with self._lock:
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget the texts of which no request is in flight any more."""
        for user, users_flights in list(self._users.items()):
            going = [flight for flight in users_flights.flights if not flight.ended]
            if not going:
                del self._users[user]
                continue
            names = {name for flight in going for name in flight.lengths}
            users_flights.computed &= names
            if ended_names := set(users_flights.index.names) - names:
                users_flights.index.update(ended_names, {})


def landing(flight: Flight, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
    """Ends a flight with the first event of its prompt: it is prefilled, or it has failed or was cancelled."""

    def taking(event: Event) -> None:
        flight.end()
        on_event(event)

    return taking
