"""High KV deviation (CacheBlend, Yao et al. 2025, section 4): recompute the rows whose KV differs most in context."""

from __future__ import annotations

import torch

from blend.attention import kv_deviation
from blend.config import DeviationOf, Norm
from blend.select.base import Evidence, Selector, top_candidates


class HighDeviation(Selector):
    """Rows with the largest distance between fresh and stored KV at the check layer.

    deviation_of: values, keys or both. norm: squared L2 or L1, summed over heads and dimensions.
    """

    name = "hkvd"

    def __init__(self, check_layer: int = 1, deviation_of: DeviationOf = "v", norm: Norm = "l2") -> None:
        self.check_layer = check_layer
        self._parts: DeviationOf = deviation_of
        self._norm: Norm = norm

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that deviate most."""
        assert evidence.fresh is not None
        assert evidence.stored is not None
        (new_keys, new_values), (old_keys, old_values) = evidence.fresh, evidence.stored
        norm = "l2sq" if self._norm == "l2" else "l1"
        scores = kv_deviation(new_keys, old_keys, new_values, old_values, norm=norm, parts=self._parts)
        return top_candidates(scores[0], evidence)
