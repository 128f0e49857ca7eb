"""Who gets a selector's budget once rows have scores: single rows or blocks, leads of chunks first, a part to every chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blend.limits import check_fields
from blend.select.base import Evidence, Selector, top_candidates

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScoringSelector(Selector):
    """A selector that gives every row a score, and the rows that come first by it.

    lead: rows at the start of every chunk that are taken first, fewer where they would take more than half of the budget. A
    chunk opens with its title, which answers copy although the question does not attend to it, and whose KV differs most.
    None leaves it to the selector.
    floor: share of the budget that goes to the best rows of every chunk in equal parts, leads included, before the rest goes
    to the best rows anywhere.
    block: choose runs of so many neighbouring rows of a chunk, by their summed score, instead of single rows.
    """

    lead: int | None = field(default=None, kw_only=True)
    floor: float = field(default=0.0, kw_only=True)
    block: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def own_lead(self) -> int:
        """The lead where none is given."""
        return 0

    def allot(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """The `budget` candidates that come first, by scores `[candidates]`, sorted by position; ties go to the earlier row."""
        lead = self.own_lead if self.lead is None else self.lead
        if self.block > 1:
            scores = _block_scores(scores, evidence, self.block)
        if lead:
            scores = _leads_first(scores, evidence, lead)
        if self.floor:
            scores = _floors_first(scores, evidence, self.floor)
        return top_candidates(scores, evidence)


def _block_scores(scores: torch.Tensor, evidence: Evidence, block: int) -> torch.Tensor:
    """Every row's score replaced by the sum over its block, blocks counted from the start of each chunk."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    import torch

    first_rows = starts + (evidence.candidates - starts) // block * block
    _, which = torch.unique(first_rows, return_inverse=True)
    return torch.zeros_like(scores).index_add_(0, which, scores)[which]


def _leads_first(scores: torch.Tensor, evidence: Evidence, lead: int) -> torch.Tensor:
    """The first rows of every chunk raised above all others."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    depth = min(lead, evidence.budget // 2 // max(1, len(_different(starts))))
    return scores.masked_fill(evidence.candidates - starts < depth, float("inf"))


def _floors_first(scores: torch.Tensor, evidence: Evidence, floor: float) -> torch.Tensor:
    """The best rows of every chunk raised above all others."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    present = _different(starts)
    each = int(floor * evidence.budget / max(1, len(present)))
    raised = scores.clone()
    for start in present:
        mine = (starts == start).nonzero()[:, 0]
        best = mine[scores[mine].argsort(descending=True, stable=True)[:each]]
        raised[best] = float("inf")
    return raised


def _different(starts: torch.Tensor) -> list[int]:
    import torch

    found: list[int] = torch.unique(starts).tolist()
    return found
