"""Estimates how far a blended prompt will be from full recompute, and chooses how many of its rows are recomputed.

The question runs over the stored caches to choose rows. That pass shows two signs of the error to come: how uncertain the first
token is, and how much of the question's attention falls on rows that stay stale. An estimator, fitted to prompts of
the corpus for which full recompute is known too, turns these signals into an expected KL (docs/study.md). It also chooses the
limit that estimates are held to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blend.intervals import upper_share

if TYPE_CHECKING:
    from blend.config import BlendConfig

RATIOS = (0.05, 0.15, 0.30, 0.60)  # of stored rows; where none suffices, all are recomputed
FOLDS = 4
COMPARED_TOKENS = 32  # of an answer
VERSION = 2
_FLOOR = 1e-4  # nats; added before logarithms
_RIDGE = 0.3
MOST_KL = 1.0  # nats; a larger KL counts as this
_Array = NDArray[np.float64]


class Signals(NamedTuple):
    """The signs of a prompt's error that the question's pass shows.

    Attributes:
        entropy: Entropy of the first token's distribution over the stored caches, in nats.
        stale: Share of the question's attention that lies on rows which will stay stale.

    """

    entropy: float
    stale: float


def signals_of(logits: torch.Tensor, attention: torch.Tensor, stale: torch.Tensor, recomputed: torch.Tensor) -> Signals:
    """The signals for one choice of rows.

    Args:
        logits: `[vocab]` of the question's last row over the stored caches.
        attention: of the question to each row of the prompt, `[rows]`.
        stale: positions of rows whose stored KV may be stale, `[stale]`.
        recomputed: positions of rows that will be recomputed, `[recomputed]`.

    """
    logprobs = logits.float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    still_stale = stale[~torch.isin(stale, recomputed)]
    stale_share = attention[still_stale].sum() / attention.sum().clamp_min(1e-20)
    return Signals(float(entropy), float(stale_share))


class Quality(NamedTuple):
    """The distance to full recompute that blended answers may have; None asks nothing.

    Attributes:
        kl: Mean KL to full recompute, nats a token.
        flips: Share of answers whose greedy text differs from full recompute's within the first `COMPARED_TOKENS` tokens.

    """

    kl: float | None = None
    flips: float | None = None

    @classmethod
    def of(cls, config: BlendConfig) -> Quality:
        """The quality that a configuration asks for."""
        return cls(config.quality, config.flips)

    @property
    def asked(self) -> bool:
        """Whether anything is asked."""
        return self.kl is not None or self.flips is not None

    def includes(self, other: Quality) -> bool:
        """Whether what satisfies this satisfies the other, too."""
        limits = zip(self, other, strict=True)
        return all(wider is None or (limit is not None and limit <= wider) for limit, wider in limits)


NOTHING_ASKED = Quality()


class Estimate(NamedTuple):
    """The quality that is expected of a blended prompt.

    Attributes:
        kl: Expected KL to full recompute, nats a token.
        target: The quality that was asked for.
        ratio: Share of the stored rows that were recomputed; 1 means all, and a KL of 0.
        prompts: How many prompts the estimator is fitted to.

    """

    kl: float
    target: Quality
    ratio: float
    prompts: int

    @property
    def document(self) -> dict[str, float | None]:
        """The estimate as JSON values."""
        return {
            "kl": self.kl,
            "target": self.target.kl,
            "flips": self.target.flips,
            "ratio": self.ratio,
            "prompts": self.prompts,
        }


class Policy(NamedTuple):
    """The consequences of a limit for each prompt: KL, whether the answer flips, recomputed share of the stored rows."""

    kl: _Array
    flips: _Array
    rows: _Array


@dataclass(frozen=True)
class Estimator:
    """Estimates KL from signals; fitted to prompts whose KL was measured at all `RATIOS`. Fields are `[prompts][ratios]`.

    kl: to full recompute, nats a token. flips: whether the greedy answer differs from full recompute's.
    """

    signals: tuple[tuple[Signals, ...], ...]
    kl: tuple[tuple[float, ...], ...]
    flips: tuple[tuple[bool, ...], ...]

    @property
    def prompts(self) -> int:
        """How many prompts it is fitted to."""
        return len(self.kl)

    def to_bytes(self) -> bytes:
        """Write an artifact of the store."""
        document = {"version": VERSION, "ratios": RATIOS, "signals": self.signals, "kl": self.kl, "flips": self.flips}
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Estimator:
        """Read an artifact. Raises `ValueError` for one of another version, or damaged."""
        document = json.loads(content)
        if document["version"] != VERSION:
            raise ValueError("it was made by another version; fit the estimates again")
        signals = tuple(tuple(map(Signals._make, prompt)) for prompt in document["signals"])
        return cls(signals, tuple(map(tuple, document["kl"])), tuple(map(tuple, document["flips"])))

    @cached_property
    def _features(self) -> _Array:
        """`[prompts, ratios, features]`."""
        return np.array([[_features(signals) for signals in prompt] for prompt in self.signals])

    @cached_property
    def _truth(self) -> _Array:
        return np.array(self.kl, dtype=np.float64)

    @cached_property
    def _fit(self) -> _Fit:
        return _Fit.of(self._features, self._truth)

    def expected(self, signals: Signals) -> float:
        """The expected KL of a prompt with these signals."""
        return float(self._fit.expected(np.array(_features(signals))))

    @cached_property
    def estimates(self) -> _Array:
        """Estimates for its own prompts, each from a fit without the prompt's fold, `[prompts, ratios]`."""
        estimates = np.empty_like(self._truth)
        folds = np.arange(self.prompts) % FOLDS
        for fold in range(FOLDS):
            inside, outside = folds == fold, folds != fold
            fit = _Fit.of(self._features[outside], self._truth[outside])
            estimates[inside] = fit.expected(self._features[inside])
        return estimates

    def limit(self, target: Quality) -> float:
        """The largest estimate to accept, so that the target is kept.

        0 if none can be shown to keep it. If every estimate may be accepted, so may larger ones up to the target's KL. Chosen
        on these prompts by estimates of fits that did not see them, from 0 upwards. The mean KL is kept in expectation: one
        more prompt counts with the largest KL, `MOST_KL` (conformal risk control, Angelopoulos et al. 2022, eq. 4). The share
        of flips is kept with 95 % confidence: Clopper and Pearson's bound must not leave the target (learn-then-test,
        Angelopoulos et al. 2021).
        """
        best = 0.0
        for limit in np.unique(self.estimates):
            policy = self.policy(float(limit))
            if target.kl is not None and self._kl_bound(policy) > target.kl:
                return best
            if target.flips is not None and upper_share(int(policy.flips.sum()), self.prompts) > target.flips:
                return best
            best = float(limit)
        return max(best, target.kl or 0.0)

    @property
    def least_kl(self) -> float:
        """The smallest mean KL that these prompts can show, nats a token."""
        return self._kl_bound(self.policy(float(self.estimates.min())))

    def _kl_bound(self, policy: Policy) -> float:
        """The mean KL as if one more prompt were the worst."""
        return float((np.minimum(policy.kl, MOST_KL).sum() + MOST_KL) / (self.prompts + 1))

    def policy(self, limit: float) -> Policy:
        """Take each of its prompts at the least ratio whose estimate is within the limit."""
        within = self.estimates <= limit
        place = np.where(within.any(1), within.argmax(1), len(RATIOS))
        # All rows, behind the last ratio, are exact.
        kl, flips = (
            np.pad(values, ((0, 0), (0, 1))) for values in (self._truth, np.array(self.flips, dtype=np.float64))
        )
        prompts = np.arange(self.prompts)
        return Policy(kl[prompts, place], flips[prompts, place], np.array([*RATIOS, 1.0])[place])


class _Fit(NamedTuple):
    """A linear fit of log KL, one for all ratios. smear: from the mean logarithm to the mean (Duan 1983)."""

    weights: _Array
    smear: float
    most: float

    @classmethod
    def of(cls, features: _Array, kl: _Array) -> _Fit:
        """Fit to features `[..., features]` and the KL there `[...]`."""
        matrix = features.reshape(-1, features.shape[-1])
        logarithms = np.log(kl.ravel() + _FLOOR)
        penalty = _RIDGE * np.eye(matrix.shape[1])
        penalty[0, 0] = 0.0
        solution = np.linalg.solve(matrix.T @ matrix + penalty, matrix.T @ logarithms)
        weights: _Array = np.asarray(solution, dtype=np.float64)
        residual = logarithms - matrix @ weights
        return cls(weights, float(np.exp(residual).mean()), float(kl.max()) * 2)

    def expected(self, features: _Array) -> _Array:
        expected = np.exp(features @ self.weights) * self.smear - _FLOOR
        clipped: _Array = np.clip(expected, 0.0, self.most)
        return clipped


def _features(signals: Signals) -> list[float]:
    return [1.0, float(np.log(signals.entropy + 1e-2)), float(np.log(signals.stale + 1e-3))]


class Judge(Protocol):
    """Chooses how many of a prompt's stored rows are recomputed."""

    def choice(self, signals: Sequence[Signals]) -> Estimate:
        """The estimate at the ratio that is chosen, given the signals at each of `RATIOS`."""


@dataclass(frozen=True)
class Target:
    """A quality that was asked for, with the estimator that serves it and the limit of estimates."""

    quality: Quality
    estimator: Estimator
    limit: float

    @classmethod
    def of(cls, quality: Quality, estimator: Estimator) -> Target:
        """Choose the limit for this quality."""
        return cls(quality, estimator, estimator.limit(quality))

    def choice(self, signals: Sequence[Signals]) -> Estimate:
        """Choose the least ratio whose estimate is within the limit; all rows if there is none."""
        for ratio, pair in zip(RATIOS, signals, strict=True):
            expected = self.estimator.expected(pair)
            if expected <= self.limit:
                return Estimate(expected, self.quality, ratio, self.estimator.prompts)
        return Estimate(0.0, self.quality, 1.0, self.estimator.prompts)


def questions_of(texts: Sequence[str], count: int) -> list[str]:
    """Questions about these texts, where the user has none: the same ones for the same texts."""
    import random

    draw = random.Random(0)
    questions = []
    for text in draw.sample(list(texts), min(count, len(texts))):
        words = text.split()
        if len(words) > 5:
            begin = draw.randrange(max(1, len(words) - 8))
            questions.append(f"What is said about {' '.join(words[begin : begin + 8]).strip('.,;:')}?")
    return questions
