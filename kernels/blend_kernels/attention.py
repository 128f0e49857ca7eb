"""The public `selective_attention`."""

from __future__ import annotations

from torch import Tensor

from blend_kernels.attention_plain import selective_attention_plain
from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import check_positions, check_queries, check_sinks, check_values, checked_rule
from blend_kernels.positions import Positions
from blend_kernels.work import Work, empty_results


def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of rows at given positions over all keys, without a mask in memory. No gradient flows.

    Args:
        q: `[batch, heads, rows, head_dim]`. All tensors may have any strides with a contiguous last dimension.
        k: `[batch, kv_heads, keys, head_dim]`; heads is a multiple of kv_heads. Views of a larger buffer are not copied.
        v: `[batch, kv_heads, keys, value_dim]`.
        positions: of the rows; row r sees keys `j <= positions[r]`. Calls that have the same rows share the object.
        window: W hides keys `j <= positions[r] - W` (transformers' sliding window).
        softcap: c replaces scaled scores s by `c tanh(s / c)`.
        scale: of the scores; by default `head_dim ** -0.5`.
        sinks: `[heads]`, one logit per head that joins the denominator only (GPT-OSS).
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        `[batch, heads, rows, value_dim]` in q's dtype over memory `[batch, rows, heads, value_dim]`, and the natural
        log-sum-exp of the visible scores (sinks included), fp32 `[batch, heads, rows]`.

    Raises:
        ValueError: wrong shapes, dtypes, devices or options, a last dimension that is not contiguous, an unknown backend or
            one that cannot compute this. Positions that do not ascend or lie outside the keys, where plain torch runs on a
            CPU; for kernels only with `KVBLEND_KERNEL_CHECKS=1`.
    """
    check_queries(q, k)
    check_values(v, k)
    check_sinks(sinks, q)
    rule = checked_rule(window, softcap, scale, q.shape[3])
    chosen = choose_attention_backend(backend, q, v.shape[3])
    check_positions(positions, q, k.shape[2], chosen)
    return attend(Work(q, k, v, positions, rule, sinks), chosen)


def attend(work: Work, backend: Backend) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call."""
    if work.q.numel() == 0:
        return empty_results(work.q, work.value_dim)
    if backend == "triton":
        from blend_kernels.attention_launch import attend_tiles

        return attend_tiles(work)
    return selective_attention_plain(work)
