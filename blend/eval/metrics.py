"""How good an answer is: its words against gold answers."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from blend.errors import ConfigError

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")


def normalise_answer(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces: the normalisation of the SQuAD evaluation script.

    Punctuation is every character of a Unicode punctuation class, as in the MLQA evaluation script, and the ASCII
    symbols that SQuAD removes; composed and decomposed accents are the same.
    """
    return _fix_articles(_replace_punctuation(text, ""))


def word_f1(prediction: str, answers: Sequence[str]) -> float | None:
    """F1 of the bags of normalised words, 0 to 1, against the best of `answers`.

    When either side has no words left, it is 1 if neither has, else 0 (SQuAD 2.0).
    """
    return _best(_pair_f1, prediction, answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float | None:
    """1 if the normalised prediction equals one of the normalised `answers`, else 0."""
    return _best(_pair_match, prediction, answers)


def rouge_l(prediction: str, answers: Sequence[str]) -> float | None:
    """ROUGE-L F-measure with Porter stemming, 0 to 1, against the best of `answers`.

    The score of the rouge-score package; on ASCII text its own tokenizer's, elsewhere words of any script count.
    Raises `ConfigError` when that package is missing.
    """
    return _best(_pair_rouge, prediction, answers)


def value_recall(prediction: str, values: Sequence[str]) -> float | None:
    """Share of `values` that the prediction names, in any order, each as whole words after normalisation."""
    named = _named(prediction, values)
    return sum(named) / len(named) if named else None


def names_one(prediction: str, answers: Sequence[str]) -> bool | None:
    """Whether the prediction names one of `answers`, as whole words after normalisation; None without answers."""
    return any(_named(prediction, answers)) if answers else None


def _named(prediction: str, values: Sequence[str]) -> list[bool]:
    """Whether the prediction names each value."""
    predictions = _readings(prediction)
    return [_names(predictions, value) for value in values]


def _names(predictions: set[str], value: str) -> bool:
    values = _readings(value) - {""}
    return any(f" {words} " in f" {prediction} " for words in values for prediction in predictions)


def _readings(text: str) -> set[str]:
    """The text normalised; "12,7" may be one number or a list of two."""
    return {_fix_articles(_replace_punctuation(text, mark)) for mark in ("", " ")}


def _best(
    score: Callable[[str, str], float],
    prediction: str,
    answers: Sequence[str],
) -> float | None:
    return max((score(prediction, answer) for answer in answers), default=None)


def _pair_match(prediction: str, answer: str) -> float:
    return float(normalise_answer(prediction) == normalise_answer(answer))


def _pair_rouge(prediction: str, answer: str) -> float:
    return float(_rouge_scorer().score(answer, prediction)["rougeL"].fmeasure)


def _pair_f1(prediction: str, answer: str) -> float:
    predicted = normalise_answer(prediction).split()
    expected = normalise_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def _replace_punctuation(text: str, replacement: str) -> str:
    lowered = unicodedata.normalize("NFC", text.lower())
    return "".join(replacement if _is_punctuation(character) else character for character in lowered)


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _fix_articles(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text).split())


@cache
def _rouge_scorer() -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError as error:
        raise ConfigError("ROUGE-L needs the rouge-score package: pip install 'kvblend[report]'") from error
    return RougeScorer(["rougeL"], tokenizer=_RougeTokenizer(DefaultTokenizer(use_stemmer=True)))


class _RougeTokenizer:
    """Words of any script; English ones as the package's own tokenizer makes them, lower-cased and stemmed."""

    def __init__(self, english: DefaultTokenizer) -> None:
        self._english = english

    def tokenize(self, text: str) -> list[str]:
        words = _WORD.findall(unicodedata.normalize("NFC", text.lower()))
        return [token for word in words for token in self._tokens(word)]

    def _tokens(self, word: str) -> list[str]:
        return self._english.tokenize(word) if word.isascii() else [word]
