"""One line for everything that a prefill does differently than configured."""

from __future__ import annotations

from blend.config import BlendConfig
from blend.quality import Judge, Quality, Target
from blend.types import LEAD_SHARE

UNFIT = "the KV correction does not fit this prompt: left out, and {:.0%} of the rows recomputed instead"
_NO_ESTIMATES = (
    "no quality is promised: the store has no estimates for this corpus and selector; {:.0%} of the rows recomputed "
    "(`blend precompute --questions` makes them)"
)
_UNREACHABLE = "estimates from {} prompts cannot show this quality, so all rows are recomputed; give more questions"
_LEADS = "the model has recurrent layers: the first {:.0%} of every chunk are always recomputed"
_UNCORRECTED = "there is no KV correction for these caches yet: {:.0%} of the rows recomputed"


def notes_of(
    config: BlendConfig,
    judge: Judge | None,
    ratio: float,
    *,
    raised: bool,
    blending: bool,
    recurrent: bool,
) -> tuple[str, ...]:
    """What a plan does differently than configured.

    Args:
        config: what was configured.
        judge: chooses how many rows are recomputed; None if nothing can be promised.
        ratio: share of the rows to recompute.
        raised: whether it is larger than configured, because there is no KV correction.
        blending: whether stored chunks are used.
        recurrent: whether the model has recurrent layers.

    """
    notes = list[str]()
    if raised:
        notes.append(_UNCORRECTED.format(ratio))
    if blending and judge is None:
        if recurrent and ratio < LEAD_SHARE:
            notes.append(_LEADS.format(LEAD_SHARE))
        if Quality.of(config).asked:
            notes.append(_NO_ESTIMATES.format(ratio))
    if isinstance(judge, Target) and not judge.limit:
        notes.append(_UNREACHABLE.format(judge.estimator.prompts))
    return tuple(notes)
