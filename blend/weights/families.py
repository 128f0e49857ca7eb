"""What was measured of families of decoders with tiny models, and of real weights; `scripts/gen_models_docs` writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class FamilyResult:
    """What admission says of a family's tiny random model.

    layers: the kinds of its layers, in words. invariants: whether the tests of all invariants run on it. reason: why it is
    refused; "" if it is admitted. all_rows, scattered: largest difference of logits to the model's own forward pass, relative
    to the largest logit, in float32: all rows recomputed, and scattered rows over exact KV. None where that was not run.
    """

    family: str
    layers: str
    invariants: bool
    reason: str
    all_rows: float | None = None
    scattered: float | None = None


@dataclass(frozen=True)
class RealModel:
    """Figures of `blend verify` for real weights at the standard ratio: means, and medians of seconds."""

    model: str
    machine: str
    questions: int
    ratio: str
    kl: float
    top1: float
    f1_difference: float | None
    ttft_s: float
    full_ttft_s: float
    passed: bool


class Measured(NamedTuple):
    """All families by name, and all models with real weights."""

    families: tuple[FamilyResult, ...]
    real: tuple[RealModel, ...]


def measured() -> Measured:
    """What this version of kvblend was measured with."""
    held = json.loads(MEASURED.read_text(encoding="utf-8"))
    return Measured(
        tuple(FamilyResult(**one) for one in held["families"]), tuple(RealModel(**one) for one in held["real"])
    )
