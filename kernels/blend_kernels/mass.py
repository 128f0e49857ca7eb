"""The public op `attention_mass` and its plain-torch twin."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from blend_kernels.attention_plain import capped_scores, last_keys
from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import (
    Mode,
    Reduce,
    Work,
    check_lse,
    check_positions,
    check_queries_and_keys,
    check_rule,
    check_sinks,
    join_sinks,
    require,
)
from blend_kernels.positions import Positions

# Scores in memory at once, in elements: 16 MiB of fp32.
MOST_SCORES = 1 << 22


@overload
def attention_mass(
    q: Tensor,
    k: Tensor,
    positions: Tensor | Positions,
    *,
    mode: Mode = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    lse: Tensor | None = ...,
    per_head: bool = ...,
    reduce: Reduce = ...,
    with_last: Literal[False] = ...,
    backend: Backend | None = ...,
) -> Tensor: ...


@overload
def attention_mass(
    q: Tensor,
    k: Tensor,
    positions: Tensor | Positions,
    *,
    mode: Mode = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    lse: Tensor | None = ...,
    per_head: bool = ...,
    reduce: Reduce = ...,
    with_last: Literal[True],
    backend: Backend | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention_mass(
    q: Tensor,
    k: Tensor,
    positions: Tensor | Positions,
    *,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    per_head: bool = False,
    reduce: Reduce = "sum",
    with_last: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that each key receives: softmax weights reduced over the given rows, and summed over heads unless `per_head`.

    The rows x keys weights are never in memory as a whole. The sum over keys is rows (times heads), less the sinks'
    share. With `lse` the keys are read once, without it twice.

    Args:
        q: queries; they and the arguments up to `sinks` are as in `selective_attention`.
        k: keys.
        positions: of the rows.
        mode: "exact" or "bottom-right".
        window: sliding window.
        softcap: of the scores.
        scale: of the scores.
        sinks: logits in the denominator; `lse` already has them.
        lse: the log-sum-exp that `selective_attention` returned for the same arguments, fp32 `[batch, heads, rows]`.
        per_head: return one number per head instead of their sum.
        reduce: "sum" adds the weights of all rows; "max" takes the largest weight of any row, in each head.
        with_last: also return the weights of the last row alone.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        fp32 `[batch, keys]`, or `[batch, heads, keys]` with `per_head`. With `with_last` a pair: that, and the same
        of the last row.

    Raises:
        ValueError: as `selective_attention`.
    """
    check_queries_and_keys(q, k)
    rule = check_rule(mode, window, softcap, scale, q, k)
    rows, shared = check_positions(positions, q, k)
    check_sinks(sinks, q)
    check_lse(lse, q)
    require(reduce in ("sum", "max"), f"reduce must be 'sum' or 'max', got {reduce!r}")
    work = Work(q, k, None, rows, rule, sinks, shared)
    backend = choose_attention_backend(backend, q, work.value_dim)
    masses = _masses(work, lse, reduce, with_last, backend)
    if not per_head:
        masses = masses.sum(2)
    return (masses[0], masses[1]) if with_last else masses[0]


def _masses(
    work: Work,
    lse: Tensor | None,
    reduce: Reduce,
    with_last: bool,
    backend: Backend,
) -> Tensor:
    """Per head, fp32 `[1, batch, heads, keys]`, or `[2, ...]` with the last row."""
    if work.q.numel() == 0:
        return work.empty_masses(with_last).zero_()
    if backend == "triton":
        from blend_kernels.mass_kernel import launch_mass

        return launch_mass(work, lse, reduce, with_last)
    return attention_mass_plain(work, lse, reduce, with_last)


@torch.no_grad()
def attention_mass_plain(
    work: Work,
    lse: Tensor | None,
    reduce: Reduce,
    with_last: bool,
) -> Tensor:
    """Weights of checked arguments per head: reduced over rows, and with `with_last` those of the last row.

    The host reads positions on a CPU only; elsewhere it would wait for the device in every layer.
    """
    # products of half precision would round every score before the softmax
    wide = torch.promote_types(work.q.dtype, torch.float32)
    masses = work.empty_masses(with_last).zero_()
    rows = work.q.shape[2]
    for batch, last in last_keys(work):
        q = work.q[batch]
        k = work.k[batch].to(wide)
        scores_of_row = q.shape[0] * q.shape[1] * k.shape[2]
        step = max(1, MOST_SCORES // max(1, scores_of_row))
        for start in range(0, rows, step):
            block = slice(start, min(start + step, rows))
            block_lse = None if lse is None else lse[batch, :, block]
            weights = _weights(q[:, :, block].to(wide), k, last, block, work, block_lse)
            _reduce_rows(weights, reduce, masses[0, batch])
        if with_last:
            masses[1, batch, :, : weights.shape[3]] = weights[:, :, -1]
    return masses


def _weights(
    q: Tensor,
    k: Tensor,
    last: Positions,
    block: slice,
    work: Work,
    lse: Tensor | None,
) -> Tensor:
    """Softmax weights of a block of rows.

    Args:
        q: queries of the block, `[batch, heads, rows, head_dim]`.
        k: keys.
        last: each row's last visible key, of all rows.
        block: which rows these are.
        work: the call.
        lse: of the block, `[batch, heads, rows]`; None if it is to be computed.

    Returns:
        `[batch, heads, rows, keys]`; on a CPU only of keys up to the last that one of the rows sees.
    """
    batch, heads, rows, dim = q.shape
    rule = work.rule
    stop = last.ends[block.stop - 1] + 1 if q.device.type == "cpu" else k.shape[2]
    folded = q.reshape(batch, k.shape[1], -1, dim)
    scores = capped_scores(folded, k[:, :, :stop], rule.scale, rule.softcap)
    scores = scores.view(batch, heads, rows, stop)
    hidden = last.hidden(block, slice(0, stop), rule.window)
    scores.masked_fill_(hidden, float("-inf"))
    if lse is not None:
        return scores.sub_(lse[..., None]).exp_()
    weights = scores.softmax(-1)
    if work.sinks is not None:
        lse = scores.logsumexp(-1)
        share = (lse - join_sinks(lse, work.sinks)).exp_()
        weights.mul_(share[..., None])
    return weights


def _reduce_rows(
    weights: Tensor,
    reduce: Reduce,
    mass: Tensor,
) -> None:
    """Add the weights of a block of rows to the mass `[batch, heads, keys]`, or take the larger."""
    visible = mass[:, :, : weights.shape[3]]
    if reduce == "max":
        torch.maximum(visible, weights.amax(2), out=visible)
    else:
        visible += weights.sum(2)
