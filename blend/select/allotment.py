"""Who gets a selector's budget once rows have scores: single rows or blocks, leads of chunks first, a part to every chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend.select.base import Evidence, top_candidates


@dataclass(frozen=True)
class Allotment:
    """How a budget goes to rows.

    block: choose runs of so many neighbouring rows of a chunk, by their summed score, instead of single rows.
    head: rows at the start of every chunk that are taken first, fewer where they would take more than half of the budget. A
    chunk opens with its title, which answers copy although the question does not attend to it, and whose KV differs most.
    floor: share of the budget that goes to the best rows of every chunk in equal parts, heads included, before the rest goes to
    the best rows anywhere.
    """

    block: int = 1
    head: int = 0
    floor: float = 0.0

    def choose(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """The `budget` candidates that come first, by scores `[candidates]`, sorted by position; ties go to the earlier row."""
        if self.block > 1:
            scores = _block_scores(scores, evidence, self.block)
        if self.head:
            scores = _leads_first(scores, evidence, self.head)
        if self.floor:
            scores = _floors_first(scores, evidence, self.floor)
        return top_candidates(scores, evidence)


SINGLE_ROWS = Allotment()


def _block_scores(scores: torch.Tensor, evidence: Evidence, block: int) -> torch.Tensor:
    """Every row's score replaced by the sum over its block, blocks counted from the start of each chunk."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    first_rows = starts + (evidence.candidates - starts) // block * block
    _, which = torch.unique(first_rows, return_inverse=True)
    return torch.zeros_like(scores).index_add_(0, which, scores)[which]


def _leads_first(scores: torch.Tensor, evidence: Evidence, head: int) -> torch.Tensor:
    """The first rows of every chunk raised above all others."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    depth = min(head, evidence.budget // 2 // max(1, torch.unique(starts).shape[0]))
    return scores.masked_fill(evidence.candidates - starts < depth, torch.inf)


def _floors_first(scores: torch.Tensor, evidence: Evidence, floor: float) -> torch.Tensor:
    """The best rows of every chunk raised above all others."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    present = torch.unique(starts).tolist()
    each = int(floor * evidence.budget / max(1, len(present)))
    raised = scores.clone()
    for start in present:
        mine = (starts == start).nonzero()[:, 0]
        best = mine[scores[mine].argsort(descending=True, stable=True)[:each]]
        raised[best] = torch.inf
    return raised
