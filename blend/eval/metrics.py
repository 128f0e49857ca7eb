"""How good an answer is: its words against gold answers."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise_answer(text: str, punctuation: str = "") -> str:
    """Lower case, no punctuation, no English articles, single spaces: the normalisation of the SQuAD evaluation script.

    Punctuation is every character of a Unicode punctuation class, as in the MLQA evaluation script, and the ASCII
    symbols that SQuAD removes; composed and decomposed accents are the same. punctuation: what takes its place.
    """
    lowered = unicodedata.normalize("NFC", text.lower())
    words = "".join(punctuation if _is_punctuation(character) else character for character in lowered)
    return " ".join(_ARTICLES.sub(" ", words).split())


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def word_f1(prediction: str, answers: Sequence[str]) -> float | None:
    """F1 of the bags of normalised words, 0 to 1, against the best of `answers`.

    When either side has no words left, it is 1 if neither has, else 0 (SQuAD 2.0).
    """
    return max((_pair_f1(prediction, answer) for answer in answers), default=None)


def names_one(prediction: str, answers: Sequence[str]) -> bool | None:
    """Whether the prediction names one of `answers`, as whole words after normalisation; None without answers."""
    if not answers:
        return None
    predictions = [f" {words} " for words in _readings(prediction)]
    named = {words for answer in answers for words in _readings(answer)} - {""}
    return any(f" {words} " in text for words in named for text in predictions)


def _readings(text: str) -> set[str]:
    """The text normalised; "12,7" may be one number or a list of two."""
    return {normalise_answer(text), normalise_answer(text, punctuation=" ")}


def _pair_f1(prediction: str, answer: str) -> float:
    predicted = normalise_answer(prediction).split()
    expected = normalise_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))
