"""Compares a method's answers with full recompute's: one answer's KL, then the mean KL and the share of flips over many.

Reports, `blend verify`, the fit of estimates and the server's audits all compare here, so that a figure has one
kind of interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.intervals import Interval, Judged, defined_mean, share_interval

if TYPE_CHECKING:
    import torch

    from blend.layout import PromptLayout
    from blend.model.decoder import FullPrefill
    from blend.model.generate import Continuable, Generation
    from blend.quality import Quality

# Rows taken together: bounds the float64 copies to some tens of MiB with the largest vocabularies.
ROWS_AT_ONCE = 16
MEANINGS = ("equal in meaning", "better", "worse", "wrong in both")  # of flips, as `Meanings` counts them
_LEAST_PROBABILITY = 1e-9  # of all tokens that are not listed


class Fidelity(NamedTuple):
    """How close a method stays to full recompute along its answer.

    Attributes:
        kl: Mean KL of the next-token distributions, nats a token.
        top1: Share of tokens with the same most likely token.

    """

    kl: float
    top1: float | None


@dataclass(frozen=True)
class Reference:
    """Full recompute's greedy answer to a prompt.

    Attributes:
        answer: The answer.
        logits: The logits that led to each of its tokens, float32 `[answer, vocab]`.

    """

    answer: Generation
    logits: torch.Tensor

    @classmethod
    def of(cls, full: FullPrefill, layout: PromptLayout, max_new_tokens: int) -> Reference:
        """Decode the answer behind full prefill."""
        import torch

        from blend.model.generate import generate

        recorder = _Recorder(full)
        answer = generate(full.decoder, recorder, layout.token_ids, max_new_tokens=max_new_tokens)
        tokens = len(answer.token_ids)
        return cls(answer, torch.cat(recorder.steps)[:tokens].float())

    def fidelity(self, prefilled: Continuable) -> Fidelity:
        """Run the answer's tokens behind another prefill of the prompt, and compare the distributions."""
        from blend.model.generate import teacher_forced_logits

        logits = teacher_forced_logits(prefilled, self.answer.token_ids)
        kl = float(kl_divergence(self.logits, logits).mean())
        return Fidelity(kl, top1_agreement(self.logits, logits))


class _Recorder:
    """Keeps the logits of every decoding step of a prefilled prompt."""

    def __init__(self, prefilled: Continuable) -> None:
        self._prefilled = prefilled
        self.logits = prefilled.logits
        self.steps = [prefilled.logits]

    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits = self._prefilled.append(token_ids)
        self.steps.append(logits[0])
        return logits


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || method) of next-token distributions in nats, float64 `[tokens]`, from logits `[tokens, vocab]`.

    Tokens that the reference excludes (logit minus infinity) add nothing; one that the method alone excludes makes it
    infinite. Raises `ValueError` for NaN, which means that a forward pass went wrong.
    """
    import torch

    if reference_logits.isnan().any() or logits.isnan().any():
        raise ValueError("logits contain NaN: a forward pass went wrong")
    blocks = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(logits), ROWS_AT_ONCE)]
    parts = [_block_divergence(reference_logits[block], logits[block]) for block in blocks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def top1_agreement(reference_logits: torch.Tensor, logits: torch.Tensor) -> float | None:
    """Share of positions whose most likely token is the same, from logits `[tokens, vocab]`; None without positions."""
    if not len(logits):
        return None
    agree = reference_logits.argmax(-1) == logits.argmax(-1).to(reference_logits.device)
    return float(agree.double().mean())


def _block_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    reference = reference_logits.double().log_softmax(-1)
    method = logits.to(reference_logits.device).double().log_softmax(-1)
    probability = reference.exp()
    terms = (probability * (reference - method)).masked_fill(probability == 0, 0.0)
    # Rounding may leave the sum of two equal distributions a hair below zero.
    return terms.sum(-1).clamp_min(0.0)


def likely_kl(full: Mapping[int, float], blended: Mapping[int, float]) -> float:
    """KL of two next-token distributions of which only likely tokens are known, in nats: a lower bound of `kl_divergence`.

    It is taken over the tokens that both list, and all other tokens together.

    Args:
        full: Log-probabilities of full recompute's likely tokens.
        blended: The same of the blended prompt's.

    """
    tokens = [token for token in full if token in blended]
    kl = sum(math.exp(full[token]) * (full[token] - blended[token]) for token in tokens)
    full_rest = max(_LEAST_PROBABILITY, 1 - sum(math.exp(full[token]) for token in tokens))
    blended_rest = max(_LEAST_PROBABILITY, 1 - sum(math.exp(blended[token]) for token in tokens))
    return max(0.0, kl + full_rest * math.log(full_rest / blended_rest))


class ComparedAnswer(NamedTuple):
    """What a method's answer has in common with full recompute's answer to the same prompt.

    Attributes:
        flipped: Whether they differ.
        kl: Mean KL along the answer, nats a token; None where it was not measured.
        right: Whether the method's answer names a gold answer; None without gold answers.
        full_right: Whether full recompute's does.

    """

    flipped: bool
    kl: float | None = None
    right: bool | None = None
    full_right: bool | None = None

    @classmethod
    def of(cls, method: Any, full: Any) -> ComparedAnswer:
        """Compare two answers, which have `answer`, `kl` and `right`."""
        return cls(method.answer != full.answer, method.kl, method.right, full.right)


class Meanings(NamedTuple):
    """What flips mean against gold answers.

    Attributes:
        equal: Flips where both answers name a gold answer: they are equal in meaning.
        better: Where only the method's does.
        worse: Where only full recompute's does.
        wrong: Where neither does.

    """

    equal: int
    better: int
    worse: int
    wrong: int


@dataclass(frozen=True)
class Comparison:
    """Answers of a method, compared with full recompute's.

    Attributes:
        answers: How many were compared.
        kl: Mean KL, nats a token, with its bootstrap interval; None where it was not measured or is infinite.
        flips: Share of answers that differ, with Wilson's interval.
        meanings: What the flips mean.

    """

    answers: int
    kl: Interval | None
    flips: Interval
    meanings: Meanings

    def judged(self, target: Quality) -> dict[str, Judged]:
        """The mean KL ("kl") and the share of flips ("flips") against what is asked; only what is asked and was measured."""
        figures = {"kl": (self.kl, target.kl), "flips": (self.flips, target.flips)}
        return {
            name: Judged(interval.mean, interval.low, interval.high, limit, self.answers)
            for name, (interval, limit) in figures.items()
            if interval is not None and limit is not None
        }

    @property
    def flips_in_words(self) -> str:
        """The share of flips with its interval, such as "25% [10%, 49%]", and what they mean."""
        share = f"{self.flips.mean:.0%} [{self.flips.low:.0%}, {self.flips.high:.0%}]"
        meanings = ", ".join(f"{count} {meaning}" for count, meaning in zip(self.meanings, MEANINGS, strict=True))
        return f"{share}; of these {meanings}" if any(self.meanings) else share


def compare(answers: Iterable[ComparedAnswer]) -> Comparison:
    """Means and shares over one answer or more, with 95 % intervals."""
    answers = list(answers)
    flips = [(answer.right, answer.full_right) for answer in answers if answer.flipped]
    meanings = Meanings(
        equal=flips.count((True, True)),
        better=flips.count((True, False)),
        worse=flips.count((False, True)),
        wrong=flips.count((False, False)),
    )
    return Comparison(
        answers=len(answers),
        kl=defined_mean([answer.kl for answer in answers]),
        flips=share_interval(len(flips), len(answers)),
        meanings=meanings,
    )
