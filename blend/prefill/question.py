"""The question's attention over the stored caches, which selectors choose by."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from blend.model.addressed_pass import Watch
from blend.model.attention import AttentionCall
from blend.model.cache import Run
from blend.model.graphs import RowGraphs
from blend.model.passes import OnLayer, RowRequest, nothing
from blend.select import QueryScore
from blend.select.base import scoring_layers

if TYPE_CHECKING:
    from blend.layout import PromptLayout
    from blend.model.cache import BlendedCache
    from blend.model.row_decoder import RowDecoder
    from blend.prefill.plan import Rows


class QueryAttention:
    """Attention of the suffix rows over the stored caches, summed over heads.

    Run the suffix with `observe` or `watch`, at once or in ascending pieces, then call `attention`. A row's attention does
    not depend on the pieces. Until the last piece, the attention of every scored layer is kept per head, fp32 `[heads, rows
    of the prompt]`. The suffix rows' KV is written; the recompute overwrites it.

    In each head it is the largest attention of any suffix row, plus that of the last row, where the answer starts; both weigh
    the same. A sum would favour the chunk that resembles the question over the one that answers it.

    Args:
        cache: holds the stored caches.
        uncached: positions of context rows without stored KV, int64 `[rows]`; they are blanked.
        also: positions of context rows that run too. Their attention does not count.

    Attributes:
        rows: the rows to run.
        last_layer: the last scored layer.
        logits: for the next token, `[1, vocab]`, if `replay` was to give them.

    Raises:
        ConfigError: a scored layer that the decoder lacks.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        cache: BlendedCache,
        layout: PromptLayout,
        score: QueryScore,
        uncached: Tensor | None = None,
        also: Rows | None = None,
    ) -> None:
        self._layers = scoring_layers(score.layers, decoder.attending)
        self._decoder = decoder
        self._cache = cache
        self._layout = layout
        self._scored = list[Tensor]()
        self._ends = list[Tensor]()
        self._partial: dict[int, Tensor] = {}
        self.last_layer = self._layers[-1]
        suffix = np.arange(layout.context.stop, layout.rows)
        rows = suffix if also is None else np.concatenate((also, suffix))
        self.rows = Run.on_host(rows, decoder.device)
        self._also = len(rows) - len(suffix)
        self._seen = defaultdict[int, int](int)  # rows of each layer
        self.logits: Tensor | None = None
        if uncached is not None:
            cache.blank(uncached)

    @property
    def is_complete(self) -> bool:
        """Whether all rows ran."""
        return len(self._scored) == len(self._layers)

    def can_replay(self, *, logits: bool) -> bool:
        """Whether the decoder has a graph for these rows."""
        graphs = self._graphs
        return graphs is not None and graphs.will_watch(self.rows.rows, self._watch(logits=logits))

    @property
    def _graphs(self) -> RowGraphs | None:
        """The decoder's graphs, if they can give what is scored."""
        return None if self._also else self._decoder.graphs

    def replay(self, await_layer: OnLayer, *, logits: bool) -> bool:
        """Run the rows by a graph of the decoder, through all layers if logits are wanted. False if it has none for them."""
        if self._graphs is None:
            return False
        request = RowRequest(self._ids(), self.rows, self._cache, await_layer=await_layer)
        result = self._graphs.watched(request, self._watch(logits=logits))
        if result is None or result.masses is None:
            return False
        self._scored, self._ends = map(list, result.masses.unbind(1))
        self.logits = result.logits
        return True

    def watch(self, await_layer: OnLayer = nothing) -> None:
        """Observe the rows in one pass, which ends with the last scored layer. await_layer: see `RowRequest`."""
        self._decoder.watch_attention(
            self._ids(), self.rows, self._cache, self.observe, last_layer=self.last_layer, await_layer=await_layer
        )

    def _watch(self, *, logits: bool) -> Watch:
        return Watch(self._layers, peak=True, logits=logits)

    def _ids(self) -> Tensor:
        """Token ids of the rows, `[1, rows]`."""
        rows = self.rows
        ids = torch.from_numpy(self._layout.ids)[None]
        start = rows.start
        if start is not None:
            return ids[:, start : start + rows.rows].to(self._decoder.device, non_blocking=True)
        return ids.to(self._decoder.device)[:, rows.positions]

    def observe(self, call: AttentionCall) -> None:
        """Add the attention of a layer."""
        rows = call.positions.shape[0]
        self._seen[call.layer] += rows
        seen = self._seen[call.layer]
        of_suffix = min(rows, seen - self._also)
        if call.layer not in self._layers or of_suffix <= 0:
            return
        peak, last = call.of_last_rows(of_suffix).masses(peak=True)[:, 0]
        earlier = self._partial.pop(call.layer, None)
        if earlier is not None:  # of rows that may see fewer keys
            same_keys = peak[:, : earlier.shape[1]]
            torch.maximum(same_keys, earlier, out=same_keys)
        if seen < self.rows.rows:
            self._partial[call.layer] = peak
            return
        self._scored.append(peak.sum(0))
        self._ends.append(last.sum(0))

    def attention(self) -> Tensor:
        """Attention of all scored layers, fp32 `[scored layers, rows of the prompt]`."""
        attention = torch.stack(self._scored)
        last = torch.stack(self._ends)
        context = slice(self._layout.context.start, self._layout.context.stop)
        of_all = attention[:, context].sum()
        of_last = last[:, context].sum()
        attention += last * (of_all / of_last.clamp_min(1e-20))
        return attention
