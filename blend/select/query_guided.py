"""Rows that the question looks at: context rows scored by the attention of the query rows over the stored caches."""

from __future__ import annotations

import torch

from blend.select.base import Evidence, Needs, Selector, chunk_of, top_candidates
from blend.select.query_score import QueryScore


class QueryGuided(Selector):
    """Rows with the most attention from the query, summed over a band of layers; known before any layer is recomputed.

    score: at which layers, and how joined. block: see `top_candidates`. head: rows at the start of every chunk that are taken
    first, see `heads_first`; not with blocks.
    """

    name = "query_guided"

    def __init__(self, score: QueryScore, block: int = 1, head: int = 0) -> None:
        self._score, self._block, self._head = score, block, head

    def needs(self, layers: int) -> Needs:
        """The query's attention at the band's layers."""
        return Needs(query=self._score)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """The rows that the query attends to most."""
        assert evidence.query_attention is not None
        scores = evidence.query_attention.sum(0)
        if self._block == 1:
            scores = heads_first(scores, evidence, self._head)
        return top_candidates(scores, evidence, self._block)


def heads_first(scores: torch.Tensor, evidence: Evidence, head: int) -> torch.Tensor:
    """Scores `[candidates]` with the first rows of every chunk raised above all others.

    head: so many rows of each chunk, fewer where they would take more than half of the budget. A chunk opens with its title,
    which answers copy although the question does not attend to it, and whose KV alone differs most from that in context.
    """
    chunks = chunk_of(evidence)
    depth = min(head, evidence.budget // 2 // max(1, torch.unique(chunks).shape[0]))
    starts = torch.tensor([span.start for span in evidence.layout.chunk_spans], device=chunks.device)
    return scores.masked_fill(evidence.candidates - starts[chunks] < depth, torch.inf)
