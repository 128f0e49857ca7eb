"""Attention of rows in bfloat16 on CPUs that multiply bfloat16 fast, by plain products.

torch's fused attention multiplies bfloat16 no faster than float32, a quarter as fast as `torch.bmm` with AVX512_BF16.

A score in bfloat16 may be wrong by 2^-9 of its size, too much for large scores. So scores are computed twice: first for each
row's maximum, then less that maximum, which a column of ones subtracts inside the product. At a distance x below the maximum
the error of a weight is exp(-x) x 2^-9 at most, less than rounding the weights to bfloat16 costs anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Rows of one block: fewer cost more calls, more waste products on keys that they do not see (measured).
BLOCK = 64
# Pairs of a row and a key in one KV head below which the fused attention is faster (measured).
LEAST_PAIRS = 1 << 18


def multiplies_fast() -> bool:
    """Whether this CPU multiplies bfloat16 fast. With AMX, which torch's fused attention may use, it has not been measured."""
    return _cpu_supports("avx512_bf16") and not _cpu_supports("amx_tile")


def _cpu_supports(feature: str) -> bool:
    is_supported = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return is_supported is not None and bool(is_supported())


def pays_off(q: Tensor, k: Tensor) -> bool:
    """Whether attention of these, `[batch, heads, rows, head_dim]`, is faster here than in torch's fused attention."""
    group = q.shape[1] // k.shape[1]
    pairs = group * q.shape[2] * k.shape[2]
    return q.dtype == torch.bfloat16 and pairs >= LEAST_PAIRS and multiplies_fast()


def attend_bfloat16(q: Tensor, k: Tensor, v: Tensor, last: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of bfloat16 rows, each over the keys up to its last visible one.

    Args:
        q: `[batch, heads, rows, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`.
        v: `[batch, kv_heads, keys, value_dim]`.
        last: each row's last visible key, ascending int64 `[rows]`.
        scale: of the scores.

    Returns:
        Output `[batch, heads, rows, value_dim]` and fp32 log-sum-exp `[batch, heads, rows]`.
    """
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    value_dim = v.shape[3]
    groups = (batch * kv_heads, heads // kv_heads)
    ends = last.tolist()
    power = 2.0 ** math.floor(math.log2(scale))  # a power of two scales q without rounding
    zeros = q.new_zeros(batch, heads, rows, 1)
    ones = k.new_ones(*k.shape[:3], 1)
    queries = torch.cat((q * power, zeros), 3)
    queries = queries.view(*groups, rows, dim + 1)
    keys = torch.cat((k, ones), 3).flatten(0, 1)
    keys = keys.transpose(1, 2)
    values = v.flatten(0, 1)
    out = q.new_empty(*groups, rows, value_dim)
    lse = torch.empty(*groups, rows)
    # fresh pages for each product would cost as much as the product
    most_rows = min(BLOCK, rows)
    most_keys = ends[-1] + 1
    buffer = q.new_empty(heads * batch * most_rows * most_keys)
    for start in range(0, rows, BLOCK):
        block = slice(start, min(start + BLOCK, rows))
        stop_key = ends[block.stop - 1] + 1
        block_keys = keys[..., :stop_key]
        block_queries = queries[:, :, block].flatten(1, 2)
        most = _most(last[block], ends[start] + 1, stop_key)
        shape = (*block_queries.shape[:2], stop_key)
        weights = buffer[: math.prod(shape)].view(shape)
        peak = _score(block_queries, block_keys, most, weights).amax(-1)
        block_queries[..., -1] = -peak
        _score(block_queries, block_keys, most, weights)
        if scale != power:
            weights.mul_(scale / power)
        total = weights.exp_().sum(-1, dtype=torch.float32)
        block_out = torch.bmm(weights, values[:, :stop_key])
        block_out = block_out / total[..., None]
        out[:, :, block] = block_out.view(*groups, -1, value_dim)
        block_lse = peak.float() * (scale / power) + total.log()
        lse[:, :, block] = block_lse.view(*groups, -1)
    return out.view(batch, heads, rows, -1), lse.view(batch, heads, rows)


def _most(last: Tensor, first: int, stop: int) -> Tensor | None:
    """The largest score that keys `first` to `stop - 1` may have: minus infinity where a row of the block does not see them.

    `[rows, keys]`; None if the rows see all keys.
    """
    if first >= stop:
        return None
    hidden = torch.arange(first, stop) > last[:, None]
    return torch.where(hidden, -math.inf, math.inf).bfloat16()


def _score(queries: Tensor, keys: Tensor, most: Tensor | None, out: Tensor) -> Tensor:
    torch.bmm(queries, keys, out=out)
    if most is not None:
        rows, ragged_keys = most.shape
        by_row = out.view(len(out), -1, rows, out.shape[2])
        masked = by_row[..., -ragged_keys:]
        torch.minimum(masked, most, out=masked)  # a quarter of the time of `masked_fill_`
    return out
