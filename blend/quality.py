"""Estimates how far a blended prompt is from full recompute, and recomputes more rows where that is too far.

A blended prefill gives signs of its error: how uncertain the first token is, how far recomputing moved its distribution
(the question runs over the stored caches first, to choose rows), and how much attention stale rows still get. A calibration on
prompts of the corpus, for which full recompute is known too, turns signals into an expected KL (docs/study.md). It also chooses
the limit up to which a prompt is left as it is.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

RATIOS = (0.05, 0.15, 0.30)  # of stored rows, recomputed one after another; then all of them
LEAST_PROMPTS = 16  # of a calibration
FOLDS = 4
COMPARED_TOKENS = 32  # of an answer
VERSION = 1
_FLOOR = 1e-4  # nats; added before logarithms
_RIDGE = 0.3
UPPER_95 = 1.645  # standard errors
_DRIFT_AUDITS, _DRIFT_PRIOR, _MOST_DRIFT = 256, 1.0, 4.0  # audits; nats; factor
_Array = NDArray[np.float64]


class Signals(NamedTuple):
    """What a prefill shows of its error.

    change: KL of the first token's distribution after recomputing rows to that before, in nats. entropy: of the former.
    margin: between its two likeliest tokens, in log-probability. stale: share of the question's attention to stored rows that
    lies on rows which were not recomputed.
    """

    change: float
    entropy: float
    margin: float
    stale: float


def signals_of(
    before: torch.Tensor, after: torch.Tensor, attention: torch.Tensor, stored: torch.Tensor, computed: torch.Tensor
) -> Signals:
    """The signals of one pass.

    Args:
        before: logits `[1, vocab]` of the question over the stored caches.
        after: logits `[1, vocab]` over the recomputed rows.
        attention: of the question to each row of the prompt, `[rows]`.
        stored: positions of stored rows that may be stale, `[stored]`.
        computed: positions of recomputed rows, `[computed]`.

    """
    p, q = (one[0].float().log_softmax(-1) for one in (after, before))
    best = p.topk(2).values
    mass = attention[stored]
    left = mass[~torch.isin(stored, computed)].sum() / mass.sum().clamp_min(1e-20)
    probability = p.exp()
    change, entropy = (probability * (p - q)).sum().clamp_min(0), -(probability * p).sum()
    return Signals(*(float(one) for one in (change, entropy, best[0] - best[1], left)))


class Quality(NamedTuple):
    """What is asked of blended answers; None asks nothing.

    kl: mean KL to full recompute, nats a token. flips: share of answers whose greedy text differs from full recompute's within
    the first `COMPARED_TOKENS` tokens.
    """

    kl: float | None = None
    flips: float | None = None

    @property
    def asked(self) -> bool:
        """Whether anything is asked."""
        return self.kl is not None or self.flips is not None


class Estimate(NamedTuple):
    """What is expected of a blended prompt.

    kl: expected KL to full recompute, nats a token. target: what was asked for. ratio: of the stored rows that were recomputed;
    1 means all, and a KL of 0. prompts: of the calibration.
    """

    kl: float
    target: Quality
    ratio: float
    prompts: int

    @property
    def document(self) -> dict[str, float | None]:
        """As JSON."""
        return {
            "kl": self.kl,
            "target": self.target.kl,
            "flips": self.target.flips,
            "ratio": self.ratio,
            "prompts": self.prompts,
        }


class Policy(NamedTuple):
    """Of each prompt: KL, whether the answer flips, rows recomputed in all passes as a share of stored rows."""

    kl: _Array
    flips: _Array
    rows: _Array


class Drift:
    """How far a corpus's audited KL is from the estimates: what estimates are multiplied with. Threads may share it.

    The factor is the sum of audited KL over that of expected KL in the last `_DRIFT_AUDITS` audits, both with a constant added,
    so that a few audits change little.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_DRIFT_AUDITS)
        self.factor = 1.0

    def add(self, expected: float, audited: float) -> None:
        """Take an audit of a prompt whose estimate was `expected`; both in nats a token."""
        self._pairs.append((expected / self.factor, audited))
        estimates, truth = (sum(column) + _DRIFT_PRIOR for column in zip(*self._pairs, strict=True))
        self.factor = min(max(truth / estimates, 1 / _MOST_DRIFT), _MOST_DRIFT)


def upper_share(hits: int, count: int, confidence: float = 0.95) -> float:
    """The upper end of Clopper and Pearson's one-sided interval of a share."""
    if hits >= count:
        return 1.0
    low, high = hits / count, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(comb(count, k) * middle**k * (1 - middle) ** (count - k) for k in range(hits + 1))
        low, high = (middle, high) if below > 1 - confidence else (low, middle)
    return high


@dataclass(frozen=True)
class Calibration:
    """Signals and truth of prompts, each after the passes of `RATIOS`; all `[prompts][ratios]`.

    kl: to full recompute, nats a token. flips: whether the greedy answer differs from full recompute's.
    """

    signals: tuple[tuple[Signals, ...], ...]
    kl: tuple[tuple[float, ...], ...]
    flips: tuple[tuple[bool, ...], ...]

    @property
    def prompts(self) -> int:
        """How many prompts it has."""
        return len(self.kl)

    def to_bytes(self) -> bytes:
        """For an artifact of the store."""
        return json.dumps(
            {"version": VERSION, "ratios": RATIOS, "signals": self.signals, "kl": self.kl, "flips": self.flips}
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Calibration:
        """Read an artifact. Raises `ValueError` for one of another version, or damaged."""
        found = json.loads(content)
        if not isinstance(found, dict) or found.get("version") != VERSION or tuple(found["ratios"]) != RATIOS:
            raise ValueError("it was made by another version; run the calibration again")
        signals = tuple(tuple(Signals(*one) for one in prompt) for prompt in found["signals"])
        made = cls(signals, tuple(map(tuple, found["kl"])), tuple(map(tuple, found["flips"])))
        columns = made.signals, made.kl, made.flips
        if made.prompts < LEAST_PROMPTS or {len(one) for column in columns for one in column} != {len(RATIOS)}:
            raise ValueError("it has too few prompts")
        return made

    @cached_property
    def _features(self) -> _Array:
        """`[prompts, ratios, features]`."""
        return np.array([[_features(one) for one in prompt] for prompt in self.signals])

    @cached_property
    def _truth(self) -> _Array:
        return np.array(self.kl, dtype=np.float64)

    @cached_property
    def _weights(self) -> list[_Fit]:
        return [_Fit.of(self._features[:, place], self._truth[:, place]) for place in range(len(RATIOS))]

    def expected(self, place: int, signals: Signals) -> float:
        """The expected KL of a prompt after the pass of `RATIOS[place]`."""
        return float(self._weights[place].expected(np.array([_features(signals)]))[0])

    @cached_property
    def estimates(self) -> _Array:
        """Estimates for the calibration's prompts, each from a fit without the prompt's fold, `[prompts, ratios]`."""
        found, fold = np.empty_like(self._truth), np.arange(self.prompts) % FOLDS
        for place in range(len(RATIOS)):
            for held in range(FOLDS):
                mine, others = fold == held, fold != held
                fit = _Fit.of(self._features[others, place], self._truth[others, place])
                found[mine, place] = fit.expected(self._features[mine, place])
        return found

    def limit(self, target: Quality) -> float:
        """The largest estimate at which to stop, so that the target is kept.

        Chosen on these prompts by estimates of fits that did not see them: from 0 upwards, until an upper 95 % bound leaves the
        target for the first time (learn-then-test with a fixed sequence, Angelopoulos et al. 2021). The bounds are normal for
        the mean KL, and Clopper and Pearson's for the share of flips.
        """
        best = 0.0
        for limit in np.unique(self.estimates):
            found = self.policy(float(limit))
            kl = found.kl.mean() + UPPER_95 * found.kl.std(ddof=1) / len(found.kl) ** 0.5
            if target.kl is not None and kl > target.kl:
                break
            if target.flips is not None and upper_share(int(found.flips.sum()), len(found.flips)) > target.flips:
                break
            best = float(limit)
        return best

    def policy(self, limit: float) -> Policy:
        """What becomes of its prompts if passes stop at this estimate."""
        stops = self.estimates <= limit
        place = np.where(stops.any(1), stops.argmax(1), len(RATIOS))
        exact, each = np.zeros((self.prompts, 1)), np.arange(self.prompts)
        kl = np.append(self._truth, exact, axis=1)[each, place]
        flips = np.append(np.array(self.flips, dtype=np.float64), exact, axis=1)[each, place]
        return Policy(kl, flips, np.array([*RATIOS, RATIOS[-1] + 1.0])[place])


class _Fit(NamedTuple):
    """A linear fit of log KL. smear: from the mean logarithm to the mean (Duan 1983)."""

    weights: _Array
    smear: float
    most: float

    @classmethod
    def of(cls, features: _Array, kl: _Array) -> _Fit:
        target = np.log(kl + _FLOOR)
        penalty = _RIDGE * np.eye(features.shape[1])
        penalty[0, 0] = 0.0
        solved = np.linalg.solve(features.T @ features + penalty, features.T @ target)
        weights: _Array = np.asarray(solved, dtype=np.float64)
        residual = target - features @ weights
        return cls(weights, float(np.exp(residual).mean()), float(kl.max()) * 2)

    def expected(self, features: _Array) -> _Array:
        found: _Array = np.clip(np.exp(features @ self.weights) * self.smear - _FLOOR, 0.0, self.most)
        return found


def _features(signals: Signals) -> list[float]:
    return [
        1.0,
        float(np.log(signals.change + _FLOOR)),
        float(np.log(signals.entropy + 1e-2)),
        float(np.log(signals.margin + 1e-2)),
        signals.stale,
    ]


class Judge(Protocol):
    """Decides after each pass whether a prompt is left as it is. exact: the estimate after all rows were recomputed."""

    @property
    def exact(self) -> Estimate:
        """After all rows were recomputed."""

    def estimate(self, place: int, signals: Signals) -> Estimate:
        """After the pass of `RATIOS[place]`."""

    def stops(self, place: int, estimate: Estimate) -> bool:
        """Whether a prompt is left as it is after that pass."""


@dataclass(frozen=True)
class Target:
    """What was asked for, with the calibration that serves it, the limit of estimates, and their drift."""

    quality: Quality
    calibration: Calibration
    limit: float
    drift: Drift

    @classmethod
    def of(cls, quality: Quality, calibration: Calibration, drift: Drift | None = None) -> Target:
        """For this quality."""
        return cls(quality, calibration, calibration.limit(quality), drift or Drift())

    def estimate(self, place: int, signals: Signals) -> Estimate:
        """After the pass of `RATIOS[place]`."""
        expected = self.calibration.expected(place, signals) * self.drift.factor
        return Estimate(expected, self.quality, RATIOS[place], self.calibration.prompts)

    def stops(self, place: int, estimate: Estimate) -> bool:
        """Whether a prompt is left as it is after the pass of `RATIOS[place]`."""
        return estimate.kl <= self.limit

    @property
    def exact(self) -> Estimate:
        """After all rows were recomputed."""
        return Estimate(0.0, self.quality, 1.0, self.calibration.prompts)


def questions_of(texts: Sequence[str], count: int) -> list[str]:
    """Questions about these texts, for a calibration without questions of the user's: the same ones for the same texts."""
    import random

    draw, found = random.Random(0), list[str]()
    for text in draw.sample(list(texts), min(count, len(texts))):
        sentences = [one.strip() for one in text.replace("\n", " ").split(". ") if len(one.split()) > 5]
        if sentences:
            words = draw.choice(sentences).split()
            begin = draw.randrange(max(1, len(words) - 8))
            found.append(f"What is said about {' '.join(words[begin : begin + 8]).strip('.,;:')}?")
    return found
