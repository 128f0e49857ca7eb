"""High KV deviation (CacheBlend, Yao et al. 2025, section 4): recompute the rows whose KV differs most in context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from blend.select.allotment import ScoringSelector
from blend.select.base import KV, Evidence, Needs, Step

if TYPE_CHECKING:
    import torch

DeviationOf = Literal["v", "k", "kv"]
Norm = Literal["l2", "l1"]


@dataclass(frozen=True)
class HighDeviation(ScoringSelector):
    """Rows with the largest distance between fresh and stored KV at the check layer.

    of: values, keys or both. norm: squared L2 or L1, summed over heads and dimensions.
    """

    name: ClassVar[str] = "hkvd"

    check_layer: int = 1
    of: DeviationOf = "v"
    norm: Norm = "l2"

    def needs(self, layers: int) -> Needs:
        """The check layer."""
        return Needs((Step(self.check_layer),))

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that deviate most."""
        return self.allot(seen_deviation(evidence, self.of, self.norm), evidence)


@dataclass(frozen=True)
class GradualDeviation(HighDeviation):
    """As hkvd, with more rows at first, some of them dropped at each of the next layers.

    Gradual filtering (CacheBlend, section 4.3). The rows of all layers from the check layer on add up to about the budget
    times their number, as with one check.
    """

    name: ClassVar[str] = "gradual"

    def needs(self, layers: int) -> Needs:
        """Four check layers, spread over the lower half: 1.6, 1.3, 1.1 and then 0.8 times the budget."""
        eighth = max(1, (layers - self.check_layer) // 8)
        places = [self.check_layer + i * eighth for i in range(4)]
        factors = (1.6, 1.3, 1.1, 0.8)
        steps = [Step(place, factor) for place, factor in zip(places, factors, strict=True) if place < layers]
        return Needs(tuple(steps or [Step(self.check_layer)]))


def seen_deviation(evidence: Evidence, of: DeviationOf, norm: Norm) -> torch.Tensor:
    """Distance of fresh from stored KV at the step's layer, fp32 `[candidates]`."""
    assert evidence.fresh is not None
    assert evidence.stored is not None
    return deviation(evidence.fresh, evidence.stored, of, norm)


def deviation(fresh: KV, stored: KV, of: DeviationOf, norm: Norm) -> torch.Tensor:
    """Distance of each row's keys and values `[1, kv_heads, rows, head_dim]` from the stored ones, fp32 `[rows]`."""
    from blend_kernels import kv_deviation

    (new_keys, new_values), (old_keys, old_values) = fresh, stored
    metric: Literal["l2sq", "l1"] = "l2sq" if norm == "l2" else "l1"
    return kv_deviation(new_keys, old_keys, new_values, old_values, norm=metric, parts=of)[0]
