"""High KV deviation (CacheBlend, Yao et al. 2025, section 4): recompute the rows whose KV differs most in context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from blend.config import DeviationOf, Norm
from blend.errors import ConfigError
from blend.select.allotment import SINGLE_ROWS, Allotment
from blend.select.base import Evidence, Needs, Selector, Step
from blend_kernels import kv_deviation


class HighDeviation(Selector):
    """Rows with the largest distance between fresh and stored KV at the check layer.

    steps: the check layers. deviation_of: values, keys or both. norm: squared L2 or L1, summed over heads and dimensions.
    """

    name = "hkvd"

    def __init__(
        self,
        steps: Sequence[Step] = (Step(1),),
        deviation_of: DeviationOf = "v",
        norm: Norm = "l2",
        allotment: Allotment = SINGLE_ROWS,
    ) -> None:
        self._steps = tuple(steps)
        self._parts: DeviationOf = deviation_of
        self._norm: Norm = norm
        self._allotment = allotment

    def needs(self, layers: int) -> Needs:
        """The check layers."""
        if self._steps[-1].layer >= layers:
            raise ConfigError(
                f"check layer {self._steps[-1].layer} does not exist: the model has layers 0 to {layers - 1}"
            )
        return Needs(self._steps)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that deviate most."""
        return self._allotment.choose(self.deviation(evidence), evidence)

    def deviation(self, evidence: Evidence) -> torch.Tensor:
        """Distance of fresh from stored KV at the step's layer, fp32 `[candidates]`."""
        assert evidence.fresh is not None
        assert evidence.stored is not None
        (new_keys, new_values), (old_keys, old_values) = evidence.fresh, evidence.stored
        norm: Literal["l2sq", "l1"] = "l2sq" if self._norm == "l2" else "l1"
        return kv_deviation(new_keys, old_keys, new_values, old_values, norm=norm, parts=self._parts)[0]


class GradualDeviation(HighDeviation):
    """Gradual filtering (CacheBlend, section 4.3): more rows at first, some of them dropped at each of the next layers.

    The rows of all layers from the check layer on add up to about the budget times their number, as with one check.
    """

    name = "gradual"

    def __init__(
        self,
        check_layer: int = 1,
        deviation_of: DeviationOf = "v",
        norm: Norm = "l2",
        allotment: Allotment = SINGLE_ROWS,
    ) -> None:
        super().__init__((Step(check_layer),), deviation_of, norm, allotment)
        self._first = check_layer

    def needs(self, layers: int) -> Needs:
        """Four check layers, spread over the lower half: 1.6, 1.3, 1.1 and then 0.8 times the budget."""
        super().needs(layers)
        eighth = max(1, (layers - self._first) // 8)
        places = [self._first + i * eighth for i in range(4)]
        factors = (1.6, 1.3, 1.1, 0.8)
        return Needs(tuple(Step(p, f) for p, f in zip(places, factors, strict=True) if p < layers))
