"""How the question's attention makes a score for every context row: at which layers, joined over its rows how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blend.errors import ConfigError
from blend.limits import LAYERS_IN_WORDS, numbered_layers, shown

if TYPE_CHECKING:
    from blend.config import BlendConfig, QueryRows


@dataclass(frozen=True)
class QueryScore:
    """What `recompute.query_attention` measures.

    layers: those that score, see `scoring_layers`. rows: "sum" or "peak" over the question's rows. value_norm: weight attention
    by the norm of the value it reads.
    """

    layers: str = "middle"
    rows: QueryRows = "peak"
    value_norm: bool = False

    @classmethod
    def of(cls, config: BlendConfig) -> QueryScore:
        """As a configuration says."""
        return cls(config.query_layers, config.query_rows, config.value_norm)


def scoring_layers(name: str, layers: int) -> tuple[int, ...]:
    """Layers by name: "all", "middle" (from half to five sixths of the depth), "upper" (half); or numbered, as "3,7,12-15".

    Raises `ConfigError` for another name, and for layers that a decoder of so many does not have.
    """
    bands = {
        "all": range(layers),
        "middle": range(layers // 2, -(-5 * layers // 6)),
        "upper": range(layers // 2, layers),
    }
    chosen = tuple(bands[name]) if name in bands else numbered_layers(name)
    if not chosen or chosen[-1] >= layers:
        raise ConfigError(f"query_layers is {shown(name)}; choose {LAYERS_IN_WORDS}, below {layers}")
    return chosen
