"""Selectors: which cached context rows to recompute. One file each, one contract (`base.Selector`), one text form.

Importing this package loads no torch, so that a configuration can hold a selector.
"""

from __future__ import annotations

from blend.errors import ConfigError
from blend.limits import shown
from blend.select.base import Evidence, Needs, QueryScore, Selector, Step, parsed, top_candidates
from blend.select.selectors import (
    All,
    FirstK,
    GradualDeviation,
    HighDeviation,
    Mixed,
    Nothing,
    Oracle,
    QueryGuided,
    Random,
    ScoringSelector,
)

__all__ = [
    "SELECTORS",
    "All",
    "Evidence",
    "FirstK",
    "GradualDeviation",
    "HighDeviation",
    "Mixed",
    "Needs",
    "Nothing",
    "Oracle",
    "QueryGuided",
    "QueryScore",
    "Random",
    "ScoringSelector",
    "Selector",
    "Step",
    "make_selector",
    "top_candidates",
]

SELECTORS: dict[str, type[Selector]] = {
    kind.name: kind
    for kind in (HighDeviation, GradualDeviation, QueryGuided, Mixed, FirstK, Random, Oracle, All, Nothing)
}
"""The built-in selectors by the names that specs have for them."""


def make_selector(spec: str | Selector) -> Selector:
    """The selector that a spec describes, `NAME` or `NAME:key=value,key=value` (`parameters`); a selector as it is.

    Raises `ConfigError` in one line for a name, a key or a value that is not known, with those that are.
    """
    if isinstance(spec, Selector):
        return spec
    if not isinstance(spec, str):
        raise ConfigError(f"selector is {shown(spec)}; give a name, NAME:key=value,key=value or a blend.Selector")
    name, colon, given = spec.partition(":")
    if name not in SELECTORS:
        raise ConfigError(f"unknown selector {shown(name)}; choose one of {', '.join(SELECTORS)}")
    kind = SELECTORS[name]
    arguments = parsed(kind, name, given) if colon else {}
    try:
        return kind(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
