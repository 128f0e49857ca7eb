"""The methods that a study compares: their names, and groups of configurations."""

from __future__ import annotations

from typing import Any

from blend.config import BlendConfig

# What every other method is judged by, under the evaluator's name of it.
FULL = "full"
# HKVD on V, squared L2, layer 1, bottom-right mask, whole question recomputed.
BASELINE = "published"

Methods = dict[str, BlendConfig]

RATIOS = (0.01, 0.02, 0.05, 0.10, 0.15, 0.30)
_AS_STORED: dict[str, Any] = {"correction": False, "surrogate": False}


def _query(ratio: float = 0.15, **options: Any) -> BlendConfig:
    return BlendConfig(selector="query_guided", ratio=ratio, **options)


def _published(ratio: float = 0.15) -> BlendConfig:
    return BlendConfig(selector="hkvd", ratio=ratio, mask="bottom-right", **_AS_STORED)


def _at_ratios() -> Methods:
    """The default and the baseline at every ratio but their own names'."""
    others = [ratio for ratio in RATIOS if ratio != 0.15]
    queries = {f"query {ratio:.0%}".replace("%", " %"): _query(ratio) for ratio in others}
    return queries | {f"{BASELINE} {ratio:.0%}".replace("%", " %"): _published(ratio) for ratio in others}


_SELECTORS = (
    *("hkvd", "hkvd:floor=0.5", "hkvd:block=16", "hkvd:check_layer=3,of=k", "first_k", "random"),
    *("query_guided:layers=all", "query_guided:layers=upper", "query_guided:value_norm=true", "query_guided:floor=0.3"),
    *("query_guided:rows=sum", "query_guided:block=16", "query_guided:block=32", "mixed", "mixed:rule=zsum"),
    *("mixed:check_layer=3", "mixed:check_layer=3,lead=6", "mixed:check_layer=3,floor=0.3"),
    *("mixed:check_layer=3,prefilter=2.5"),
)
_FINALISTS: Methods = {
    "reuse": BlendConfig(selector="none", **_AS_STORED),
    BASELINE: _published(),
    "query": _query(),
    "query 5 %": _query(0.05),
}
# The default without the KV correction, without the surrogate context, without either, without recompute.
_PARTS: Methods = {
    **_FINALISTS,
    "query, as stored": _query(**_AS_STORED),
    "query, map only": _query(surrogate=False),
    "query 5 %, map only": _query(0.05, surrogate=False),
    "query, surrogate context only": _query(correction=False),
    "query 0 %": BlendConfig(selector="none"),
}
GROUPS: dict[str, Methods] = {
    "finalists": _FINALISTS,
    "answers": {"query": _query(), "query 5 %": _query(0.05), "query 25 %": _query(0.25)},
    "parts": _PARTS,
    "frontier": {
        **_FINALISTS,
        "query 0 %": BlendConfig(selector="none"),
        "all": BlendConfig(selector="all"),
        **_at_ratios(),
    },
    "selectors": _PARTS | {name: BlendConfig(selector=name, ratio=0.15) for name in _SELECTORS},
}
