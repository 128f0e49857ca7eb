"""How the tokens of an answer are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blend.config import ANSWER_TOKENS
from blend.errors import ConfigError

RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, 16),
    "max_tokens": (1, 1_000_000),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "logprobs": (0, 20),
    "top_k": (-1, 1_000_000_000),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 2),
}
"""The least and the greatest value of each number of `Sampling`."""
LOGIT_BIAS = (-100, 100)
"""The least and the greatest bias of a token."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_tokens: longest answer.
        temperature: below 1e-5 the likeliest token is taken.
        top_p: sample from the likeliest tokens that together have this probability.
        seed: makes sampling repeatable; answer i is seeded with seed + i.
        logprobs: alternatives that come with each token; None gives no log-probabilities.
        ignore_eos: go on behind a token that would end the answer.
        top_k: sample from so many of the likeliest tokens; 0 or -1: from all.
        min_p: sample from tokens with at least this share of the likeliest token's probability.
        presence_penalty: subtracted once from the logits of the answer's tokens.
        frequency_penalty: subtracted from these logits for each time that the token occurs.
        repetition_penalty: divides positive logits of tokens of prompt and answer, and multiplies negative ones; None: the
            model's own.
        logit_bias: token id -> number added to its logit.
        n: answers to the prompt.

    Raises:
        ConfigError: a value is out of range.

    """

    max_tokens: int = ANSWER_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            _require(name, getattr(self, name), low, high)
        for token, bias in self.logit_bias.items():
            _require(f"logit_bias of token {token}", bias, *LOGIT_BIAS)


def _require(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # also refuses NaN
        raise ConfigError(f"{name} is {value}; give a number from {low} to {high:,}")
