"""The public op `attention_mass` and its plain-torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from blend_kernels.attention import attend
from blend_kernels.attention_plain import capped_scores
from blend_kernels.backend import Backend, choose_attention_backend
from blend_kernels.checks import check_lse, check_positions, check_queries, check_sinks, checked_rule
from blend_kernels.positions import Positions
from blend_kernels.work import Work, join_sinks

# Scores in memory at once, in elements: 16 MiB of fp32.
MOST_SCORES = 1 << 22


def attention_mass(
    q: Tensor,
    k: Tensor,
    positions: Positions,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    peak: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Attention that each key receives in each head: softmax weights reduced over the given rows.

    The rows x keys weights are never in memory as a whole. The sum over keys is the number of rows, less the sinks'
    share. With `lse` the keys are read once, without it twice.

    Args:
        q: queries; they and the arguments up to `sinks` are as in `selective_attention`.
        k: keys.
        positions: of the rows.
        window: sliding window.
        softcap: of the scores.
        scale: of the scores.
        sinks: logits in the denominator; `lse` already has them.
        lse: the log-sum-exp that `selective_attention` returned for the same arguments, fp32 `[batch, heads, rows]`.
        peak: take the largest weight of any row instead of the sum, and the weight of the last row as well.
        backend: "triton" or "torch"; None chooses by device.

    Returns:
        fp32 `[1, batch, heads, keys]`; with `peak` `[2, ...]`, the largest weights and those of the last row.

    Raises:
        ValueError: as `selective_attention`, and a wrong `lse`.
    """
    check_queries(q, k)
    check_sinks(sinks, q)
    if lse is not None:
        check_lse(lse, q)
    rule = checked_rule(window, softcap, scale, q.shape[3])
    chosen = choose_attention_backend(backend, q, q.shape[3])
    check_positions(positions, q, k.shape[2], chosen)
    work = Work(q, k, k, positions, rule, sinks)
    if q.numel() == 0:
        return work.empty_masses(peak).zero_()
    if chosen == "torch":
        return attention_mass_plain(work, lse, peak)
    from blend_kernels.mass_kernel import launch_mass

    if lse is None:
        _, lse = attend(work, "triton")
    return launch_mass(work, lse, peak)


@torch.no_grad()
def attention_mass_plain(work: Work, lse: Tensor | None, peak: bool) -> Tensor:
    """As `attention_mass`.

    The host reads positions on a CPU only; elsewhere it would wait for the device in every layer.
    """
    # products of half precision would round every score before the softmax
    wide = torch.promote_types(work.q.dtype, torch.float32)
    work = work._replace(q=work.q.to(wide), k=work.k.to(wide))
    masses = work.empty_masses(peak).zero_()
    batch, heads, rows, _ = work.q.shape
    scores_of_row = batch * heads * work.k.shape[2]
    step = max(1, MOST_SCORES // scores_of_row)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        weights = _weights(work, block, lse)
        mass = masses[0, ..., : weights.shape[3]]
        if peak:
            torch.maximum(mass, weights.amax(2), out=mass)
            masses[1, ..., : weights.shape[3]] = weights[:, :, -1]
        else:
            mass += weights.sum(2)
    return masses


def _weights(work: Work, block: slice, lse: Tensor | None) -> Tensor:
    """Softmax weights of a block of rows, `[batch, heads, rows, keys]`; on a CPU only of keys that one of the rows sees."""
    q = work.q[:, :, block]
    rule = work.rule
    batch, heads, rows, dim = q.shape
    _, kv_heads, stop, _ = work.k.shape
    if q.device.type == "cpu":
        stop = work.positions.ends[block.stop - 1] + 1
    folded = q.reshape(batch, kv_heads, -1, dim)
    keys = work.k[:, :, :stop]
    scores = capped_scores(folded, keys, rule.scale, rule.softcap)
    scores = scores.view(batch, heads, rows, stop)
    hidden = work.positions.hidden(block, slice(0, stop), rule.window)
    scores.masked_fill_(hidden, float("-inf"))
    if lse is not None:
        return scores.sub_(lse[:, :, block, None]).exp_()
    weights = scores.softmax(-1)
    if work.sinks is not None:
        of_block = scores.logsumexp(-1)
        share = (of_block - join_sinks(of_block, work.sinks)).exp_()
        weights.mul_(share[..., None])
    return weights
