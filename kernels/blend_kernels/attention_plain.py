"""`selective_attention` in plain torch: the CPU path, and the twin of the Triton kernel.

Sorted rows are cut into blocks. A block attends without a mask to the keys that all its rows see, and under a mask no
wider than the block's span to the ragged end. Partial results are merged by their log-sum-exp (online softmax, Milakov
and Gimelshein 2018). Query heads of one KV head are folded into rows, so keys are read once per group and never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blend_kernels.attention_bfloat16 import attend_bfloat16, pays_off
from blend_kernels.positions import Positions
from blend_kernels.work import Rule, Work, empty_results, join_sinks

# Rows of one block at most: beyond this a bigger matrix product gains nothing and its ragged part only grows.
_MOST_ROWS = 256
# Share of a block's visible pairs that may be wasted in any case: bigger products run faster by about as much (measured).
WASTED_SHARE = 0.05
# A run of neighbouring rows this long is cheaper as an is_causal square than as masked blocks.
_LONG_RUN = 256


class RowBlock(NamedTuple):
    """Rows `start` to `stop - 1`; `square` for neighbouring rows, long enough for a causal square."""

    start: int
    stop: int
    square: bool


class KeyRange(NamedTuple):
    """Keys `start` to `stop - 1`; `ragged` if some row of the block does not see all of them."""

    start: int
    stop: int
    ragged: bool


def row_blocks(last: Sequence[int], waste: int, squares: bool) -> list[RowBlock]:
    """Cut rows with last visible keys `last` (ascending) into blocks, and long runs into `squares` if asked.

    A block ends before its invisible (row, key) pairs, `sum(last of the block - last[r])`, exceed both `waste` and a
    share of its visible pairs. `waste` is the cost of one more block in calls.
    """
    blocks: list[RowBlock] = []
    start = 0
    runs = _long_runs(last) if squares else []
    for run_start, run_stop in runs:
        blocks += _scattered(last, start, run_start, waste)
        blocks.append(RowBlock(run_start, run_stop, True))
        start = run_stop
    return blocks + _scattered(last, start, len(last), waste)


def _long_runs(last: Sequence[int]) -> list[tuple[int, int]]:
    runs = []
    start = 0
    rows = len(last)
    while start + _LONG_RUN <= rows:
        stop = start + 1
        while stop < rows and last[stop] == last[stop - 1] + 1:
            stop += 1
        if stop - start >= _LONG_RUN:
            runs.append((start, stop))
        start = stop
    return runs


def _scattered(last: Sequence[int], start: int, stop: int, waste: int) -> list[RowBlock]:
    blocks: list[RowBlock] = []
    if start == stop:
        return blocks
    first = start
    wasted_pairs = 0
    visible_pairs = last[start]
    for row in range(start + 1, stop):
        wasted_pairs += (row - first) * (last[row] - last[row - 1])
        visible_pairs += last[row]
        if wasted_pairs > max(waste, WASTED_SHARE * visible_pairs) or row - first == _MOST_ROWS:
            blocks.append(RowBlock(first, row, False))
            first = row
            wasted_pairs = 0
            visible_pairs = last[row]
    blocks.append(RowBlock(first, stop, False))
    return blocks


def key_ranges(first_end: int, last_end: int, window: int | None) -> list[KeyRange]:
    """The keys visible to rows with last visible keys `first_end` to `last_end`. Every row sees a key of every range.

    Only the ends of the span are ragged; the middle needs no mask.
    """
    low = 0 if window is None else max(0, first_end - window + 1)
    full = 0 if window is None else max(0, last_end - window + 1)
    if full > low and full >= first_end:
        return [KeyRange(low, last_end + 1, True)]
    ranges = []
    middle = low
    if full > low:
        ranges.append(KeyRange(low, full + 1, True))
        middle = full + 1
    if last_end == first_end:
        ranges.append(KeyRange(middle, first_end + 1, False))
        return ranges
    if first_end > middle:
        ranges.append(KeyRange(middle, first_end, False))
    ranges.append(KeyRange(first_end, last_end + 1, True))
    return ranges


# Floating-point operations that take as long as the calls of one more block (measured on one AVX-512 core, 85 GFLOP/s).
_BLOCK_OVERHEAD = 12_000_000

# Private in torch; where it is gone, weights are materialised block by block instead. The public op returns no log-sum-exp,
# without which parts cannot be merged.
FUSED = "_scaled_dot_product_flash_attention_for_cpu"

# Scores in memory at once under a mask over all keys, in elements: 256 MiB of fp32.
MOST_SCORES = 1 << 26

# Keys of one piece at least, when keys are cut to keep several threads busy.
_LEAST_PIECE = 512

Partial = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Partial]


def fuses(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's fused CPU attention can compute attention of these, without a soft-cap."""
    return k.shape[3] == v.shape[3] and q.device.type == "cpu" and hasattr(torch.ops.aten, FUSED)


def attend_every_key(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Fused attention of rows that see all keys; results `[batch, kv_heads, group, rows(, value_dim)]`."""
    return _attend_folded(q, k, v, None, _fused(scale))


@torch.no_grad()
def selective_attention_plain(work: Work) -> Partial:
    """Output `[batch, heads, rows, value_dim]` and fp32 log-sum-exp `[batch, heads, rows]`.

    The host reads positions on a CPU only; elsewhere it would wait for the device in every layer.
    """
    out, lse = empty_results(work.q, work.value_dim)
    if work.q.device.type == "cpu":
        _attend_blocks(work, out, lse)
    else:
        attend_under_mask(work, out, lse)
    if work.sinks is not None:
        joined = join_sinks(lse, work.sinks)
        out.mul_((lse - joined).exp_()[..., None])
        lse.copy_(joined)
    return out, lse


def _attend_blocks(work: Work, out: Tensor, lse: Tensor) -> None:
    rule = work.rule
    positions = work.positions
    fused = rule.softcap is None and fuses(work.q, work.k, work.v)
    squares = fused and rule.window is None
    if squares and pays_off(work.q, work.k):
        out[...], lse[...] = attend_bfloat16(work.q, work.k, work.v, positions.values, rule.scale)
        return
    if not fused:
        work = _widened(work)
    attend = _fused(rule.scale) if fused else _materialised(rule)
    batch, heads, _, dim = work.q.shape
    flops_of_pair = 2 * batch * heads * (dim + work.value_dim)
    waste = max(1, _BLOCK_OVERHEAD // flops_of_pair)
    grouped = _grouped(work.q, work.k)
    grouped_out = out.view(*grouped, work.value_dim)
    grouped_lse = lse.view(grouped)
    key = ("blocks", waste, squares)
    for block in positions.shared(key, lambda: row_blocks(positions.ends, waste, squares)):
        attend_block = _square if block.square else _folded
        block_out, block_lse = attend_block(work, block, attend)
        grouped_out[..., block.start : block.stop, :] = block_out
        grouped_lse[..., block.start : block.stop] = block_lse


def _widened(work: Work) -> Work:
    """The same in at least fp32, because products of half precision would round every score before the softmax."""
    wide = torch.promote_types(work.q.dtype, torch.float32)
    visible = slice(work.positions.ends[-1] + 1)
    return work._replace(q=work.q.to(wide), k=work.k[:, :, visible].to(wide), v=work.v[:, :, visible].to(wide))


def attend_under_mask(work: Work, out: Tensor, lse: Tensor) -> None:
    """Attention under a mask over all keys: about twice the work, but the host reads no position.

    Args:
        work: the call.
        out: takes the output, `[batch, heads, rows, value_dim]`.
        lse: takes the log-sum-exp, `[batch, heads, rows]`.
    """
    last = work.positions.values
    window = work.rule.window
    batch, heads, n_rows, _ = work.q.shape
    keys = work.k.shape[2]
    wide = torch.promote_types(work.q.dtype, torch.float32)
    key = torch.arange(keys, device=last.device)
    visible = key <= last[-1]
    if window is not None:
        visible &= key > last[0] - window
    # what no row sees may be memory that nothing has written
    k = torch.where(visible[:, None], work.k.to(wide), 0.0)
    v = torch.where(visible[:, None], work.v.to(wide), 0.0)
    attend = _materialised(work.rule)
    step = max(1, MOST_SCORES // (batch * heads * keys))
    for start in range(0, n_rows, step):
        block = slice(start, start + step)
        positions = Positions(last[block])
        mask = positions.mask(slice(None), slice(0, keys), window, wide, work.group)
        q = work.q[:, :, block].to(wide)
        block_out, block_lse = _attend_folded(q, k, v, mask, attend)
        out[:, :, block] = block_out.flatten(1, 2)
        lse[:, :, block] = block_lse.flatten(1, 2)


def _folded(work: Work, block: RowBlock, attend: Attend) -> Partial:
    """One block with the query heads of a KV head folded into rows; results `[batch, kv_heads, group, rows(, value_dim)]`."""
    window = work.rule.window
    block_rows = slice(block.start, block.stop)
    q = work.q[:, :, block_rows]
    ends = work.positions.ends
    partials = []
    for key_range in key_ranges(ends[block.start], ends[block.stop - 1], window):
        keys = slice(key_range.start, key_range.stop)
        k = work.k[:, :, keys]
        v = work.v[:, :, keys]
        mask = None
        if key_range.ragged:
            mask = work.positions.mask(block_rows, keys, window, q.dtype, work.group)
        partials.append(_attend_folded(q, k, v, mask, attend))
    return _merge(partials)


def _grouped(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """The shape `[batch, kv_heads, group, rows]` of results."""
    batch, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    return batch, kv_heads, heads // kv_heads, rows


def _attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attend: Attend) -> Partial:
    grouped = _grouped(q, k)
    folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    out, lse = attend(folded, k, v, mask)
    return out.view(*grouped, v.shape[3]), lse.view(grouped)


def _square(work: Work, block: RowBlock, attend: Attend) -> Partial:
    """A run of neighbouring rows: all earlier keys without a mask, then a causal square; results as `_folded`.

    In the square KV heads are the batch, so that a group shares its keys without a copy.
    """
    q = work.q[:, :, block.start : block.stop]
    ends = work.positions.ends
    start = ends[block.start]
    keys = slice(start, ends[block.stop - 1] + 1)
    batch, kv_heads, group, rows = _grouped(q, work.k)
    shape = (batch * kv_heads, group, rows, q.shape[3])
    k = work.k[:, :, keys].flatten(0, 1)
    v = work.v[:, :, keys].flatten(0, 1)
    fused = getattr(torch.ops.aten, FUSED)
    out, lse = fused(
        q.reshape(shape), k[:, None].expand(shape), v[:, None].expand(shape), is_causal=True, scale=work.rule.scale
    )
    out = out.view(batch, kv_heads, *out.shape[1:])
    lse = lse.view(batch, kv_heads, *lse.shape[1:])
    partials = [(out, lse)]
    if start > 0:
        k = work.k[:, :, :start]
        v = work.v[:, :, :start]
        partials.append(_attend_folded(q, k, v, None, attend))
    return _merge(partials)


def _merge(partials: list[Partial]) -> Partial:
    """Merge softmaxes over disjoint key ranges with weights exp(lse_i - lse), lse = log sum exp(lse_i)."""
    if len(partials) == 1:
        return partials[0]
    parts_lse = torch.stack([part_lse for _, part_lse in partials])
    lse = parts_lse.logsumexp(0)
    merged: Tensor | None = None
    for part, part_lse in partials:
        weight = (part_lse - lse).exp_()
        term = part.float() * weight[..., None]
        merged = term if merged is None else merged.add_(term)
    assert merged is not None
    return merged, lse


def _fused(scale: float) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Partial:
        pieces = _pieces(q, k.shape[2]) if mask is None else 1
        if pieces > 1:
            return _split_keys(q, k, v, pieces, attend)
        out, lse = getattr(torch.ops.aten, FUSED)(q, k, v, attn_mask=mask, scale=scale)
        return out, lse

    return attend


def _pieces(q: Tensor, keys: int) -> int:
    """Number of key pieces that keep every thread busy with few rows; the fused op takes 32 rows per task."""
    if q.shape[0] > 1:
        return 1
    tasks = q.shape[1] * -(-q.shape[2] // 32)
    return min(torch.get_num_threads() // tasks, keys // _LEAST_PIECE)


def _split_keys(q: Tensor, k: Tensor, v: Tensor, pieces: int, attend: Attend) -> Partial:
    """Attention over one request's keys, cut into equal pieces (views) that run in parallel as heads, and a remainder."""
    size = k.shape[2] // pieces
    shared = q[0, :, None].expand(-1, pieces, -1, -1)
    k_pieces = _cut(k[0], pieces, size)
    v_pieces = _cut(v[0], pieces, size)
    out, lse = attend(shared, k_pieces, v_pieces, None)
    partials = [(out[None, :, i], lse[None, :, i]) for i in range(pieces)]
    cut_keys = pieces * size
    if cut_keys < k.shape[2]:
        remainder = attend(q, k[:, :, cut_keys:], v[:, :, cut_keys:], None)
        partials.append(remainder)
    return _merge(partials)


def _cut(x: Tensor, pieces: int, size: int) -> Tensor:
    return x[:, : pieces * size].view(x.shape[0], pieces, size, x.shape[2])


def _materialised(rule: Rule) -> Attend:
    """One block with weights in memory: for soft-caps, other value dimensions and devices without the fused op."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Partial:
        scores = capped_scores(q, k, rule.scale, rule.softcap)
        if mask is not None:
            scores += mask
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        return weights @ v, lse.float()

    return attend


def capped_scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`scale * q k^T` in at least fp32, optionally as `softcap * tanh(scores / softcap)` (Gemma 2)."""
    scores = q @ k.transpose(-1, -2)
    scores.mul_(scale)
    if softcap is None:
        return scores
    return scores.div_(softcap).tanh_().mul_(softcap)
