"""Evidence of selectors that costs a pass of the decoder: the question's attention, or the deviation from full recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blend.model.attention import AttentionCall
from blend.model.cache import Run
from blend.model.passes import OnLayer, PassGraphs, RowRequest, Watch
from blend.select import QueryScore
from blend.select.base import scoring_layers

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.row_decoder import RowDecoder
    from blend.prefill.plan import Rows
    from blend.types import PromptLayout


class QueryAttention:
    """Attention of the suffix rows over the stored caches, summed over heads.

    Run the suffix with `observe` or `watch`, at once or in ascending pieces, then call `attention`. A row's attention does
    not depend on the pieces. Until the last piece, the attention of every scored layer is kept per head, fp32 `[heads, rows
    of the prompt]`. The suffix rows' KV is written; the recompute overwrites it.

    rows="sum" takes the attention of all suffix rows. rows="peak" takes in each head the largest attention of any suffix
    row, plus that of the last row, where the answer starts; both weigh the same. A sum favours the chunk that resembles the
    question over the one that answers it.

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
        self._score = score
        self._scored = list[Tensor]()
        self._ends = list[Tensor]()
        self._partial: dict[int, _Partial] = {}
        self.last_layer = self._layers[-1]
        suffix = np.arange(layout.context.stop, layout.rows)
        rows = suffix if also is None else np.concatenate((also, suffix))
        self.rows = Run.on_host(rows, decoder.device)
        self._suffix_rows = len(suffix)
        self._also = len(rows) - len(suffix)
        self._seen: dict[int, int] = {}  # rows of each layer
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
        return graphs is not None and graphs.will_watch(self._suffix_rows, self._watch(logits=logits))

    @property
    def _graphs(self) -> PassGraphs | None:
        """The decoder's graphs, if they can give what is scored."""
        is_plain = not self._also and not self._score.value_norm
        return self._decoder.graphs if is_plain else None

    def replay(self, await_layer: OnLayer, *, logits: bool) -> bool:
        """Run the rows by a graph of the decoder, through all layers if logits are wanted. False if it has none for them."""
        if self._graphs is None:
            return False
        request = RowRequest.of(self._ids(), self.rows, self._cache, await_layer=await_layer)
        result = self._graphs.watched(request, self._watch(logits=logits))
        if result is None or result.masses is None:
            return False
        self._scored, *ends = map(list, result.masses.unbind(1))
        self._ends = ends[0] if ends else []
        self.logits = result.logits
        return True

    def watch(self, await_layer: OnLayer | None = None) -> None:
        """Observe the rows in one pass, which ends with the last scored layer. await_layer: see `RowRequest`."""
        self._decoder.watch_attention(
            self._ids(),
            self.rows,
            self._cache,
            self.observe,
            last_layer=self.last_layer,
            await_layer=await_layer,
        )

    def _watch(self, *, logits: bool) -> Watch:
        return Watch(self._layers, self._score.rows == "peak", logits)

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
        stop = self._seen.get(call.layer, 0) + rows
        self._seen[call.layer] = stop
        of_suffix = min(rows, stop - self._also)
        if call.layer not in self._layers or of_suffix <= 0:
            return
        call = call.of_last_rows(of_suffix)
        peak = self._score.rows == "peak"
        last = None
        if peak:
            heads, last = call.peak_and_last()
        else:
            heads = call.mass(per_head=True)
        joined = _Partial(of_suffix, heads[0])
        if call.layer in self._partial:
            joined = self._partial.pop(call.layer).joined(joined, peak=peak)
        if joined.rows < self._suffix_rows:
            self._partial[call.layer] = joined
            return
        self._scored.append(_over_heads(joined.heads, call, self._score))
        if last is not None:
            self._ends.append(_over_heads(last[0], call, self._score))

    def attention(self) -> Tensor:
        """Attention of all scored layers, fp32 `[scored layers, rows of the prompt]`."""
        attention = torch.stack(self._scored)
        if self._ends:
            last = torch.stack(self._ends)
            context = slice(self._layout.context.start, self._layout.context.stop)
            of_all = attention[:, context].sum()
            of_last = last[:, context].sum()
            attention += last * (of_all / of_last.clamp_min(1e-20))
        return attention


def true_weight(
    decoder: RowDecoder,
    cache: BlendedCache,
    layout: PromptLayout,
) -> Tensor:
    """How much each row's stored KV costs the question, from a full prefill, fp32 `[rows of the prompt]`.

    The sum over layers of the suffix rows' attention under full recompute, times the norm of the difference of stored and
    recomputed KV, keys and values each relative to the layer's mean squared norm.
    """
    exact = decoder.new_cache(layout.rows)
    mass = list[Tensor]()
    suffix = layout.rows - layout.context.stop

    def observe(call: AttentionCall) -> None:
        mass.append(call.of_last_rows(suffix).mass()[0])

    ids = torch.tensor([layout.token_ids], device=decoder.device)
    rows = Run.consecutive(0, layout.rows, decoder.device)
    decoder.watch_attention(ids, rows, exact, observe)
    weight = torch.zeros(layout.rows, device=decoder.device)
    for layer, attention in enumerate(mass):
        distance = torch.zeros_like(weight)
        for true, stored in zip(exact.view(layer), cache.view(layer), strict=True):
            size = _squared_norms(true).mean()
            distance += _squared_norms(true - stored) / size
        weight += attention * distance.sqrt()
    return weight


def _squared_norms(states: Tensor) -> Tensor:
    """Of the rows of `[1, kv_heads, rows, head_dim]`, over heads and dimensions, fp32 `[rows]`."""
    return states[0].float().square().sum((0, 2))


class _Partial(NamedTuple):
    """Attention per head that each key received from the first `rows` rows of the suffix, `[heads, keys]`."""

    rows: int
    heads: Tensor

    def joined(self, later: _Partial, *, peak: bool) -> _Partial:
        """Joined with the attention of the next rows, which may see more keys; overwrites that."""
        same_keys = later.heads[:, : self.heads.shape[1]]
        if peak:
            torch.maximum(same_keys, self.heads, out=same_keys)
        else:
            same_keys.add_(self.heads)
        return _Partial(self.rows + later.rows, later.heads)


def _over_heads(
    heads: Tensor,
    call: AttentionCall,
    score: QueryScore,
) -> Tensor:
    """The sum over heads of attention `[heads, keys]`, weighted by the norm of each key's value with `value_norm`."""
    if not score.value_norm:
        return heads.sum(0)
    norm = torch.linalg.vector_norm(call.value[0].float(), dim=-1)
    grouped = heads.view(norm.shape[0], -1, norm.shape[1]).sum(1)
    return torch.sum(grouped * norm, dim=0)
