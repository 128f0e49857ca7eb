"""Deviation and attention together: a row matters when its KV is wrong and the question reads it."""

from __future__ import annotations

import torch

from blend.config import Rule
from blend.errors import ConfigError
from blend.select.allotment import SINGLE_ROWS, Allotment
from blend.select.base import Evidence, Needs, Selector, Step
from blend.select.hkvd import HighDeviation
from blend.select.query_score import QueryScore


class Mixed(Selector):
    """Rows with the highest combination of KV deviation at a check layer and query attention.

    rule: the product, or the sum of z-scores of the logarithms. prefilter: run the layers below the check layer only on this
    multiple of the budget, chosen by attention alone; 0 runs them on all rows.
    """

    name = "mixed"

    def __init__(
        self,
        deviation: HighDeviation,
        score: QueryScore,
        check_layer: int = 1,
        *,
        rule: Rule = "product",
        prefilter: float = 0.0,
        allotment: Allotment = SINGLE_ROWS,
    ) -> None:
        self._deviation, self._check_layer, self._score, self._rule = deviation, check_layer, score, rule
        self._prefilter, self._allotment = prefilter, allotment

    def needs(self, layers: int) -> Needs:
        """The check layer, and the query's attention at the band's layers."""
        if self._check_layer >= layers:
            raise ConfigError(f"check layer {self._check_layer} does not exist: the model has layers 0 to {layers - 1}")
        before = (Step(0, self._prefilter),) if self._prefilter else ()
        return Needs((*before, Step(self._check_layer)), self._score)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """By attention alone at layer 0, by both at the check layer."""
        assert evidence.query_attention is not None
        attention = evidence.query_attention.sum(0)
        if evidence.layer == 0:
            return self._allotment.choose(attention, evidence)
        scores = combine(self._deviation.deviation(evidence), attention, self._rule)
        return self._allotment.choose(scores, evidence)


def combine(deviation: torch.Tensor, attention: torch.Tensor, rule: Rule) -> torch.Tensor:
    """One score per row, `[candidates]`."""
    if rule == "product":
        return deviation * attention
    return _standardised(deviation.clamp_min(1e-30).log()) + _standardised(attention.clamp_min(1e-30).log())


def _standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std().clamp_min(1e-12)
