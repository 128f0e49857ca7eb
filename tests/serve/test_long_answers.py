"""What a token of an answer costs: no more late in a long answer than early, and little with any stop texts."""

import json
import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from blend.serve.forms.thoughts import Thinking, ThoughtMarkers, ThoughtParser
from blend.serve.forms.tool_calls import GENERIC, HERMES, CallFormat, CallParser
from blend.serve.outputs.detokenizer import StopSearch, StopText
from blend.serve.request import ToolCall

MOST_S = 0.5  # for all tokens; what is read again with each one takes seconds
THINKING = Thinking(ThoughtMarkers("<think>", "</think>"), opened=True)
LONG = 500  # characters of a stop text

Step = Callable[[str], object]


def stops(*texts: str) -> Step:
    return StopSearch([StopText(text) for text in texts]).add


def calls(form: CallFormat, begin: str, *, required: bool = False) -> Step:
    parser = CallParser(form, ["f"], required=required)
    parser.add(begin)
    return parser.add


def thoughts(begin: str) -> Step:
    parser = ThoughtParser(THINKING)
    parser.add(begin)
    return parser.add


ARGUMENTS = '{"name": "f", "arguments": {"a": ['
ANSWERS: dict[str, tuple[Callable[[], Step], str, int]] = {
    "a call with lists": (lambda: calls(HERMES, f"<tool_call>{ARGUMENTS}"), "[], ", 6_000),
    "a call that must be": (lambda: calls(HERMES, f"<tool_call>{ARGUMENTS}", required=True), "[], ", 6_000),
    "a call without markers": (lambda: calls(GENERIC, ARGUMENTS), "[], ", 6_000),
    "a call with a long text": (lambda: calls(HERMES, f'<tool_call>{ARGUMENTS}"'), "}", 60_000),
    "a call that begins with blanks": (lambda: calls(GENERIC, "["), " ", 60_000),
    "blanks, and functions": (lambda: calls(HERMES, ""), " ", 60_000),
    "thoughts": (lambda: thoughts("So "), "word ", 60_000),
    "blanks in thoughts": (lambda: thoughts("So "), " ", 60_000),
    "blanks before thoughts": (lambda: ThoughtParser(THINKING).add, " ", 60_000),
    "text behind thoughts": (lambda: thoughts("So</think>"), "word ", 60_000),
    "the same letter in all stop texts": (
        lambda: stops("a" * 255 + "b" + "a" * 256, *("a" * 255 + "b" + "a" * (200 - n) + "c" for n in range(31))),
        "a" * 255 + "b" + "a" * 250,
        20,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_token_costs_the_same_however_long_the_answer_is(name: str) -> None:
    start, piece, count = ANSWERS[name]
    step = start()
    begin = time.process_time()
    for _ in range(count):
        step(piece)
    assert time.process_time() - begin < MOST_S


def test_stop_texts_that_all_but_match_cost_little() -> None:
    """Text that one stop text holds back is not searched again for the others."""
    step = stops("a" * 255 + "b" + "a" * 256, *("a" * (400 + n) + "c" for n in range(31)))
    begin = time.process_time()
    for _ in range(4):
        step("a" * 255 + "b")
        for _ in range(250):
            step("a")
    assert time.process_time() - begin < MOST_S


def in_pieces(text: str, draws: random.Random) -> list[str]:
    places = sorted({0, len(text), *(draws.randrange(len(text)) for _ in range(len(text) // 3))})
    return [text[start:stop] for start, stop in pairwise(places)]


@pytest.mark.parametrize("form", [HERMES, GENERIC], ids=["marked", "bare"])
def test_a_long_call_is_read_whole_as_soon_as_it_ends(form: CallFormat) -> None:
    """Brackets, quotes and backslashes in texts count for nothing, wherever a token ends."""
    draws = random.Random(0)
    texts = ["".join(draws.choices('[]{}"\\,: a', k=12)) for _ in range(400)]
    arguments = {"a": [[text, {"b": text}] for text in texts]}
    call = json.dumps({"name": "f", "arguments": arguments})
    first, second = (f"{form.begin}{call}{form.end}" for _ in range(2))
    parser = CallParser(form, ["f"])
    *before, last = in_pieces(first, draws)
    pieces = [piece for text in before for piece in parser.add(text)]
    assert not pieces
    ended = parser.add(last)
    further = parser.add(f"\n{second}")
    assert [json.loads(made.arguments) for made in (*ended, *further) if isinstance(made, ToolCall)] == [arguments] * 2
    assert not parser.finish()


def test_a_quote_behind_a_backslash_that_ended_a_token_is_part_of_a_text() -> None:
    call = json.dumps({"name": "f", "arguments": {"a": "x" * 2_000 + '"'}})
    parser = CallParser(GENERIC, ["f"])
    (ended,) = (piece for character in call for piece in parser.add(character))
    assert isinstance(ended, ToolCall)


def test_a_long_text_that_is_no_call_is_given_out_as_it_is() -> None:
    text = '{"name": "f", "arguments": {"a": [' + "[], " * 2_000 + "nothing} " * 400
    parser = CallParser(GENERIC, ["f"])
    pieces = [piece for start in range(0, len(text), 7) for piece in parser.add(text[start : start + 7])]
    assert pieces
    assert "".join(str(piece) for piece in (*pieces, *parser.finish())) == text
