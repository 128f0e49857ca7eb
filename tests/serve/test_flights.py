"""Requests in flight: which texts they share, who computes them, and for how long others wait."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from blend.layout import Tokens
from blend.serve import flights as flights_module
from blend.serve.flights import UNKNOWN_S, Flight, Flights, landing
from blend.serve.token_index import digest_of

SIZE = 40  # tokens of a text


def text(number: int, size: int = SIZE) -> Tokens:
    return tuple(range(1000 * number, 1000 * number + size))


ONE, TWO, THREE = map(text, range(1, 4))
NAMES = [digest_of(text(number)) for number in range(1, 4)]


def begun(flights: Flights, *texts: Tokens, user: str = "", **more: Any) -> Flight:
    flight = flights.begin(user, texts, **more)
    assert flight is not None
    return flight


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(flights_module, "time", clock)
    return clock


def test_requests_know_what_they_share() -> None:
    flights = Flights()
    first, second, third = begun(flights, ONE, TWO), begun(flights, TWO, THREE), begun(flights, THREE, TWO)
    assert [flight.shared for flight in (first, second, third)] == [{NAMES[1]}, *[{NAMES[1], NAMES[2]}] * 2]
    assert [flight.joined for flight in (first, second, third)] == [2, 2, 2]
    assert first.awaited() == Counter({NAMES[1]: 2})
    assert second.awaited() == Counter({NAMES[1]: 2, NAMES[2]: 1})
    third.end()
    assert first.awaited() == second.awaited() == Counter({NAMES[1]: 1})
    assert second.shared == {NAMES[1], NAMES[2]}, "what was shared stays shared"


def test_a_request_that_shares_nothing_is_no_companion() -> None:
    flights = Flights()
    first, other = begun(flights, ONE), begun(flights, TWO)
    assert [first.joined, other.joined] == [0, 0]
    assert first.shared == other.shared == frozenset()
    assert not first.awaited()


def test_an_ended_request_is_not_compared() -> None:
    flights = Flights()
    gone = begun(flights, ONE)
    gone.end()
    late = begun(flights, ONE)
    assert (late.joined, gone.joined, late.shared) == (0, 0, frozenset())


def test_a_request_that_is_forgotten_has_ended() -> None:
    flights = Flights()
    lost = begun(flights, ONE)
    lost.computed.add(NAMES[0])
    del lost
    gc.collect()
    late = begun(flights, ONE)
    assert late.joined == 0
    assert not late.computed


def test_users_are_never_compared() -> None:
    flights = Flights()
    ada, bob = begun(flights, ONE, user="ada"), begun(flights, ONE, user="bob")
    assert (ada.joined, bob.joined) == (0, 0)
    assert NAMES[0] not in flights.index("")
    assert NAMES[0] in flights.index("ada")
    ada.computed.add(NAMES[0])
    assert NAMES[0] not in bob.computed
    assert [flights.begun(user) for user in ("ada", "bob", "")] == [1, 1, 0]


def test_text_is_found_while_a_request_with_it_is_in_flight() -> None:
    flights = Flights()
    first, second = begun(flights, ONE, TWO), begun(flights, TWO, THREE)
    assert set(flights.index("").names) == set(NAMES)
    assert [(run.start, run.stop) for run in flights.index("").runs(np.array((0, *TWO), np.int32))] == [(1, SIZE + 1)]
    first.end()
    assert set(flights.index("").names) == {NAMES[1], NAMES[2]}
    second.end()
    assert not list(flights.index("").names)
    assert flights.begun("") == 0


def test_what_was_computed_is_forgotten_with_the_last_request_that_brings_it() -> None:
    flights = Flights()
    first, second = begun(flights, ONE, TWO), begun(flights, TWO)
    first.computed.update(NAMES[:2])
    assert second.computed == {NAMES[0], NAMES[1]}, "they share it"
    first.end()
    assert second.computed == {NAMES[1]}
    second.end()
    assert not begun(flights, TWO).computed


def test_parts_that_a_request_brings_later_are_compared() -> None:
    """Its companions have news; it has none: it looks at its text now."""
    flights = Flights()
    first, second = begun(flights, ONE), begun(flights, TWO)
    first.bring([TWO, THREE])
    assert first.lengths == dict.fromkeys(NAMES, SIZE)
    assert first.shared == second.shared == {NAMES[1]}
    assert (first.joined, second.joined) == (0, 1)
    first.bring([TWO, THREE])
    assert second.joined == 1, "that is no news"


def test_a_search_is_made_again_if_another_request_has_begun_meanwhile() -> None:
    flights = Flights()
    before = flights.begun("")
    assert begun(flights, ONE, begun=before)
    kept = begun(flights, ONE)
    assert flights.begin("", [ONE], before) is None
    assert flights.begun("") == flights.begun("") != before, "one that has not begun counts for nothing"
    assert begun(flights, ONE, begun=flights.begun("")).joined == 1
    kept.end()


def test_text_that_is_announced_counts_as_awaited() -> None:
    flights = Flights()
    first = begun(flights, ONE, TWO, announced={NAMES[0]: 3})
    assert (first.joined, first.shared) == (3, {NAMES[0]})
    assert begun(Flights(), ONE, TWO, announced={NAMES[0]: 1, NAMES[1]: 4}).joined == 4
    second = begun(flights, ONE, TWO, announced={NAMES[0]: 1})
    assert first.awaited() == Counter({NAMES[0]: 3, NAMES[1]: 1}), "others that came are among those announced"
    assert second.awaited() == Counter({NAMES[0]: 1, NAMES[1]: 1})
    second.end()
    assert first.awaited() == Counter({NAMES[0]: 3})


def test_an_owner_is_one_while_it_computes() -> None:
    flight = begun(Flights(), ONE)
    seen = list[bool]()

    def fail() -> None:
        with flight.owning():
            seen.append(flight.is_owner)
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        fail()
    assert (seen, flight.is_owner) == ([True], False)


def test_only_text_of_an_owner_is_waited_for() -> None:
    flights = Flights()
    owner, sharing, other = begun(flights, ONE), begun(flights, ONE, TWO), begun(flights, TWO)
    assert not sharing.waits_for(owner)
    with owner.owning():
        assert sharing.waits_for(owner)
        assert not other.waits_for(owner)
    assert not sharing.waits_for(owner)


@pytest.mark.parametrize(
    ("estimate", "patience"), [(lambda rows: rows / 10, SIZE / 10), (lambda rows: None, UNKNOWN_S)]
)
def test_a_stalled_owner_is_waited_for_as_long_as_computing_takes(
    clock: Clock, estimate: Callable[[int], float | None], patience: float
) -> None:
    """By the texts that both have, over all its stalls."""
    flights = Flights(estimate)
    owner, sharing = begun(flights, ONE, THREE), begun(flights, ONE, TWO)
    with owner.owning():
        clock.seconds += 100  # it computes: that is no stall
        with owner.stalled():
            clock.seconds += patience / 2
            assert sharing.waits_for(owner)
        clock.seconds += 100
        assert not sharing.has_stalled_owner
        with owner.stalled():
            clock.seconds += patience / 4
            assert sharing.waits_for(owner)
            clock.seconds += patience / 4
            assert not sharing.waits_for(owner)
            assert sharing.has_stalled_owner
            assert owner.is_overdue(sharing.lengths.keys() & owner.lengths.keys())
            assert not owner.has_stalled_owner, "it does not wait for itself"
            assert not owner.is_overdue(sharing.lengths.keys() & owner.lengths.keys(), 2)
        assert not sharing.waits_for(owner), "it has stalled for so long"
    assert not sharing.has_stalled_owner, "it owns nothing now"


def test_a_stalled_owner_of_other_text_holds_up_nothing(clock: Clock) -> None:
    flights = Flights(lambda rows: 1.0)
    owner, other = begun(flights, ONE), begun(flights, TWO)
    with owner.owning(), owner.stalled():
        clock.seconds += 5
        assert not other.has_stalled_owner
        owner.end()
        assert begun(flights, ONE).has_stalled_owner, "it has ended, but its cache is still on its way"
    assert not begun(flights, ONE).has_stalled_owner


def test_a_flight_ends_once_with_its_prompts_first_event() -> None:
    ends = list[str]()
    flights = Flights()
    flight = Flight({}, WeakSet(), flights.index(""), set(), lambda rows: None, lambda: ends.append("end"))
    events = list[str]()
    on_event = landing(flight, events.append)
    assert not flight.ended
    on_event("started")
    assert flight.ended
    on_event("finished")
    assert (ends, events) == (["end"], ["started", "finished"])
