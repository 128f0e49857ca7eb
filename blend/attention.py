"""The attention of scattered rows inside a HuggingFace decoder; the only importer of `blend_kernels`.

`row_attention` has the signature of transformers' `AttentionInterface`. The positions of the rows travel in a context
variable, because not every architecture passes keyword arguments of the forward pass on to its attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from blend.config import MaskMode
from blend.errors import UnsupportedModelError
from blend_kernels import kv_deviation, rotate_keys, selective_attention

__all__ = ["MaskMode", "RowsInFlight", "kv_deviation", "rotate_keys", "row_attention", "rows_in_flight"]


# Arguments of other attention kinds that would change the result; a model that passes one of them is refused.
_UNSUPPORTED = ("position_bias", "alibi", "block_mask", "head_mask")


@dataclass
class RowsInFlight:
    """What the running forward pass computes: sorted `positions` `[rows]` under a mask mode; changes when rows narrow."""

    positions: torch.Tensor
    mask: MaskMode = "exact"


_in_flight: ContextVar[RowsInFlight | None] = ContextVar("kvblend_rows_in_flight", default=None)


@contextmanager
def rows_in_flight(rows: RowsInFlight) -> Iterator[None]:
    """Make `rows` the ones that `row_attention` computes, in this thread and task only."""
    token = _in_flight.set(rows)
    try:
        yield
    finally:
        _in_flight.reset(token)


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query rows `[batch, heads, rows, head_dim]` over all keys `[batch, kv_heads, keys, head_dim]`.

    Returns `[batch, rows, heads, value_dim]` and no weights, as transformers expects.
    """
    rows = _in_flight.get()
    if rows is None:
        raise RuntimeError("row_attention runs only inside a kvblend forward pass")
    if attention_mask is not None or any(others.get(name) is not None for name in _UNSUPPORTED):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a mask or bias of its own to attention, which blended prefill cannot reproduce; "
            "use full prefill for this model"
        )
    out = selective_attention(
        query,
        key,
        value,
        rows.positions,
        mode=rows.mask,
        window=sliding_window,
        softcap=softcap,
        scale=scaling,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None
