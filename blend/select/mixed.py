"""Deviation and attention together: a row matters when its KV is wrong and the question reads it."""

from __future__ import annotations

import torch

from blend.config import Rule
from blend.errors import ConfigError
from blend.select.base import Evidence, Needs, Selector, Step, chunk_of, top_candidates
from blend.select.hkvd import HighDeviation
from blend.select.query_score import QueryScore


class Mixed(Selector):
    """Rows with the highest combination of KV deviation at a check layer and query attention.

    rule: the product, or the sum of z-scores of the logarithms. prefilter: run the layers below the check layer only on this
    multiple of the budget, chosen by attention alone; 0 runs them on all rows. floor: share of the budget that is spread evenly
    over the chunks before the rest goes to the best rows anywhere.
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
        floor: float = 0.0,
        block: int = 1,
    ) -> None:
        self._deviation, self._check_layer, self._score, self._rule = deviation, check_layer, score, rule
        self._prefilter, self._floor, self._block = prefilter, floor, block

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
            return top_candidates(attention, evidence, self._block)
        scores = combine(self._deviation.deviation(evidence), attention, self._rule)
        return with_floor(scores, evidence, self._floor, self._block)


def combine(deviation: torch.Tensor, attention: torch.Tensor, rule: Rule) -> torch.Tensor:
    """One score per row, `[candidates]`."""
    if rule == "product":
        return deviation * attention
    return _standardised(deviation.clamp_min(1e-30).log()) + _standardised(attention.clamp_min(1e-30).log())


def with_floor(scores: torch.Tensor, evidence: Evidence, floor: float, block: int = 1) -> torch.Tensor:
    """The best rows, after `floor` of the budget went to the best rows of each chunk in equal parts."""
    chunks = chunk_of(evidence)
    present = torch.unique(chunks)
    each = int(floor * evidence.budget / max(1, present.shape[0]))
    if each == 0:
        return top_candidates(scores, evidence, block)
    raised = scores.clone()
    for chunk in present.tolist():
        mine = (chunks == chunk).nonzero()[:, 0]
        best = mine[scores[mine].argsort(descending=True, stable=True)[:each]]
        raised[best] = torch.inf
    return top_candidates(raised, evidence)


def _standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std().clamp_min(1e-12)
