"""Deviation and attention together: a row matters when its KV is wrong and the question reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from blend.select.allotment import ScoringSelector
from blend.select.base import Evidence, Needs, Step
from blend.select.hkvd import DeviationOf, Norm, seen_deviation
from blend.select.query_score import QueryRows, QueryScore

if TYPE_CHECKING:
    import torch

Rule = Literal["product", "zsum"]


@dataclass(frozen=True)
class Mixed(ScoringSelector):
    """Rows with the highest combination of KV deviation at a check layer and query attention.

    check_layer, of, norm: deviation, as `HighDeviation` measures it. layers, rows, value_norm: attention, as `QueryScore` says.
    rule: the product, or the sum of z-scores of the logarithms. prefilter: run the layers below the check layer only on this
    multiple of the budget, chosen by attention alone; 0 runs them on all rows.
    """

    name: ClassVar[str] = "mixed"

    check_layer: int = 1
    of: DeviationOf = "v"
    norm: Norm = "l2"
    layers: str = "middle"
    rows: QueryRows = "peak"
    value_norm: bool = False
    rule: Rule = "product"
    prefilter: float = 0.0

    def needs(self, layers: int) -> Needs:
        """The check layer, and the query's attention at the band's layers."""
        before = (Step(0, self.prefilter),) if self.prefilter else ()
        return Needs((*before, Step(self.check_layer)), QueryScore(self.layers, self.rows, self.value_norm))

    def select(self, evidence: Evidence) -> torch.Tensor:
        """By attention alone at layer 0, by both at the check layer."""
        assert evidence.query_attention is not None
        attention = evidence.query_attention.sum(0)
        if evidence.layer == 0:
            return self.allot(attention, evidence)
        return self.allot(combine(seen_deviation(evidence, self.of, self.norm), attention, self.rule), evidence)


def combine(deviation: torch.Tensor, attention: torch.Tensor, rule: Rule) -> torch.Tensor:
    """One score per row, `[candidates]`."""
    if rule == "product":
        return deviation * attention
    return _standardised(deviation.clamp_min(1e-30).log()) + _standardised(attention.clamp_min(1e-30).log())


def _standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std().clamp_min(1e-12)
