"""The dense reference: blended prefill by definition, through the model's own forward pass over all rows.

No row is left out, no mask is ours, nothing of the engine is used. A cache replaces the keys and values of rows that are not
recomputed by given ones; what the other rows then compute is the blended prefill, because a row sees others only through them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

from blend.model.cache import cache_argument

LayerKV = tuple[torch.Tensor, torch.Tensor]


class Dense(NamedTuple):
    """Logits of all rows `[rows, vocab]`, and keys and values of every layer `[1, kv_heads, rows, head_dim]`."""

    logits: torch.Tensor
    layers: tuple[LayerKV, ...]


class _SubstitutingLayer(DynamicLayer):
    """Keeps every row, whatever the layer's window; replaces the rows where `fresh` `[rows]` is False."""

    def __init__(self, stored: LayerKV | None = None, fresh: torch.Tensor | None = None) -> None:
        super().__init__()
        self.stored, self.fresh = stored, fresh

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> LayerKV:
        if self.stored is not None:
            take = self.fresh[:, None]
            keys, values = (torch.where(take, new, old) for new, old in zip((keys, values), self.stored, strict=True))
        return super().update(keys, values)


@torch.inference_mode()
def dense_prefill(model: Any, ids: Sequence[int], *, start: int = 0, mask: torch.Tensor | None = None) -> Dense:
    """Full recompute at positions `start...`; every row's KV, also where a window is shorter."""
    return _forward(model, ids, [_SubstitutingLayer() for _ in range(_depth(model))], start, mask)


@torch.inference_mode()
def dense_blend(
    model: Any,
    ids: Sequence[int],
    stored: Sequence[LayerKV],
    rows_by_layer: Sequence[torch.Tensor],
    mask: torch.Tensor | None = None,
) -> Dense:
    """Fresh KV at the rows that each layer computes, `stored` KV at the others."""
    layers = []
    for kv, rows in zip(stored, rows_by_layer, strict=True):
        fresh = torch.zeros(len(ids), dtype=torch.bool)
        fresh[rows] = True
        layers.append(_SubstitutingLayer(kv, fresh))
    return _forward(model, ids, layers, 0, mask)


def dense_chunk(model: Any, prefix: Sequence[int], chunk: Sequence[int], at: int) -> tuple[LayerKV, ...]:
    """What reuse should put at position `at`: the chunk's KV computed after its prefix, both moved there.

    Attention depends on distances only: shifting the positions of prefix and chunk together turns the keys and changes nothing
    else, so the model itself does the repositioning.
    """
    out = dense_prefill(model, [*prefix, *chunk], start=at - len(prefix))
    return tuple((k[:, :, len(prefix) :], v[:, :, len(prefix) :]) for k, v in out.layers)


def dense_reuse(model: Any, prefix: Sequence[int], chunks: Sequence[Sequence[int]], suffix: int) -> list[LayerKV]:
    """KV of a prompt before any recompute: exact prefix, repositioned chunks, NaN for `suffix` rows that are not known."""
    parts = [dense_prefill(model, prefix).layers]
    at = len(prefix)
    for chunk in chunks:
        parts.append(dense_chunk(model, prefix, chunk, at))
        at += len(chunk)
    unknown = tuple(
        tuple(torch.full_like(t[:, :, :1], torch.nan).expand(-1, -1, suffix, -1) for t in kv) for kv in parts[0]
    )
    return [
        (torch.cat([p[index][0] for p in (*parts, unknown)], 2), torch.cat([p[index][1] for p in (*parts, unknown)], 2))
        for index in range(_depth(model))
    ]


# Of the largest entry. Two computations in bfloat16 round differently by up to 2^-8 in each of some ten steps of four layers.
_TOLERANCE = {torch.float64: 5e-5, torch.float32: 5e-5, torch.bfloat16: 0.05}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Within `tolerance` of the largest expected entry, by default that of the dtype; NaN is never close."""
    tolerance = _TOLERANCE[expected.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(expected.abs().max().item(), 1e-3))


def assert_dense(logits: torch.Tensor, layers: Iterable[LayerKV], dense: Dense, tolerance: float | None = None) -> None:
    """The last row's logits `[1, vocab]`, and the keys and values of every row and layer."""
    assert_close(logits[0], dense.logits[-1], tolerance)
    for got, expected in zip(layers, dense.layers, strict=True):
        for part, wanted in zip(got, expected, strict=True):
            assert_close(part, wanted, tolerance)


def _depth(model: Any) -> int:
    """Layers that keep KV; the last ones may read that of others."""
    return int(model.config.num_hidden_layers) - int(getattr(model.config, "num_kv_shared_layers", 0))


def _forward(
    model: Any, ids: Sequence[int], layers: list[_SubstitutingLayer], start: int, mask: torch.Tensor | None
) -> Dense:
    cache = Cache(layers=layers)
    out = model(
        input_ids=torch.tensor([list(ids)]),
        position_ids=torch.arange(start, start + len(ids))[None],
        attention_mask=mask,
        use_cache=True,
        **{cache_argument(model): cache},
    )
    return Dense(out.logits[0], tuple((layer.keys, layer.values) for layer in layers))
