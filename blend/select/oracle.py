"""For research: rows chosen in the knowledge of full recompute, to see how far a selector is from that."""

from __future__ import annotations

import torch

from blend.select.allotment import SINGLE_ROWS, Allotment
from blend.select.base import Evidence, Needs, Selector


class Oracle(Selector):
    """Rows whose true deviation, in every layer, meets the most of the attention that the question gives under full recompute.

    Costs a full prefill before it chooses, so it can never be faster than one.
    """

    name = "oracle"

    def __init__(self, allotment: Allotment = SINGLE_ROWS) -> None:
        self._allotment = allotment

    def needs(self, layers: int) -> Needs:
        """Full recompute."""
        return Needs(truth=True)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows with the highest weight."""
        assert evidence.truth is not None
        return self._allotment.choose(evidence.truth, evidence)
