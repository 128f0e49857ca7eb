"""The public `decode_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from blend_kernels.attention import selective_attention
from blend_kernels.attention_bfloat16 import pays_off
from blend_kernels.attention_plain import attend_every_key, fuses
from blend_kernels.checks import check_queries, check_values, checked_rule
from blend_kernels.positions import Positions


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Attention of one row that sees all keys, as in a step of decoding on a CPU.

    It equals `selective_attention` of a row at the last key's position, whose way to rows and keys takes nearly as long there
    as the attention itself.

    Args:
        q: `[batch, heads, 1, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`; heads is a multiple of kv_heads.
        v: `[batch, kv_heads, keys, value_dim]`.
        window: the row sees so many keys at the end; None for all.
        scale: of the scores; by default `head_dim ** -0.5`.

    Returns:
        `[batch, heads, 1, value_dim]` in q's dtype.

    Raises:
        ValueError: more rows than one, or as `selective_attention`.
    """
    check_queries(q, k)
    check_values(v, k)
    if q.shape[2] != 1:
        raise ValueError(f"q must have one row, got {q.shape[2]}; use selective_attention")
    rule = checked_rule(window, None, scale, q.shape[3])
    if pays_off(q, k) or not fuses(q, k, v):
        keys = k.shape[2]
        last = Positions(torch.arange(keys - 1, keys, device=k.device))
        out, _ = selective_attention(q, k, v, last, window=window, scale=scale)
        return out
    if window is not None:
        k = k[:, :, -window:]
        v = v[:, :, -window:]
    out, _ = attend_every_key(q, k, v, rule.scale)
    return out.flatten(1, 2)
