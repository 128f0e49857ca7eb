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
        raise ConfigError(
            f"query_layers is {name!r}; choose {', '.join(BANDS)}, or layers such as 4-9 or 3,7,12-15, below {layers}"
        )
    return chosen


def numbered_layers(name: str) -> tuple[int, ...]:
    """Layers written as numbers and runs; nothing where that is not what they are."""
    chosen: set[int] = set()
    for part in name.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
            return ()
        chosen.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(chosen))
