"""Stop texts: an answer ends in front of the one that is complete first, whatever the pieces, in linear time."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from blend.serve.outputs.detokenizer import StopSearch, StopText


def searched(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    search = StopSearch(tuple(map(StopText, stops)))
    sent = [search.add(piece) for piece in pieces]
    return [*sent, search.finish()], search.ended


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize("seed", range(200))
def test_random_texts_in_random_pieces(seed: int) -> None:
    chance = random.Random(seed)
    stops = ["".join(chance.choices("ab", k=chance.randint(1, 6))) for _ in range(chance.randint(0, 4))]
    pieces = ["".join(chance.choices("abc", k=chance.randint(0, 5))) for _ in range(12)]
    sent, ended = searched(stops, pieces)
    assert ("".join(sent), ended) == expected(stops, "".join(pieces))


def test_no_more_is_held_back_than_may_begin_a_stop_text() -> None:
    sent, ended = searched(["ananas", "nab"], ["banan", "a", "nas"])
    assert (sent, ended) == (["b", "", "an", ""], True)
    assert searched(["ananas"], ["bana", "na", "!"]) == (["b", "", "anana!", ""], False)
    assert searched(["end"], ["the e"]) == (["the ", "e"], False)


def lines_run(stop_length: int) -> int:
    """Lines of Python that run for an answer of which every piece may begin a stop text."""
    search, count = StopSearch([StopText("a" * stop_length + end) for end in "bcd"]), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(300):
            search.add("aaaa")
    finally:
        sys.settrace(before)
    return count


def test_long_stop_texts_cost_no_more_than_short_ones() -> None:
    assert lines_run(500) < 1.5 * lines_run(20)
