"""How the question's attention makes a score for every context row: at which layers, joined over its rows how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blend.errors import ConfigError

if TYPE_CHECKING:
    from blend.config import BlendConfig, QueryRows

BANDS = ("all", "middle", "upper")


@dataclass(frozen=True)
class QueryScore:
    """What `recompute.query_attention` measures.

    band: the layers that score, see `layer_band`. rows: "sum" or "peak" over the question's rows. value_norm: weight attention
    by the norm of the value it reads.
    """

    band: str = "middle"
    rows: QueryRows = "peak"
    value_norm: bool = False

    @classmethod
    def of(cls, config: BlendConfig) -> QueryScore:
        """As a configuration says."""
        return cls(config.query_layers, config.query_rows, config.value_norm)


def layer_band(name: str, layers: int) -> range:
    """Layers by name: "all", "middle" (from half to five sixths of the depth), "upper" (half), or "a-b".

    Raises `ConfigError` for another name, and for layers that a decoder of so many does not have.
    """
    bands = {
        "all": range(layers),
        "middle": range(layers // 2, -(-5 * layers // 6)),
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
