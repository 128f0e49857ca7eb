"""The attention of scattered rows inside a HuggingFace decoder.

`row_attention` has the signature of transformers' `AttentionInterface`. The positions of the rows travel in a context
variable, because not every architecture passes keyword arguments of the forward pass on to its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch

from blend.config import MaskMode
from blend.errors import UnsupportedModelError
from blend_kernels import attention_mass, selective_attention

# Arguments of other attention kinds that would change the result; a model that passes one of them is refused.
_UNSUPPORTED = ("position_bias", "alibi", "block_mask", "head_mask")


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention as the model asks for it.

    query `[batch, heads, rows, head_dim]`, key and value `[batch, kv_heads, keys, head_dim]`; row r sees keys up to
    `positions[r]`, and with a window only the last `window` of them. sinks: `[heads]`, logits that take part of the
    attention and give nothing.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    mask: MaskMode
    window: int | None
    softcap: float | None
    scale: float | None
    sinks: torch.Tensor | None = None

    def mass(self, *, per_head: bool = False, reduce: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Attention that each key receives from all rows, fp32 `[batch, keys]`, or `[batch, heads, keys]`.

        reduce: over rows; with "max" the most that a single one of them gives.
        """
        return attention_mass(
            self.query,
            self.key,
            self.positions,
            mode=self.mask,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            sinks=self.sinks,
            per_head=per_head,
            reduce=reduce,
        )


@dataclass
class RowsInFlight:
    """What the running forward pass computes: sorted `positions` `[rows]` under a mask mode; changes when rows narrow.

    observe: called with every layer's attention before it is computed; what it raises ends the forward pass.
    """

    positions: torch.Tensor
    mask: MaskMode = "exact"
    observe: Callable[[AttentionCall], None] | None = None


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
    if rows.observe is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module of transformers has one
        rows.observe(
            AttentionCall(layer, query, key, value, rows.positions, rows.mask, sliding_window, softcap, scaling, s_aux)
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
