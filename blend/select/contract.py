"""Selectors are held to their contract: what one returns against it ends in one line, never in a wrong cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.errors import ConfigError
from blend.limits import shown
from blend.select.base import Evidence, Needs, Selector

if TYPE_CHECKING:
    import torch


def needs_of(selector: Selector, layers: int) -> Needs:
    """What a selector must see, for a decoder of so many layers.

    Raises `ConfigError` for what is no `Needs`, and for a step at a layer that the decoder does not have.
    """
    needs = selector.needs(layers)
    if not isinstance(needs, Needs):
        raise ConfigError(f"selector {selector.spec}: its needs are {shown(needs)}; return a blend.Needs")
    last = needs.steps[-1].layer
    if last >= layers:
        raise ConfigError(
            f"selector {selector.spec}: layer {last} does not exist: the model has layers 0 to {layers - 1}"
        )
    return needs


def rows_of(selector: Selector, evidence: Evidence) -> torch.Tensor:
    """The rows that a selector chooses, sorted. Raises `ConfigError` for anything but what `Selector.select` may return."""
    candidates = evidence.candidates.clone()  # what the selector is shown it might change
    chosen = selector.select(evidence)
    if told := _malformed(chosen):
        raise ConfigError(f"selector {selector.spec}: it returned {told}; return int64 positions in a tensor `[rows]`")
    rows = chosen.to(candidates.device).sort().values
    if told := _not_among(rows, candidates, evidence.budget):
        raise ConfigError(f"selector {selector.spec}: it returned {told}")
    return rows


def _malformed(chosen: object) -> str:
    import torch

    if not isinstance(chosen, torch.Tensor):
        return f"{shown(chosen)}"
    if chosen.dtype != torch.int64 or chosen.dim() != 1:
        return f"a tensor of {str(chosen.dtype).removeprefix('torch.')} {list(chosen.shape)}"
    return ""


def _not_among(rows: torch.Tensor, candidates: torch.Tensor, budget: int) -> str:
    """What is wrong with sorted rows, empty when nothing is."""
    import torch

    if rows.shape[0] > budget:
        return f"{rows.shape[0]} rows where the budget is {budget}; return at most evidence.budget"
    twice = rows[1:][rows[1:] == rows[:-1]]
    if twice.shape[0]:
        return f"row {int(twice[0])} twice; return every row once"
    foreign = rows[~torch.isin(rows, candidates)]
    if foreign.shape[0]:
        return f"row {int(foreign[0])}, which is no candidate; return rows of evidence.candidates, not indices into it"
    return ""
