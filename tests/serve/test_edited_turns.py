"""A turn that edits an earlier prompt: what stands behind the edit is computed, unless it was shown not to depend on it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changing import until
from engines import FEW, Answer
from rooms import put, serving, settled
from served import Served

from blend.sampling import Sampling
from blend.serve.engine import histories
from blend.serve.engine.prefixes import PrefixCache
from blend.serve.events import Audit
from blend.serve.request import Message, Request
from blend.serve.service import Service
from blend.types import ChunkCache

STORY = "The clerk of the lock counts the boats every day, and writes down who rowed them. "
HISTORY = "".join(f"Day {day}: {STORY}Boat {7 * day} came last.\n" for day in range(24))
CLOCK = "The lock is open. It is {} o'clock, says the clerk of the lock, and boats may come.\n"
QUESTION = "Which boat came last on day 9?"
MOVING = {"edits": "fast"}


@pytest.fixture
def service(tmp_path: Path, model: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", model, corrects_learned=False) as service:
        yield service


def turn(service: Service, hour: str, more: tuple[Message, ...] = (), history: str = HISTORY, **fields: Any) -> Answer:
    """A turn whose header changes; more: messages behind it."""
    before = Message("user", "Read the book of the lock."), Message("assistant", "I have read it.")
    said = (Message("system", CLOCK.format(hour) + history), *before, Message("user", QUESTION), *more)
    answer = put(service, Request(said, **{"sampling": FEW, "user": "ann", **fields}))
    settled(service)
    return answer


def edited(answer: Answer) -> int:
    """Tokens that were computed because of an edit."""
    return sum(part.tokens for part in answer.figures.not_reused if part.reason == "edited")


@pytest.mark.parametrize("hours", [("nine", "ten", "eleven"), ("9", "ten", "11")])
def test_behind_words_that_change_everything_is_computed(service: Service, hours: tuple[str, ...]) -> None:
    turn(service, hours[0])
    for hour in hours[1:]:
        answer = turn(service, hour)
        figures = answer.figures
        assert (figures.method, figures.reason, figures.edits, figures.rows_moved) == ("full", "edited", "exact", 0)
        assert edited(answer) > 0.8 * figures.rows
        assert answer.tokens == turn(service, hour, method="full", cold=True).tokens


def test_behind_numbers_that_change_again_rows_move_that_were_the_same_before(service: Service) -> None:
    turn(service, "309")
    assert turn(service, "311").figures.edits == "exact"
    for hour in ("314", "329"):
        answer = turn(service, hour)
        figures = answer.figures
        assert (figures.method, figures.reason, figures.edits) == ("blend", "", "checked")
        assert figures.rows_moved > 0.8 * figures.rows
        assert figures.rows_computed < 0.4 * figures.rows
        assert figures.bytes_loaded == 0
        assert answer.tokens == turn(service, hour, method="full", cold=True).tokens
    # A number in another place did not change before.
    assert turn(service, "329", history=HISTORY.replace("Day 1:", "Day 40:")).figures.edits == "exact"


def test_lines_that_hold_the_number_are_computed(service: Service) -> None:
    half = HISTORY[: len(HISTORY) // 2]
    history = f"{half}\nAt 314 the bell rings, and nobody rows.\n{half}"
    for hour in ("309", "311"):
        turn(service, hour, history=history)
    answer = turn(service, "314", history=history, trace=True)
    assert answer.figures.edits == "checked"
    tokens = answer.started.trace
    text = "".join(token.text for token in tokens)
    assert text.count("At 314 the bell rings") == 1
    begin = text.index("314 the bell")
    at = 0
    for token in tokens:
        if begin <= at < begin + len("314 the bell rings, and nobody"):
            assert token.recomputed, token
        at += len(token.text)


def test_new_text_is_compared_in_idle_time_and_moves_too(service: Service) -> None:
    said = (Message("assistant", "Boat 63."), Message("user", STORY * 6))
    turn(service, "309")
    turn(service, "311", said)
    figures = turn(service, "314", said).figures
    assert figures.edits == "checked"
    assert figures.rows_computed < 0.4 * figures.rows
    alone = turn(service, "329").figures
    assert figures.rows_computed < alone.rows_computed + 100


@pytest.mark.parametrize(
    "fields",
    [
        *({"user": "bob"}, {"user": ""}, {"user": "ann", "session": "s"}, {"tenant": "beta"}),
        *({"quality": 0.01}, {"method": "full"}, {"cold": True}, {"edits": "exact"}),
    ],
)
def test_nobody_elses_prompt_takes_these_rows_nor_one_that_asks_for_more(service: Service, fields: Any) -> None:
    turn(service, "309", **MOVING)
    assert turn(service, "311", **{**MOVING, **fields}).figures.rows_moved == 0


def test_nobody_else_goes_on_behind_rows_that_moved(service: Service) -> None:
    """They have read what their author's edit took out, also where the author has gone on behind them."""
    turn(service, "309", **MOVING)
    answer = turn(service, "311", **MOVING)
    assert answer.figures.rows_moved > 0
    said = (Message("assistant", answer.text), Message("user", "And on day 10?"))
    own = turn(service, "311", said)
    assert own.figures.rows_inexact > 0
    longer = (*said, Message("assistant", own.text), Message("user", "And on day 11?"))
    assert turn(service, "311", longer).figures.rows_inexact > 0
    for fields in ({"user": "bob"}, {"user": ""}, {"session": "s"}, {"user": "eve"}):
        more = said if fields == {"user": "eve"} else longer
        other = turn(service, "311", more, **fields)
        assert other.figures.rows_inexact == 0, fields
        assert other.tokens == turn(service, "311", more, method="full", cold=True).tokens


def test_fast_moves_all_at_once_and_shows_nothing(service: Service) -> None:
    turn(service, "nine")
    figures = turn(service, "half past seventeen", **MOVING).figures
    assert figures.edits == "fast"
    assert figures.rows_moved > 0.8 * figures.rows
    assert figures.rows_computed < 0.2 * figures.rows
    # Moved rows move on; by default they do not.
    assert turn(service, "ten", **MOVING).figures.rows_moved > 0.8 * figures.rows
    assert turn(service, "eleven").figures.edits == "exact"


def test_a_turn_that_goes_on_looks_for_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Message("assistant", turn(service, "nine").text)
    monkeypatch.setattr(histories, "edit_of", lambda *_: pytest.fail("it was searched"))
    figures = turn(service, "nine", more=(said, Message("user", "And on day 10?"))).figures
    assert figures.rows_reused > 0.8 * figures.rows


def test_rows_of_a_deleted_session_are_gone(service: Service) -> None:
    turn(service, "nine", session="mill")
    assert turn(service, "ten", session="mill", **MOVING).figures.rows_moved > 0
    service.end_session("", "ann", "mill")
    assert turn(service, "eleven", session="mill", **MOVING).figures.rows_moved == 0


def test_where_full_prefill_answers_otherwise_nothing_moves_until_a_prompt_was_exact(service: Service) -> None:
    for hour in ("309", "311", "314"):
        answer = turn(service, hour)
    assert answer.figures.edits == "checked"
    service.engine.doubt("", "ann")
    assert turn(service, "329", **MOVING).figures.edits == "exact"
    assert turn(service, "331").figures.edits == "exact"  # it is compared anew
    assert turn(service, "334").figures.edits == "checked"


def test_another_conversation_behind_another_header_is_no_edited_history(service: Service) -> None:
    for hour in ("nine", "ten"):
        said = Message("system", CLOCK.format(hour) + HISTORY), Message("user", f"{QUESTION} Say it at {hour}.")
        answer = put(service, Request(said, sampling=FEW, user="ann"))
        settled(service)
    assert (answer.figures.method, answer.figures.edits) == ("blend", "")
    assert answer.figures.hits > 0


def test_text_that_is_pasted_again_with_another_question_is_no_edited_history(service: Service) -> None:
    def ask(clock: str, history: str, question: str, before: tuple[Message, ...] = ()) -> Answer:
        text = f"{CLOCK.format(clock)}{history}\n{question}"
        answer = put(service, Request((*before, Message("user", text)), sampling=FEW, user="ann"))
        settled(service)
        return answer

    ask("nine", HISTORY, QUESTION)
    figures = ask("ten", HISTORY, "Who counts the boats?").figures
    assert (figures.method, figures.edits, figures.rows_moved) == (
        "blend",
        "",
        0,
    )  # out of caches that were computed apart
    assert figures.hits > 0
    # So is a conversation in which another one's text stands in another order. Far less than half of it keeps its order:
    # how much of a text that repeats itself is found depends on the process's hashes.
    days = HISTORY.splitlines(keepends=True)
    swapped = "".join([*days[20:], *days[16:20], *days[12:16], *days[8:12], *days[4:8], *days[:4]])
    task = (Message("user", "Read the book of the lock."), Message("assistant", "I will."))
    figures = ask("ten", swapped, "Who counts the boats?", task).figures
    assert (figures.edits, figures.rows_moved) == ("", 0)


def agents_turn(service: Service, task: str, read: str = "", more: tuple[Message, ...] = ()) -> Answer:
    """The first turn of a subagent, or one behind a file that it has read."""
    said = [Message("system", CLOCK.format("nine")), Message("user", task)]
    if read:
        said += [Message("assistant", "I read the book of the lock."), Message("user", read)]
    answer = put(service, Request((*said, *more), sampling=FEW, user="ann"))
    settled(service)
    return answer


def test_what_subagents_read_behind_their_tasks_is_no_edited_history(service: Service) -> None:
    names = ("Ann", "Bob", "Cid", "Dot", "Eve", "Fay")
    tasks = [f"{name}: say which boat came last on day {day}." for day, name in enumerate(names)]
    for task in tasks:
        agents_turn(service, task)
    figures = [agents_turn(service, task, HISTORY).figures for task in tasks]
    assert {of_one.edits for of_one in figures} == {""}
    assert {of_one.method for of_one in figures[2:]} == {"blend"}


def test_a_result_that_changes_in_a_subagents_own_history_is_an_edit(service: Service) -> None:
    more = Message("assistant", "So it is."), Message("user", QUESTION)
    for task in ("Ann: count the boats.", "Bob: count the days."):
        agents_turn(service, task)
        agents_turn(service, task, HISTORY, more)
    changed = HISTORY.replace("Boat 14 ", "Boat 15 ")
    figures = agents_turn(service, "Ann: count the boats.", changed, more).figures
    assert (figures.edits, figures.reason) == ("exact", "edited")


@pytest.mark.parametrize("how", ["verified", "audited"])
def test_what_was_served_from_moved_rows_is_what_an_audit_compares(
    tmp_path: Path, model: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of = PrefixCache.rows_of

    def spoiled(*arguments: Any) -> ChunkCache | None:
        rows = rows_of(*arguments)
        return rows and replace(rows, values=tuple(layer.flip(1) * 8 for layer in rows.values))

    audits: list[Audit] = []
    drawn = {"sampling": Sampling(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True), **MOVING}
    audited = {"audit": float(how == "audited"), "on_audit": audits.append}
    with serving(tmp_path / "store", model, corrects_learned=False, **audited) as service:
        turn(service, "nine", **drawn)
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "rows_of", spoiled)
            served = turn(service, "half past seventeen", verify=how == "verified", **drawn)
        assert served.figures.rows_moved > 0
        full = turn(service, "half past seventeen", method="full", cold=True, **drawn)
        assert served.tokens != full.tokens
        if how == "audited":
            until(lambda: (True, None) in [(audit.flipped, audit.kl) for audit in audits])
        assert service.engine.histories.is_doubted("", "ann")
        assert turn(service, "ten", **drawn).figures.edits == "exact"
        assert not service.engine.histories.is_doubted("", "ann")
        assert turn(service, "eleven", **drawn).figures.edits == "fast"


def test_a_client_chooses_and_is_told(serve: Callable[..., Served]) -> None:
    served = serve(learn_budget=1 << 24)
    said = [
        {"role": "user", "content": "Read the book of the lock."},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": QUESTION},
    ]

    def ask(clock: str, edits: str) -> dict[str, Any]:
        header = {"role": "system", "content": CLOCK.format(clock) + HISTORY}
        fields = {"user": "ann", "max_tokens": 2, "kvblend": {"edits": edits}}
        reply = served.ask(messages=[header, *said], **fields).json()
        settled(served.state.service)
        figures: dict[str, Any] = reply["kvblend"]["figures"]
        return figures

    assert ask("nine", "checked")["edits"] == ""
    assert ask("ten", "fast")["edits"] == "fast"
    figures = ask("eleven", "checked")
    assert (figures["edits"], figures["reason"], figures["method"]) == ("exact", "edited", "full")
    assert figures["not_reused"][0]["reason"] == "edited"
    assert ask("twelve", "exact")["edits"] == "exact"
    refused = served.ask(messages=said, kvblend={"edits": "quick"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kvblend.edits"
