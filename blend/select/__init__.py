"""Selectors: which cached context rows to recompute. One contract and one text form (`base`).

Read: `base` (`Needs`: what a selector must see; `Evidence`: what it sees; `Selector`: the contract) -> `selectors` (the
built-in ones, `SELECTORS` by name).
In: an `Evidence` with candidate rows and a budget. Out: the rows to recompute, int64 `[rows]`.
To add a selector: a frozen dataclass in `selectors`, named in `SELECTORS`; its fields are its parameters, described in
`MEANINGS`.

Importing this package loads no torch, so that a configuration can hold a selector.
"""

from __future__ import annotations

from blend.select.base import Evidence, Needs, QueryScore, Selector, Step, top_candidates
from blend.select.selectors import (
    SELECTORS,
    All,
    FirstK,
    Gradual,
    HighDeviation,
    Mixed,
    Nothing,
    QueryGuided,
    Random,
    ScoringSelector,
    make_selector,
    require_whole_chunks,
)

__all__ = [
    "SELECTORS",
    "All",
    "Evidence",
    "FirstK",
    "Gradual",
    "HighDeviation",
    "Mixed",
    "Needs",
    "Nothing",
    "QueryGuided",
    "QueryScore",
    "Random",
    "ScoringSelector",
    "Selector",
    "Step",
    "make_selector",
    "require_whole_chunks",
    "top_candidates",
]
