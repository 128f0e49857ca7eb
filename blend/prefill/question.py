"""Evidence of selectors that costs a pass of the decoder: the question's attention, or the deviation from full recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from blend.model.attention import AttentionCall
from blend.model.cache import Run
from blend.select import QueryScore
from blend.select.base import scoring_layers

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import RowDecoder
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

    Raises:
        ConfigError: a scored layer that the decoder lacks.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        cache: BlendedCache,
        layout: PromptLayout,
        score: QueryScore,
        uncached: torch.Tensor | None = None,
        also: Rows | None = None,
    ) -> None:
        self._layers = scoring_layers(score.layers, decoder.attending)
        self._decoder, self._cache, self._layout, self._score = decoder, cache, layout, score
        self._scored, self._ends = list[torch.Tensor](), list[torch.Tensor]()
        self._partial: dict[int, _Partial] = {}
        self.last_layer = self._layers[-1]
        suffix = np.arange(layout.context.stop, layout.rows)
        self._suffix_rows = len(suffix)
        self.rows = Run.on_host(suffix if also is None else np.concatenate((also, suffix)), decoder.device)
        self._also = self.rows.rows - self._suffix_rows
        self._seen: dict[int, int] = {}  # rows of each layer
        if uncached is not None:
            cache.blank(uncached)

    def watch(self, rows: Run, await_layer: Callable[[int], None] | None = None) -> None:
        """Observe these rows in one pass, which ends with the last scored layer. await_layer: see `RowRequest`."""
        ids = torch.tensor([self._layout.token_ids], device=self._decoder.device)[:, rows.positions]
        self._decoder.watch_attention(
            ids, rows, self._cache, self.observe, last_layer=self.last_layer, await_layer=await_layer
        )

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
        heads, last = call.peak_and_last() if peak else (call.mass(per_head=True), None)
        heads = heads[0]
        before = self._partial.pop(call.layer, _Partial(0, heads[:, :0]))
        seen = before.joined(heads, call.query.shape[2], peak=peak)
        if seen.rows < self._suffix_rows:
            self._partial[call.layer] = seen
            return
        self._scored.append(_over_heads(seen.heads, call, self._score))
        if last is not None:
            self._ends.append(_over_heads(last[0], call, self._score))

    def attention(self) -> torch.Tensor:
        """Attention of all scored layers, fp32 `[scored layers, rows of the prompt]`."""
        attention = torch.stack(self._scored)
        if self._ends:
            last, context = torch.stack(self._ends), slice(self._layout.context.start, self._layout.context.stop)
            attention += last * (attention[:, context].sum() / last[:, context].sum().clamp_min(1e-20))
        return attention


def true_weight(decoder: RowDecoder, cache: BlendedCache, layout: PromptLayout) -> torch.Tensor:
    """How much each row's stored KV costs the question, from a full prefill, fp32 `[rows of the prompt]`.

    The sum over layers of the suffix rows' attention under full recompute, times the norm of the difference of stored and
    recomputed KV, keys and values each relative to the layer's mean squared norm.
    """
    exact, mass = decoder.new_cache(layout.rows), list[torch.Tensor]()
    suffix = layout.rows - layout.context.stop

    def observe(call: AttentionCall) -> None:
        mass.append(call.of_last_rows(suffix).mass()[0])

    every = Run.consecutive(0, layout.rows, decoder.device)
    decoder.watch_attention(torch.tensor([layout.token_ids], device=decoder.device), every, exact, observe)
    weight = torch.zeros(layout.rows, device=decoder.device)
    for layer, attention in enumerate(mass):
        far = torch.zeros_like(weight)
        for true, stored in zip(exact.view(layer), cache.view(layer), strict=True):
            size = true[0].float().square().sum((0, 2)).mean()
            far += (true - stored)[0].float().square().sum((0, 2)) / size
        weight += attention * far.sqrt()
    return weight


class _Partial(NamedTuple):
    """Attention per head that each key received from the first `rows` rows of the suffix, `[heads, keys]`."""

    rows: int
    heads: torch.Tensor

    def joined(self, heads: torch.Tensor, rows: int, *, peak: bool) -> _Partial:
        """Joined with the attention of the next rows, which may see more keys; overwrites `heads`."""
        if not self.rows:
            return _Partial(rows, heads)
        known = heads[:, : self.heads.shape[1]]
        torch.maximum(known, self.heads, out=known) if peak else known.add_(self.heads)
        return _Partial(self.rows + rows, heads)


def _over_heads(heads: torch.Tensor, call: AttentionCall, score: QueryScore) -> torch.Tensor:
    """The sum over heads of attention `[heads, keys]`, weighted by the norm of each key's value with `value_norm`."""
    if not score.value_norm:
        return heads.sum(0)
    norm = torch.linalg.vector_norm(call.value[0].float(), dim=-1)
    grouped = heads.view(norm.shape[0], -1, norm.shape[1]).sum(1)
    return torch.sum(grouped * norm, dim=0)
