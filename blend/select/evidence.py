"""Evidence that costs its own pass of the decoder: the question's attention, and the deviation from full recompute.

The decoder is a parameter: a configuration can hold a selector without loading a model's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.select.base import QueryScore, scoring_layers

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import RowDecoder
    from blend.model.forward import AttentionCall
    from blend.types import PromptLayout


def query_attention(
    decoder: RowDecoder,
    cache: BlendedCache,
    layout: PromptLayout,
    score: QueryScore,
    uncached: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the suffix rows over the stored caches, summed over heads, fp32 `[scored layers, rows of the prompt]`.

    rows="sum": the attention of all suffix rows. rows="peak": in each head the largest attention of any suffix row, plus that
    of the last row, where the answer starts; both weigh the same. A sum favours the chunk that resembles the
    question over the one that answers it.

    uncached: positions of context rows without stored KV, int64 `[rows]`; they are blanked. The suffix rows' KV is written; the
    recompute overwrites it. Raises `ConfigError` for layers that the decoder does not have.
    """
    scoring = QueryAttention(decoder, cache, layout, score, uncached)
    scoring.watch(decoder, cache, scoring.rows)
    return scoring.attention()


class QueryAttention:
    """`query_attention` for a scheduler: run the suffix with `observe`, at once or in ascending pieces, then call `attention`.

    A row's attention does not depend on the pieces. Until the last piece, the attention of every scored layer is kept per head,
    fp32 `[heads, rows of the prompt]`.

    rows: positions of the suffix. last_layer: the last scored layer.
    """

    def __init__(
        self,
        decoder: RowDecoder,
        cache: BlendedCache,
        layout: PromptLayout,
        score: QueryScore,
        uncached: torch.Tensor | None = None,
    ) -> None:
        self._layers = scoring_layers(score.layers, len(decoder.layers))
        self._layout, self._score, self.last_layer = layout, score, self._layers[-1]
        self._scored, self._ends = list[torch.Tensor](), list[torch.Tensor]()
        self._partial: dict[int, _Partial] = {}
        if uncached is not None:
            cache.blank(uncached)
        self.rows = torch.arange(layout.context.stop, layout.rows, device=decoder.device)
        self._ids = torch.tensor([layout.suffix], device=decoder.device)

    def watch(
        self,
        decoder: RowDecoder,
        cache: BlendedCache,
        rows: torch.Tensor,
        await_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Observe these suffix rows in one pass, which ends with the last scored layer. await_layer: see `RowRequest`."""
        decoder.watch_attention(
            self.ids_of(rows), rows, cache, self.observe, last_layer=self.last_layer, await_layer=await_layer
        )

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Token ids of these suffix rows, `[1, rows]`."""
        return self._ids[:, rows - self._layout.context.stop]

    def observe(self, call: AttentionCall) -> None:
        """Add the attention of a layer."""
        if call.layer not in self._layers:
            return
        peak = self._score.rows == "peak"
        heads = call.mass(per_head=True, reduce="max" if peak else "sum")[0]
        before = self._partial.pop(call.layer, _Partial(0, heads[:, :0]))
        seen = before.joined(heads, call.query.shape[2], peak=peak)
        if seen.rows < self.rows.shape[0]:
            self._partial[call.layer] = seen
            return
        self._scored.append(_over_heads(seen.heads, call, self._score))
        if peak:
            end = replace(call, query=call.query[:, :, -1:], positions=call.positions[-1:])
            self._ends.append(_over_heads(end.mass(per_head=True)[0], call, self._score))

    def attention(self) -> torch.Tensor:
        """Attention of all scored layers, see `query_attention`."""
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
    suffix = slice(layout.context.stop, None)

    def observe(call: AttentionCall) -> None:
        of_suffix = replace(call, query=call.query[:, :, suffix], positions=call.positions[suffix])
        mass.append(of_suffix.mass()[0])

    every = torch.arange(layout.rows, device=decoder.device)
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
