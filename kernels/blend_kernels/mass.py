"""The public op `attention_mass` and its plain-torch twin."""

from __future__ import annotations

import torch

from blend_kernels.attention_plain import capped_scores, last_keys
from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import (
    Mode,
    Reduce,
    Work,
    check_positions,
    check_queries_and_keys,
    check_rule,
    check_sinks,
    join_sinks,
    require,
)

# Scores in memory at once, in elements: 16 MiB of fp32.
MOST_SCORES = 1 << 22


@torch.no_grad()
def attention_mass_plain(work: Work, reduce: Reduce) -> torch.Tensor:
    """Weights reduced over rows, fp32 `[batch, heads, keys]`, of checked arguments."""
    # products of half precision would round every score before the softmax
    wide = torch.promote_types(work.q.dtype, torch.float32)
    q, k = work.q, work.k
    mass = torch.zeros(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
    for batch, last in last_keys(work):
        part, keys, into = q[batch], k[batch].to(wide), mass[batch]
        step = max(1, MOST_SCORES // max(1, part.shape[0] * part.shape[1] * k.shape[2]))
        for start in range(0, q.shape[2], step):
            stop = min(start + step, q.shape[2])
            _add_rows(part[:, :, start:stop].to(wide), keys, last[start:stop], work, reduce, into)
    return mass


def _add_rows(
    q: torch.Tensor, k: torch.Tensor, last: torch.Tensor, work: Work, reduce: Reduce, mass: torch.Tensor
) -> None:
    (batch, heads, rows, dim), rule = q.shape, work.rule
    stop = int(last[-1]) + 1
    folded = q.reshape(batch, k.shape[1], -1, dim)
    scores = capped_scores(folded, k[:, :, :stop], rule.scale, rule.softcap).view(batch, heads, rows, stop)
    key = torch.arange(stop, device=q.device)
    hidden = key > last[:, None]
    if rule.window is not None:
        hidden |= key <= last[:, None] - rule.window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    if work.sinks is not None:
        lse = scores.logsumexp(-1)
        weights.mul_((lse - join_sinks(lse, work.sinks)).exp_()[..., None])
    seen = mass[:, :, :stop]
    if reduce == "max":
        torch.maximum(seen, weights.amax(2), out=seen)
    else:
        seen += weights.sum(2)


def attention_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    *,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    per_head: bool = False,
    reduce: Reduce = "sum",
    check: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention that each key receives: softmax weights summed over the given rows, and over heads unless `per_head`.

    The rows x keys weights are never in memory as a whole. The sum over keys is rows (times heads), less the sinks'
    share.

    Args:
        q: queries; they and the arguments up to `sinks` are as in `selective_attention`.
        k: keys.
        positions: of the rows.
        mode: "exact" or "bottom-right".
        window: sliding window.
        softcap: of the scores.
        scale: of the scores.
        sinks: logits in the denominator.
        per_head: return one number per head instead of their sum.
        reduce: "sum" adds the weights of all rows; "max" takes the largest weight of any row, in each head.
        check: check positions on a GPU too.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        fp32 `[batch, keys]`, or `[batch, heads, keys]` with `per_head`.

    Raises:
        ValueError: as `selective_attention`.
    """
    check_queries_and_keys(q, k)
    rule = check_rule(mode, window, softcap, scale, q, k)
    check_positions(positions, q.shape[0], q.shape[2], k.shape[2], q, check or not q.is_cuda)
    check_sinks(sinks, q)
    require(reduce in ("sum", "max"), f"reduce must be 'sum' or 'max', got {reduce!r}")
    work = Work(q, k, None, positions, rule, sinks)
    if q.numel() == 0:
        mass = torch.zeros(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
    elif choose_attention_backend(work, backend) == "triton":
        from blend_kernels.attention_launch import choose_tile
        from blend_kernels.mass_kernel import launch_mass

        mass = launch_mass(work, choose_tile(work), per_head, reduce)
    else:
        mass = attention_mass_plain(work, reduce)
    return mass if per_head else mass.sum(1)
