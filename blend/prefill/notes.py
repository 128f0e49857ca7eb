"""Notes of a blended prefill: what it does differently than configured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from blend.layout import LEAD_SHARE
from blend.quality import Judge, Quality, Target

if TYPE_CHECKING:
    from blend.config import BlendConfig

_UNFIT = "the KV correction does not fit this prompt: left out, and {:.0%} of the rows recomputed instead"
_NO_ESTIMATES = (
    "no quality is promised: the store has no estimates for this corpus and selector; {:.0%} of the rows recomputed "
    "(`blend precompute --questions` makes them)"
)
_UNREACHABLE = "estimates from {} prompts cannot show this quality, so all rows are recomputed; give more questions"
_LEADS = "the model has recurrent layers: the first {:.0%} of every chunk are always recomputed"
_UNCORRECTED = "there is no KV correction for these caches yet: {:.0%} of the rows recomputed"


def notes_of(
    config: BlendConfig, judge: Judge | None, ratio: float, *, unfit: bool, raised: bool, recurrent: bool, blends: bool
) -> Iterator[str]:
    """One line for each thing that is done differently than configured.

    Args:
        config: how rows are chosen.
        judge: what the prompt is held to, if it is.
        ratio: the share of rows that is recomputed.
        unfit: whether the KV correction does not fit the prompt.
        raised: whether the ratio was raised for want of a KV correction.
        recurrent: whether the model has recurrent layers.
        blends: whether stored chunks are used.
    """
    if unfit:
        yield _UNFIT.format(ratio)
    if raised:
        yield _UNCORRECTED.format(ratio)
    if blends and judge is None:
        if recurrent and ratio < LEAD_SHARE:
            yield _LEADS.format(LEAD_SHARE)
        if Quality.of(config).asked:
            yield _NO_ESTIMATES.format(ratio)
    if isinstance(judge, Target) and not judge.limit:
        yield _UNREACHABLE.format(judge.estimator.prompts)
