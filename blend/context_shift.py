"""The context shift: what every chunk's KV gains, on average, merely because something stands before it.

Most of the difference between a chunk's KV in context and alone is one constant vector per layer and head: it hardly depends on
the chunk or on what precedes it (docs/selection.md has the measurement). It is measured once per model and prefix on a few
chunks, and added to stored chunks that do not stand right behind the prefix. Keys are averaged with their position taken out,
R(-p) k, and the shift is put in with the position it goes to, R(p) shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blend.assemble import assemble
from blend.types import ChunkCache, PromptLayout

if TYPE_CHECKING:
    from blend.blended_cache import BlendedCache
    from blend.decoder import Decoder
    from blend.encode import ChunkEncoder

GROUP = 4  # chunks of one calibration prompt


def measure_shift(encoder: ChunkEncoder, chunks: Sequence[Sequence[int]], groups: int = 2) -> ChunkCache | None:
    """The shift of every layer as a cache of one token at position 0; None when there are fewer than two chunks.

    Up to `groups` prompts of four chunks, spread evenly over `chunks`, are computed in full and compared with the same chunks
    computed alone.
    """
    measured = []
    rows = 0
    for group in _groups(chunks, groups):
        layout = PromptLayout(encoder.prefix_tokens, tuple(map(tuple, group)), ())
        measured.append(_differences(encoder, layout))
        rows += sum(span.length for span in layout.chunk_spans[1:])
    if not rows:
        return None
    layers = zip(*measured, strict=True)
    pairs = [[torch.stack(part).sum(0) / rows for part in zip(*layer, strict=True)] for layer in layers]
    keys, values = zip(*pairs, strict=True)
    return ChunkCache(tuple(keys), tuple(values), start=0)


def add_shift(
    decoder: Decoder, cache: BlendedCache, shift: ChunkCache, rows: torch.Tensor, strength: float = 1.0
) -> None:
    """Add `strength` times the shift to the stored KV at `rows`, sorted int64 positions `[rows]`, in every layer."""
    if rows.shape[0] == 0:
        return
    index = slice(int(rows[0]), int(rows[-1]) + 1) if int(rows[-1] - rows[0]) + 1 == rows.shape[0] else rows
    for layer, rotation, keys, values in zip(cache.layers, decoder.rotations, shift.keys, shift.values, strict=True):
        for turn, buffer, mean in ((rotation.keys, layer.keys, keys), (rotation.values, layer.values, values)):
            spread = (strength * mean).to(buffer)[None].expand(-1, -1, rows.shape[0], -1)
            buffer[:, :, index] += spread if turn.inv_freq is None else turn.apply(spread, rows)


def _groups(chunks: Sequence[Sequence[int]], groups: int) -> list[Sequence[Sequence[int]]]:
    if len(chunks) < 2:
        return []
    step = max(GROUP, len(chunks) // groups)
    found = [chunks[i : i + GROUP] for i in range(0, len(chunks), step)][:groups]
    return [group for group in found if len(group) > 1]


def _differences(encoder: ChunkEncoder, layout: PromptLayout) -> list[list[torch.Tensor]]:
    """Per layer, the sums over rows of KV in context minus KV alone, keys and values `[kv_heads, 1, head_dim]`, float32."""
    decoder = encoder.decoder
    alone: list[ChunkCache | None] = [None] * len(layout.chunks)
    for index, chunk in encoder.encode(layout.chunks):
        alone[index] = chunk
    apart = assemble(decoder, layout, encoder.prefix, alone, room=0)
    together = assemble(decoder, layout, encoder.prefix, [None] * len(layout.chunks), room=0)
    ids = torch.tensor([layout.token_ids[len(layout.prefix) :]], device=decoder.device)
    decoder.encode_rows(ids, len(layout.prefix), together)
    rows = torch.arange(layout.chunk_spans[1].start, layout.rows, device=decoder.device)
    sums = []
    for index, rotation in enumerate(decoder.rotations):
        pair = zip(together.view(index), apart.view(index), (rotation.keys, rotation.values), strict=True)
        moved = [turn.apply((new - old)[:, :, rows].float(), -rows) for new, old, turn in pair]
        sums.append([states[0].sum(1, keepdim=True) for states in moved])
    sums[0] = [torch.zeros_like(states) for states in sums[0]]  # layer 0 depends on token and position only
    return sums
