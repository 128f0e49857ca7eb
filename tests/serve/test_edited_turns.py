"""A turn that edits an earlier prompt takes its rows from there, wherever its text now stands; nobody else's prompt does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import FEW, Answer
from rooms import put, serving, settled

from blend.serve.engine import prefill
from blend.serve.request import Message, Request
from blend.serve.service import Service

STORY = "The clerk of the lock counts the boats every day, and writes down who rowed them. "
HISTORY = "".join(f"Day {day}: {STORY}Boat {7 * day} came last.\n" for day in range(24))
CLOCK = "It is {} o'clock, and the lock is {}.\n"
QUESTION = "Which boat came last on day 9?"


@pytest.fixture
def service(tmp_path: Path, model: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", model, corrects_learned=False) as service:
        yield service


def turn(service: Service, hour: str, more: tuple[Message, ...] = (), **fields: Any) -> Answer:
    """A turn whose header changes; more: messages behind it."""
    said = (Message("system", CLOCK.format(hour, "open") + HISTORY), Message("user", QUESTION), *more)
    answer = put(service, Request(said, **{"sampling": FEW, "user": "ann", **fields}))
    settled(service)
    return answer


def test_a_changed_header_moves_the_text_behind_it(service: Service) -> None:
    first = turn(service, "nine").figures
    assert first.rows_moved == 0
    later = turn(service, "half past seventeen")
    figures = later.figures
    assert figures.rows_moved > 0.8 * figures.rows
    assert figures.rows_computed < 0.2 * figures.rows
    assert (figures.method, figures.reason) == ("blend", "")
    assert figures.bytes_loaded == 0
    full = turn(service, "half past seventeen", method="full", cold=True)
    assert later.tokens == full.tokens
    # Moved rows move on.
    assert turn(service, "ten").figures.rows_moved > 0.8 * figures.rows


@pytest.mark.parametrize(
    "fields",
    [
        *({"user": "bob"}, {"user": ""}, {"user": "ann", "session": "s"}, {"tenant": "beta"}),
        *({"quality": 0.01}, {"method": "full"}, {"cold": True}),
    ],
)
def test_nobody_elses_prompt_takes_these_rows_nor_one_that_asks_for_more(service: Service, fields: Any) -> None:
    turn(service, "nine")
    assert turn(service, "ten", **fields).figures.rows_moved == 0


def test_a_turn_that_goes_on_looks_for_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Message("assistant", turn(service, "nine").text)
    monkeypatch.setattr(prefill, "moved", lambda *_: pytest.fail("it was searched"))
    figures = turn(service, "nine", more=(said, Message("user", "And on day 10?"))).figures
    assert figures.rows_reused > 0.8 * figures.rows


def test_rows_of_a_deleted_session_are_gone(service: Service) -> None:
    turn(service, "nine", session="mill")
    assert turn(service, "ten", session="mill").figures.rows_moved > 0
    service.end_session("", "ann", "mill")
    assert turn(service, "eleven", session="mill").figures.rows_moved == 0
