"""The first rows of every chunk after the first: where isolated chunks grow attention sinks (EPIC, Hu et al. 2025)."""

from __future__ import annotations

import torch

from blend.select.base import Evidence, Selector


class FirstK(Selector):
    """The first k rows of each chunk after the first, as many as the budget allows.

    k: rows per chunk at most; None spends the whole budget evenly.
    """

    name = "first_k"

    def __init__(self, k: int | None = None) -> None:
        self._k = k

    def select(self, evidence: Evidence) -> torch.Tensor:
        """Row 0 of every chunk after the first, then row 1 of every chunk, until budget or k is reached."""
        starts = evidence.layout.chunk_starts(evidence.candidates)
        depth = evidence.candidates - starts
        eligible = starts > evidence.layout.context.start
        if self._k is not None:
            eligible &= depth < self._k
        rows, depth = evidence.candidates[eligible], depth[eligible]
        order = torch.argsort(depth, stable=True)[: evidence.budget]
        return rows[order].sort().values
