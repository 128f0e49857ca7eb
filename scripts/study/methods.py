"""The methods that a study compares: their names, and groups of configurations.

Tables and pictures read a method's ratio from its name. Only this module knows the options of selectors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from blend.config import BlendConfig
from blend.errors import ConfigError

# What every other method is judged by, under the evaluator's name of it.
FULL = "full"
REUSE = "reuse"
# HKVD on V, squared L2, layer 1, bottom-right mask, whole question recomputed.
BASELINE = "published"
_DEFAULT_PERCENT = 15  # of a name that says none


def named(method: str, ratio: float, variant: str = "") -> str:
    """A method at a ratio, as `ratio_of` reads it."""
    return f"{method} {ratio * 100:.0f} %{variant}"


def ratio_of(method: str) -> tuple[str, int]:
    """A method's name without its ratio, and the ratio in percent; a name without one stands for 15."""
    match = re.fullmatch(r"(.*?) (\d+) %(.*)", method)
    return (match[1] + match[3], int(match[2])) if match else (method, _DEFAULT_PERCENT)


Methods = dict[str, BlendConfig]

RATIOS = (0.01, 0.02, 0.05, 0.10, 0.15, 0.30)
# Bands of layers, as shares of the model's depth.
BANDS = ((1 / 3, 3 / 4), (5 / 12, 5 / 6), (1 / 2, 11 / 12), (2 / 3, 1.0))
_AS_STORED: dict[str, Any] = {"correction": False, "surrogate": False}


def methods(group: str, layers: int) -> Methods:
    """The methods of a group for a model of so many layers. Raises `ConfigError` for an unknown group."""
    if group not in _GROUPS:
        raise ConfigError(f"no group of methods is called {group}; choose one of {', '.join(GROUPS)}")
    return _GROUPS[group](layers)


def _config(selector: str, ratio: float = 0.15, **options: Any) -> BlendConfig:
    return BlendConfig(selector=selector, ratio=ratio, **options)


def _query(ratio: float = 0.15, selector: str = "query_guided", **options: Any) -> BlendConfig:
    return _config(selector, ratio, **options)


def _published(ratio: float = 0.15) -> BlendConfig:
    return _config("hkvd", ratio, mask="bottom-right", **_AS_STORED)


def _base(layers: int) -> Methods:
    return {REUSE: _config("none", **_AS_STORED), BASELINE: _published()}


def _finalists(layers: int) -> Methods:
    return {**_base(layers), "query": _query(), "query 5 %": _query(0.05)}


def _parts(layers: int) -> Methods:
    """The default without the KV correction, without the surrogate context, without either, without recompute."""
    return {
        **_finalists(layers),
        "query, as stored": _query(**_AS_STORED),
        "query, map only": _query(surrogate=False),
        "query 5 %, map only": _query(0.05, surrogate=False),
        "query, surrogate context only": _query(correction=False),
        "query 0 %": _config("none"),
    }


def _frontier(layers: int) -> Methods:
    """The default and the baseline over ratios."""
    return {
        **_finalists(layers),
        "query 0 %": _config("none"),
        "all": _config("all"),
        **{named("query", ratio): _query(ratio) for ratio in RATIOS if ratio not in (0.05, 0.15)},
        **{named(BASELINE, ratio): _published(ratio) for ratio in RATIOS if ratio != 0.15},
    }


def _by_layers(layers: int) -> Methods:
    """The question's attention in several bands of layers."""
    bands = [f"{round(low * layers)}-{round(high * layers) - 1}" for low, high in BANDS]
    pairs = [(band, ratio) for band in bands for ratio in (0.05, 0.15)]
    return {
        **_finalists(layers),
        **{named("query", ratio, f", {band}"): _query(ratio, f"query_guided:layers={band}") for band, ratio in pairs},
    }


def _screen(layers: int) -> Methods:
    """Every selector, and the options of each."""
    stored = {f"{name}, as stored": _config(name, **_AS_STORED) for name in ("hkvd", "oracle")}
    return {**_parts(layers), **{name: _config(selector) for name, selector in _SCREENED.items()}, **stored}


_SCREENED = {
    "hkvd": "hkvd",
    "hkvd floor": "hkvd:floor=0.5",
    "hkvd blocks 16": "hkvd:block=16",
    "hkvd K layer 3": "hkvd:check_layer=3,of=k",
    "gradual": "gradual",
    "first_k": "first_k",
    "random": "random",
    "query all layers": "query_guided:layers=all",
    "query upper layers": "query_guided:layers=upper",
    "query x |v|": "query_guided:value_norm=true",
    "query floor": "query_guided:floor=0.3",
    "query sum": "query_guided:rows=sum",
    "query blocks 16": "query_guided:block=16",
    "query blocks 32": "query_guided:block=32",
    "mixed 1": "mixed",
    "mixed 1 z": "mixed:rule=zsum",
    "mixed 3": "mixed:check_layer=3",
    "mixed 3 heads": "mixed:check_layer=3,lead=6",
    "mixed 3 floor": "mixed:check_layer=3,floor=0.3",
    "mixed 3 prefilter": "mixed:check_layer=3,prefilter=2.5",
    "oracle": "oracle",
}
_GROUPS: dict[str, Callable[[int], Methods]] = {
    "base": _base,
    "finalists": _finalists,
    "parts": _parts,
    "frontier": _frontier,
    "layers": _by_layers,
    "screen": _screen,
}
GROUPS = tuple(_GROUPS)
