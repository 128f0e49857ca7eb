"""Rows that the question looks at: context rows scored by the attention of the query rows over the stored caches."""

from __future__ import annotations

import torch

from blend.errors import ConfigError
from blend.select.base import Evidence, Needs, Selector, top_candidates

BANDS = ("all", "middle", "upper")


def layer_band(name: str, layers: int) -> range:
    """Layers by name: "all", "middle" (from a third to three quarters of the depth), "upper" (half), or "a-b"."""
    bands = {
        "all": range(layers),
        "middle": range(layers // 3, -(-3 * layers // 4)),
        "upper": range(layers // 2, layers),
    }
    if name in bands:
        return bands[name]
    first, _, last = name.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < layers):
        raise ConfigError(
            f"query_layers is {name!r}; choose {', '.join(BANDS)}, or two layers such as 4-9, below {layers}"
        )
    return range(int(first), int(last) + 1)


class QueryGuided(Selector):
    """Rows with the most attention from the query, summed over a band of layers; known before any layer is recomputed.

    band: see `layer_band`. value_norm: weight attention by the norm of the value it reads. block: see `top_candidates`.
    """

    name = "query_guided"

    def __init__(self, band: str = "middle", value_norm: bool = False, block: int = 1) -> None:
        self._band, self._value_norm, self._block = band, value_norm, block

    def needs(self, layers: int) -> Needs:
        """The query's attention at the band's layers."""
        return Needs(query_layers=layer_band(self._band, layers), value_norm=self._value_norm)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that the query attends to most."""
        assert evidence.query_mass is not None
        return top_candidates(evidence.query_mass.sum(0), evidence, self._block)
