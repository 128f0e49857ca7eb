"""Names of methods: tables and pictures read a method's ratio from its name."""

from __future__ import annotations

import re

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
