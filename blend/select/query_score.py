"""How the question's attention makes a score for every context row: at which layers, joined over its rows how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blend.errors import ConfigError
from blend.limits import LAYERS_IN_WORDS, check_fields, numbered_layers, shown

QueryRows = Literal["peak", "sum"]


@dataclass(frozen=True)
class QueryScore:
    """What `evidence.query_attention` measures. Raises `ConfigError` for other values.

    layers: those that score, see `scoring_layers`. rows: "sum" or "peak" over the question's rows. value_norm: weight attention
    by the norm of the value it reads.
    """

    layers: str = "middle"
    rows: QueryRows = "peak"
    value_norm: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def scoring_layers(name: str, layers: int) -> tuple[int, ...]:
    """Layers by name: "all", "middle" (from half to five sixths of the depth), "upper" (half); or numbered, as "3+7+12-15".

    Raises `ConfigError` for another name, and for layers that a decoder of so many does not have.
    """
    bands = {
        "all": range(layers),
        "middle": range(layers // 2, -(-5 * layers // 6)),
        "upper": range(layers // 2, layers),
    }
    chosen = tuple(bands[name]) if name in bands else numbered_layers(name)
    if not chosen or chosen[-1] >= layers:
        raise ConfigError(f"layers is {shown(name)}; choose {LAYERS_IN_WORDS}, below {layers}")
    return chosen
