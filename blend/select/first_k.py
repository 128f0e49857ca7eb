"""The first rows of every chunk after the first: where isolated chunks grow attention sinks (EPIC, Hu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from blend.limits import check_fields
from blend.select.base import Evidence, Selector

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FirstK(Selector):
    """The first k rows of each chunk after the first, as many as the budget allows.

    k: rows per chunk at most; None spends the whole budget evenly.
    """

    name: ClassVar[str] = "first_k"

    k: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def select(self, evidence: Evidence) -> torch.Tensor:
        """Row 0 of every chunk after the first, then row 1 of every chunk, until budget or k is reached."""
        starts = evidence.layout.chunk_starts(evidence.candidates)
        depth = evidence.candidates - starts
        eligible = starts > evidence.layout.context.start
        if self.k is not None:
            eligible &= depth < self.k
        rows, depth = evidence.candidates[eligible], depth[eligible]
        order = depth.argsort(stable=True)[: evidence.budget]
        return rows[order].sort().values
