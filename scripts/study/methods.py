"""The methods that a study compares: full recompute, plain reuse, the published selection, and selectors at ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blend.config import BlendConfig

# What every other method is judged by, under the evaluator's name of it.
FULL = "full"
# HKVD on V, squared L2, layer 1, bottom-right mask, whole question recomputed.
BASELINE = "published"

Methods = dict[str, BlendConfig]

_AS_STORED: dict[str, Any] = {"correction": False, "surrogate": False}


def methods(selectors: Sequence[str], ratios: Sequence[float]) -> Methods:
    """Plain reuse, the published selection, and these selectors at each ratio, such as `query_guided 15 %`.

    selectors: with parameters, as `--selector` of the command line takes them.
    """
    compared = {
        "reuse": BlendConfig(selector="none", **_AS_STORED),
        BASELINE: BlendConfig(selector="hkvd", ratio=0.15, mask="bottom-right", **_AS_STORED),
    }
    for selector in selectors:
        compared |= {f"{selector} {100 * ratio:.0f} %": BlendConfig(selector=selector, ratio=ratio) for ratio in ratios}
    return compared
