"""Estimates how far a blended prompt will be from full recompute, and chooses how many of its rows are recomputed.

The question runs over the stored caches to choose rows. That pass shows two signs of the error to come: how uncertain the first
token is, and how much of the question's attention falls on rows that stay stale. A calibration on prompts of the corpus, for
which full recompute is known too, turns these signals into an expected KL (docs/study.md). It also chooses the limit that
estimates are held to.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blend.files import keep_value, read_values
from blend.intervals import LEAST_SAMPLE, upper_share

if TYPE_CHECKING:
    from blend.config import BlendConfig

RATIOS = (0.05, 0.15, 0.30, 0.60)  # of stored rows; where none suffices, all are recomputed
FOLDS = 4
COMPARED_TOKENS = 32  # of an answer
VERSION = 2
_FLOOR = 1e-4  # nats; added before logarithms
_RIDGE = 0.3
MOST_KL = 1.0  # nats; a larger KL counts as this
_DRIFT_AUDITS, _DRIFT_PRIOR, _MOST_DRIFT = 256, 1.0, 4.0  # audits; nats; factor
_Array = NDArray[np.float64]


class Signals(NamedTuple):
    """What the question's pass shows of a prompt's error.

    entropy: of the first token's distribution over the stored caches, in nats. stale: share of the question's attention that
    lies on rows which will stay stale.
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
    p = logits.float().log_softmax(-1)
    left = attention[stale[~torch.isin(stale, recomputed)]].sum() / attention.sum().clamp_min(1e-20)
    return Signals(float(-(p.exp() * p).sum()), float(left))


class Quality(NamedTuple):
    """What is asked of blended answers; None asks nothing.

    kl: mean KL to full recompute, nats a token. flips: share of answers whose greedy text differs from full recompute's within
    the first `COMPARED_TOKENS` tokens.
    """

    kl: float | None = None
    flips: float | None = None

    @classmethod
    def of(cls, config: BlendConfig) -> Quality:
        """What a configuration asks for."""
        return cls(config.quality, config.flips)

    @property
    def asked(self) -> bool:
        """Whether anything is asked."""
        return self.kl is not None or self.flips is not None

    def includes(self, other: Quality) -> bool:
        """Whether what satisfies this satisfies the other, too."""
        pairs = zip(self, other, strict=True)
        return all(theirs is None or (mine is not None and mine <= theirs) for mine, theirs in pairs)


NOTHING_ASKED = Quality()


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
    """Of each prompt: KL, whether the answer flips, recomputed share of the stored rows."""

    kl: _Array
    flips: _Array
    rows: _Array


class Drift:
    """How far a corpus's audited KL is from the estimates: what estimates are multiplied with. Threads may share it.

    The factor is the sum of audited KL over that of expected KL in the last `_DRIFT_AUDITS` audits, both with a constant added,
    so that a few audits change little.

    file: keeps the audits for the next run, as JSON. corpus: the name in it. calibration: names the one that made the
    estimates; audits of another one are forgotten.
    """

    def __init__(self, file: Path | None = None, corpus: str = "", calibration: str = "") -> None:
        self._file, self._corpus, self._calibration = file, corpus, calibration
        kept = read_values(file, dict).get(corpus, {}) if file else {}
        pairs: list[tuple[float, float]] = []
        if kept.get("calibration") == calibration:
            with suppress(KeyError, TypeError, ValueError):
                pairs = [(float(expected), float(audited)) for expected, audited in kept["kl"]]
        self._pairs = deque(pairs, maxlen=_DRIFT_AUDITS)
        self.factor = self._found()

    def add(self, expected: float, audited: float) -> None:
        """Take an audit of a prompt whose estimate was `expected`; both in nats a token."""
        self._pairs.append((expected / self.factor, audited))
        self.factor = self._found()
        if self._file is not None:
            keep_value(self._file, self._corpus, {"calibration": self._calibration, "kl": list(self._pairs)})

    def _found(self) -> float:
        estimates = sum(expected for expected, _ in self._pairs) + _DRIFT_PRIOR
        truth = sum(audited for _, audited in self._pairs) + _DRIFT_PRIOR
        return min(max(truth / estimates, 1 / _MOST_DRIFT), _MOST_DRIFT)


@dataclass(frozen=True)
class Calibration:
    """Signals and truth of prompts, each at all `RATIOS`; all `[prompts][ratios]`.

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
        if made.prompts < LEAST_SAMPLE or {len(one) for column in columns for one in column} != {len(RATIOS)}:
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
    def _fit(self) -> _Fit:
        return _Fit.of(self._features, self._truth)

    def expected(self, signals: Signals) -> float:
        """The expected KL of a prompt with these signals."""
        return float(self._fit.expected(np.array(_features(signals))))

    @cached_property
    def estimates(self) -> _Array:
        """Estimates for the calibration's prompts, each from a fit without the prompt's fold, `[prompts, ratios]`."""
        found, fold = np.empty_like(self._truth), np.arange(self.prompts) % FOLDS
        for held in range(FOLDS):
            mine, others = fold == held, fold != held
            found[mine] = _Fit.of(self._features[others], self._truth[others]).expected(self._features[mine])
        return found

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
            found = self.policy(float(limit))
            if target.kl is not None and self._bound(found) > target.kl:
                return best
            if target.flips is not None and upper_share(int(found.flips.sum()), len(found.flips)) > target.flips:
                return best
            best = float(limit)
        return max(best, target.kl or 0.0)

    @property
    def least_kl(self) -> float:
        """The smallest mean KL that these prompts can show, nats a token."""
        return self._bound(self.policy(float(self.estimates.min())))

    def _bound(self, found: Policy) -> float:
        """Of the mean KL."""
        return float((np.minimum(found.kl, MOST_KL).sum() + MOST_KL) / (self.prompts + 1))

    def policy(self, limit: float) -> Policy:
        """What becomes of its prompts at the least ratio whose estimate is within the limit."""
        within = self.estimates <= limit
        place = np.where(within.any(1), within.argmax(1), len(RATIOS))
        exact, each = np.zeros((self.prompts, 1)), np.arange(self.prompts)
        kl = np.append(self._truth, exact, axis=1)[each, place]
        flips = np.append(np.array(self.flips, dtype=np.float64), exact, axis=1)[each, place]
        return Policy(kl, flips, np.array([*RATIOS, 1.0])[place])


class _Fit(NamedTuple):
    """A linear fit of log KL, one for all ratios. smear: from the mean logarithm to the mean (Duan 1983)."""

    weights: _Array
    smear: float
    most: float

    @classmethod
    def of(cls, features: _Array, kl: _Array) -> _Fit:
        """Of features `[..., features]` and the KL there `[...]`."""
        features, target = features.reshape(-1, features.shape[-1]), np.log(kl.ravel() + _FLOOR)
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
    return [1.0, float(np.log(signals.entropy + 1e-2)), float(np.log(signals.stale + 1e-3))]


class Judge(Protocol):
    """Chooses how many of a prompt's stored rows are recomputed."""

    def choice(self, signals: Sequence[Signals]) -> Estimate:
        """The estimate at the ratio that is chosen, given the signals at each of `RATIOS`."""


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

    def choice(self, signals: Sequence[Signals]) -> Estimate:
        """At the least ratio whose estimate is within the limit; all rows if there is none."""
        for ratio, one in zip(RATIOS, signals, strict=True):
            expected = self.calibration.expected(one) * self.drift.factor
            if expected <= self.limit:
                return Estimate(expected, self.quality, ratio, self.calibration.prompts)
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
