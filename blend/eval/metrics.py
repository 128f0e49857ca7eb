"""How good an answer is (words), and how close a method stays to full recompute (KL, top-1)."""

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
    import torch
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
    return _best(lambda left, right: float(normalise_answer(left) == normalise_answer(right)), prediction, answers)


def rouge_l(prediction: str, answers: Sequence[str]) -> float | None:
    """ROUGE-L F-measure with Porter stemming, 0 to 1, against the best of `answers`.

    The score of the rouge-score package; on ASCII text its own tokenizer's, elsewhere words of any script count.
    Raises `ConfigError` when that package is missing.
    """
    scorer = _rouge_scorer()
    return _best(lambda left, right: float(scorer.score(right, left)["rougeL"].fmeasure), prediction, answers)


def value_recall(prediction: str, values: Sequence[str]) -> float | None:
    """Share of `values` that the prediction names, in any order, each as whole words after normalisation."""
    if not values:
        return None
    # "12,7" may be one number or a list of two: a value counts in either reading.
    readings = [f" {_fix_articles(_replace_punctuation(prediction, mark))} " for mark in ("", " ")]
    return sum(_names(readings, value) for value in values) / len(values)


def _names(readings: list[str], value: str) -> bool:
    wanted = {_fix_articles(_replace_punctuation(value, mark)) for mark in ("", " ")} - {""}
    return any(f" {words} " in reading for words in wanted for reading in readings)


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float | None:
    return max((score(prediction, answer) for answer in answers), default=None)


def _pair_f1(prediction: str, answer: str) -> float:
    left, right = normalise_answer(prediction).split(), normalise_answer(answer).split()
    if not left or not right:
        return float(left == right)
    shared = (Counter(left) & Counter(right)).total()
    return 2 * shared / (len(left) + len(right))


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
        return [token for word in words for token in (self._english.tokenize(word) if word.isascii() else [word])]


# Rows taken together: bounds the float64 copies to some tens of MiB with the largest vocabularies.
ROWS_AT_ONCE = 16


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || method) of next-token distributions in nats, float64 `[tokens]`, from logits `[tokens, vocab]`.

    Tokens that the reference excludes (logit minus infinity) add nothing; one that the method alone excludes makes it
    infinite. Raises `ValueError` for other shapes and for NaN, which means that a forward pass went wrong.
    """
    import torch

    _check_logits(reference_logits, logits)
    blocks = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(logits), ROWS_AT_ONCE)]
    parts = [_block_divergence(reference_logits[block], logits[block]) for block in blocks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def top1_agreement(reference_logits: torch.Tensor, logits: torch.Tensor) -> float | None:
    """Share of positions whose most likely token is the same, from logits `[tokens, vocab]`; None without positions."""
    _check_logits(reference_logits, logits)
    if not len(logits):
        return None
    agree = reference_logits.argmax(-1) == logits.argmax(-1).to(reference_logits.device)
    return float(agree.double().mean())


def _block_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    reference = reference_logits.double().log_softmax(-1)
    other = logits.to(reference_logits.device).double().log_softmax(-1)
    probability = reference.exp()
    terms = (probability * (reference - other)).masked_fill(probability == 0, 0.0)
    # Rounding may leave the sum of two equal distributions a hair below zero.
    return terms.sum(-1).clamp_min(0.0)


def _check_logits(reference_logits: torch.Tensor, logits: torch.Tensor) -> None:
    if reference_logits.ndim != 2 or reference_logits.shape != logits.shape:
        raise ValueError(
            "logits must be [tokens, vocab] and of one shape, "
            f"not {tuple(reference_logits.shape)} and {tuple(logits.shape)}"
        )
    for name, values in (("reference", reference_logits), ("method", logits)):
        if values.isnan().any():
            raise ValueError(f"logits of the {name} contain NaN: its forward pass went wrong")
