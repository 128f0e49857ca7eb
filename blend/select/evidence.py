"""What selectors are shown that costs a pass of the decoder of its own: the question's attention, and the truth.

The decoder is handed in: selectors stand below it, so that a configuration can hold one without loading a model's code.
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

    With rows "sum" all that they give a row. With "peak" the most that any of them gives it in each head, and what the
    last of them gives it, which is where the answer starts; both count alike over the context. In sums, what one head seeks out
    drowns in what all its rows touch: the chunk that resembles the question takes the budget of the one that answers.

    uncached: positions of context rows that hold nothing yet, int64 `[rows]`: they get no part in it. The suffix rows' KV is
    written, and written again by the recompute. Raises `ConfigError` for layers that the decoder does not have.
    """
    scoring = QueryAttention(decoder, cache, layout, score, uncached)
    scoring.watch(decoder, cache, scoring.rows)
    return scoring.attention()


class QueryAttention:
    """`query_attention` for a scheduler: run the suffix with `observe`, at once or in ascending pieces; then `attention`.

    Each piece reads what those before it wrote, so a row's attention is what it is in one pass. Pieces are joined head by head:
    until the last one, that of every scored layer is held, fp32 `[heads, rows of the prompt]`.

    rows: positions of the suffix. last_layer: that is looked at.
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
        self._held: dict[int, _Held] = {}
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
        """Observe these rows in a separate pass, which ends with the last scored layer. await_layer: see `RowRequest`."""
        decoder.watch_attention(
            self.ids_of(rows), rows, cache, self.observe, last_layer=self.last_layer, await_layer=await_layer
        )

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Their token ids, `[1, rows]`."""
        return self._ids[:, rows - self._layout.context.stop]

    def observe(self, call: AttentionCall) -> None:
        """Take in the attention of a layer."""
        if call.layer not in self._layers:
            return
        peak = self._score.rows == "peak"
        heads = call.mass(per_head=True, reduce="max" if peak else "sum")[0]
        before = self._held.pop(call.layer, _Held(0, heads[:, :0]))
        seen = before.joined(heads, call.query.shape[2], peak=peak)
        if seen.rows < self.rows.shape[0]:
            self._held[call.layer] = seen
            return
        self._scored.append(_over_heads(seen.heads, call, self._score))
        if peak:
            end = replace(call, query=call.query[:, :, -1:], positions=call.positions[-1:])
            self._ends.append(_over_heads(end.mass(per_head=True)[0], call, self._score))

    def attention(self) -> torch.Tensor:
        """Of all scored layers, see `query_attention`."""
        attention = torch.stack(self._scored)
        if self._ends:
            last, context = torch.stack(self._ends), slice(self._layout.context.start, self._layout.context.stop)
            attention += last * (attention[:, context].sum() / last[:, context].sum().clamp_min(1e-20))
        return attention


def true_weight(decoder: RowDecoder, cache: BlendedCache, layout: PromptLayout) -> torch.Tensor:
    """How much each row's stored KV costs the question, from a full prefill, fp32 `[rows of the prompt]`.

    Over all layers, the attention that the suffix rows give the row under full recompute, times how far its stored KV is from
    the recomputed: the norm of the difference, keys and values each relative to the layer's mean squared norm.
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


class _Held(NamedTuple):
    """What each key received of the first `rows` rows of the suffix, in each head: `[heads, keys]`."""

    rows: int
    heads: torch.Tensor

    def joined(self, heads: torch.Tensor, rows: int, *, peak: bool) -> _Held:
        """With that of the next rows, which may see more keys; written over it."""
        known = heads[:, : self.heads.shape[1]]
        torch.maximum(known, self.heads, out=known) if peak else known.add_(self.heads)
        return _Held(self.rows + rows, heads)


def _over_heads(heads: torch.Tensor, call: AttentionCall, score: QueryScore) -> torch.Tensor:
    """What each key receives in a head `[heads, keys]`, summed over heads; weighted by the norm of its value if so wanted."""
    if not score.value_norm:
        return heads.sum(0)
    norm = torch.linalg.vector_norm(call.value[0].float(), dim=-1)
    grouped = heads.view(norm.shape[0], -1, norm.shape[1]).sum(1)
    return torch.sum(grouped * norm, dim=0)
