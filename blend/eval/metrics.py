"""How good an answer is: its words against gold answers."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from blend.errors import ConfigError
from blend_retrieval.installation import install_command

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")
_LONG_ANSWER = 12  # words, from which on ROUGE-L says more than word F1


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


def exact_match(prediction: str, answers: Sequence[str]) -> float | None:
    """1 if the prediction equals one of `answers`, both normalised, else 0 (SQuAD)."""
    normalised = normalise_answer(prediction)
    return max((float(normalised == normalise_answer(answer)) for answer in answers), default=None)


def rouge_l(prediction: str, answers: Sequence[str]) -> float | None:
    """ROUGE-L F-measure with Porter stemming, 0 to 1, against the best of `answers` (Lin 2004), by the package rouge-score.

    Its tokenizer drops all but ASCII letters and digits; here words of every script count. Raises `ConfigError` without that
    package.
    """
    if not answers:
        return None
    scorer = _rouge_scorer()
    return max(float(scorer.score(answer, prediction)["rougeL"].fmeasure) for answer in answers)


def wants_rouge(answers: Sequence[str], task: str) -> bool:
    """Whether ROUGE-L measures answers to a question: its task is a summary, or its gold answers are long."""
    are_long = all(len(_WORD.findall(answer)) >= _LONG_ANSWER for answer in answers)
    return bool(answers) and (are_long or task.lower().startswith("summar"))


def has_rouge() -> bool:
    """Whether the package rouge-score is installed."""
    return find_spec("rouge_score") is not None


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


@cache
def _rouge_scorer() -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError:
        raise ConfigError(f"ROUGE-L needs the package rouge-score: {install_command('report')}") from None
    return RougeScorer(["rougeL"], tokenizer=_RougeTokenizer(DefaultTokenizer(use_stemmer=True)))


class _RougeTokenizer:
    """Words of every script; English ones as the package's own tokenizer makes them, lower-cased and stemmed."""

    def __init__(self, english: DefaultTokenizer) -> None:
        self._english = english

    def tokenize(self, text: str) -> list[str]:
        words = _WORD.findall(unicodedata.normalize("NFC", text.lower()))
        return [token for word in words for token in self._tokens(word)]

    def _tokens(self, word: str) -> list[str]:
        return list(self._english.tokenize(word)) if word.isascii() else [word]
