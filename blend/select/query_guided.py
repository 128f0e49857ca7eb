"""Rows that the question looks at: context rows scored by the attention of the query rows over the stored caches."""

from __future__ import annotations

import torch

from blend.config import QueryRows
from blend.errors import ConfigError
from blend.select.base import Evidence, Needs, Selector, chunk_of, top_candidates

BANDS = ("all", "middle", "upper")


def layer_band(name: str, layers: int) -> range:
    """Layers by name: "all", "middle" (from half to five sixths of the depth), "upper" (half), or "a-b"."""
    bands = {
        "all": range(layers),
        "middle": range(layers // 2, -(-5 * layers // 6)),
        "upper": range(layers // 2, layers),
    }
    if name in bands:
        return bands[name]
    first, _, last = name.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < layers):
        raise ConfigError(
            f"query_layers is {name!r}; choose {', '.join(BANDS)}, or two layers such as 4-9, below {layers}"
        )
    return range(int(first), int(last) + 1)


class QueryGuided(Selector):
    """Rows with the most attention from the query, summed over a band of layers; known before any layer is recomputed.

    band: see `layer_band`. query_rows, value_norm: see `recompute.query_attention`. block: see `top_candidates`. head: rows at
    the start of every chunk that are taken first, see `heads_first`; not with blocks.
    """

    name = "query_guided"

    def __init__(
        self,
        band: str = "middle",
        query_rows: QueryRows = "peak",
        value_norm: bool = False,
        block: int = 1,
        head: int = 0,
    ) -> None:
        self._band, self._query_rows, self._value_norm = band, query_rows, value_norm
        self._block, self._head = block, head

    def needs(self, layers: int) -> Needs:
        """The query's attention at the band's layers."""
        band = layer_band(self._band, layers)
        return Needs(query_layers=band, query_rows=self._query_rows, value_norm=self._value_norm)

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
