"""`attention_mass` in plain torch: weights of a bounded block of rows at a time, summed and dropped."""

from __future__ import annotations

import torch

from blend_kernels.attention_plain import capped_scores, last_keys
from blend_kernels.checks import Reduce
from blend_kernels.work import Work, join_sinks

# Scores in memory at once, in elements: 16 MiB of fp32.
_MOST_SCORES = 1 << 22


@torch.no_grad()
def attention_mass_plain(work: Work, reduce: Reduce) -> torch.Tensor:
    """Weights joined over rows, fp32 `[batch, heads, keys]`; arguments are checked."""
    # products of half precision would round every score before the softmax
    wide = torch.promote_types(work.q.dtype, torch.float32)
    q, k = work.q, work.k
    mass = torch.zeros(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
    for batch, last in last_keys(work):
        part, keys, into = q[batch], k[batch].to(wide), mass[batch]
        step = max(1, _MOST_SCORES // max(1, part.shape[0] * part.shape[1] * k.shape[2]))
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
