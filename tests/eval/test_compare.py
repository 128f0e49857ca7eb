"""How many answers changed, what a change means, and whether a target is kept, by hand."""

import math
from typing import NamedTuple

import pytest

from blend.compare import ComparedAnswer, Meanings, compare, likely_kl
from blend.intervals import mean_interval, share_interval
from blend.quality import Quality


class Answer(NamedTuple):
    answer: str
    right: bool | None = None
    kl: float | None = None


def test_changes_by_hand():
    pairs = [
        (Answer("27", True), Answer("27", True)),
        (Answer("27 airports", True), Answer("27", True)),
        (Answer("27", True), Answer("28", False)),
        (Answer("28", False), Answer("27", True)),
        (Answer("29", False), Answer("27", True)),
        (Answer("30", False), Answer("28", False)),
        (Answer("Yes."), Answer("No.")),
    ]
    comparison = compare(ComparedAnswer.of(*pair) for pair in pairs)
    assert comparison.flips == share_interval(6, 7)
    assert comparison.meanings == Meanings(equal=1, better=1, worse=2, wrong=1)
    assert comparison.kl is None
    assert (
        comparison.flips_in_words == "86% [49%, 97%]; of these 1 equal in meaning, 1 better, 2 worse, 1 wrong in both"
    )


def test_what_is_asked_is_judged_and_nothing_else():
    comparison = compare(ComparedAnswer(place < 4, kl) for place, kl in enumerate([0.02, 0.04] * 10))
    assert comparison.judged(Quality()) == {}
    judged = comparison.judged(Quality(0.05, 0.01))
    assert {name: figure.decision for name, figure in judged.items()} == {"kl": "kept", "flips": "broken"}
    kl = mean_interval([0.02, 0.04] * 10)
    assert judged["kl"] == (kl.mean, kl.low, kl.high, 0.05, 20)
    assert compare([ComparedAnswer(False, math.inf)]).judged(Quality(0.05)) == {}  # no mean


def logarithms(*probabilities: float) -> dict[int, float]:
    return {token: math.log(probability) for token, probability in enumerate(probabilities)}


def test_kl_of_likely_tokens():
    assert likely_kl(logarithms(0.7, 0.2), logarithms(0.7, 0.2)) == pytest.approx(0, abs=1e-9)
    expected = 0.7 * math.log(0.7 / 0.2) + 0.2 * math.log(0.2 / 0.7) + 0.1 * math.log(1)
    assert likely_kl(logarithms(0.7, 0.2), logarithms(0.2, 0.7)) == pytest.approx(expected)
