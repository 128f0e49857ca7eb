"""The methods that a study compares: their names, and groups of configurations.

Tables and pictures read a method's ratio from its name. Only this module knows the options of selectors.
"""

from __future__ import annotations

import re
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
_AS_STORED: dict[str, Any] = {"correction": False, "surrogate": False}


def methods(group: str) -> Methods:
    """The methods of a group. Raises `ConfigError` for an unknown group."""
    if group not in _GROUPS:
        raise ConfigError(f"no group of methods is called {group}; choose one of {', '.join(GROUPS)}")
    return _GROUPS[group]


def _config(selector: str = "query_guided", ratio: float = 0.15, **options: Any) -> BlendConfig:
    return BlendConfig(selector=selector, ratio=ratio, **options)


def _published(ratio: float = 0.15) -> BlendConfig:
    return _config("hkvd", ratio, mask="bottom-right", **_AS_STORED)


_BASE: Methods = {REUSE: _config("none", **_AS_STORED), BASELINE: _published()}
_FINALISTS: Methods = {**_BASE, "query": _config(), "query 5 %": _config(ratio=0.05)}
# How many answers change.
_ANSWERS: Methods = {"query": _config(), **{named("query", ratio): _config(ratio=ratio) for ratio in (0.05, 0.25)}}
# The default without the KV correction, without the surrogate context, without either, without recompute.
_PARTS: Methods = {
    **_FINALISTS,
    "query, as stored": _config(**_AS_STORED),
    "query, map only": _config(surrogate=False),
    "query 5 %, map only": _config(ratio=0.05, surrogate=False),
    "query, surrogate context only": _config(correction=False),
    "query 0 %": _config("none"),
}
# The default and the baseline over ratios.
_FRONTIER: Methods = {
    **_FINALISTS,
    "query 0 %": _config("none"),
    "all": _config("all"),
    **{named("query", ratio): _config(ratio=ratio) for ratio in RATIOS if ratio not in (0.05, 0.15)},
    **{named(BASELINE, ratio): _published(ratio) for ratio in RATIOS if ratio != 0.15},
}
_SCREENED = {
    "hkvd": "hkvd",
    "hkvd K layer 3": "hkvd:check_layer=3,of=k",
    "first_k": "first_k",
    "random": "random",
    "query all layers": "query_guided:layers=all",
    "query upper layers": "query_guided:layers=upper",
    "mixed 1": "mixed",
    "mixed 3": "mixed:check_layer=3",
    "mixed 3 heads": "mixed:check_layer=3,lead=6",
}
# Every selector, and the options of each.
_SCREEN: Methods = {
    **_PARTS,
    **{name: _config(selector) for name, selector in _SCREENED.items()},
    "hkvd, as stored": _config("hkvd", **_AS_STORED),
}
_GROUPS: dict[str, Methods] = {
    "base": _BASE, "finalists": _FINALISTS, "answers": _ANSWERS, "parts": _PARTS, "frontier": _FRONTIER, "screen": _SCREEN,
}  # fmt: skip
GROUPS = tuple(_GROUPS)
