"""Rows that the question looks at: context rows scored by the attention of the query rows over the stored caches."""

from __future__ import annotations

import torch

from blend.select.allotment import SINGLE_ROWS, Allotment
from blend.select.base import Evidence, Needs, Selector
from blend.select.query_score import QueryScore


class QueryGuided(Selector):
    """Rows with the most attention from the query, summed over a band of layers; known before any layer is recomputed.

    score: at which layers, and how joined.
    """

    name = "query_guided"

    def __init__(self, score: QueryScore, allotment: Allotment = SINGLE_ROWS) -> None:
        self._score, self._allotment = score, allotment

    def needs(self, layers: int) -> Needs:
        """The query's attention at the band's layers."""
        return Needs(query=self._score)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that the query attends to most."""
        assert evidence.query_attention is not None
        return self._allotment.choose(evidence.query_attention.sum(0), evidence)
