"""The public `selective_attention`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from blend_kernels.attention_plain import selective_attention_plain
from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import (
    Mode,
    Work,
    check_positions,
    check_queries_and_keys,
    check_rule,
    check_sinks,
    check_values,
)
from blend_kernels.positions import Positions


@overload
def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | Positions,
    *,
    mode: Mode = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: Backend | None = ...,
) -> Tensor: ...


@overload
def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | Positions,
    *,
    mode: Mode = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    backend: Backend | None = ...,
) -> tuple[Tensor, Tensor]: ...


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | Positions,
    *,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of rows at given positions over all keys, without a mask in memory. No gradient flows.

    Args:
        q: `[batch, heads, rows, head_dim]`. All tensors may have any strides with a contiguous last dimension.
        k: `[batch, kv_heads, keys, head_dim]`; heads is a multiple of kv_heads. Views of a larger buffer are not copied.
        v: `[batch, kv_heads, keys, value_dim]`.
        positions: int64 `[rows]` or `[batch, rows]`, ascending, on the device of q; a `Positions` if many calls share them.
        mode: "exact": row r sees keys `j <= positions[r]`. "bottom-right": `j <= r + keys - rows`, FlashAttention's causal
            alignment, which is exact only for a contiguous suffix.
        window: W hides keys `j <= last - W` (transformers' sliding window).
        softcap: c replaces scaled scores s by `c tanh(s / c)`.
        scale: of the scores; by default `head_dim ** -0.5`.
        sinks: `[heads]`, one logit per head that joins the denominator only (GPT-OSS).
        return_lse: also return the log-sum-exp, for `attention_mass`.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        `[batch, heads, rows, value_dim]` in q's dtype over memory `[batch, rows, heads, value_dim]`. With `return_lse` also the
        natural log-sum-exp of the visible scores (sinks included), fp32 `[batch, heads, rows]`.

    Raises:
        ValueError: wrong shapes, dtypes or devices; on a CPU also unsorted or out-of-range positions.
    """
    check_queries_and_keys(q, k)
    check_values(v, k)
    rule = check_rule(mode, window, softcap, scale, q, k)
    rows, shared = check_positions(positions, q, k)
    check_sinks(sinks, q)
    work = Work(q, k, v, rows, rule, sinks, shared)
    backend = choose_attention_backend(backend, q, work.value_dim)
    out, lse = attend(work, return_lse, backend)
    return (out, lse) if return_lse else out


def attend(
    work: Work,
    want_lse: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of checked arguments; the latter may be unset unless wanted."""
    if work.q.numel() == 0:
        return work.empty_out(), work.empty_lse()
    if backend == "triton":
        from blend_kernels.attention_launch import attend_values

        return attend_values(work, want_lse)
    return selective_attention_plain(work)
