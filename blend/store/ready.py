"""A chunk's cache in memory, decoded once and ready to be placed into prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from blend.types import CacheKey, ChunkCache, ChunkKey
    from blend_kernels import ChunkKV


@dataclass(eq=False)
class ReadyChunk:
    """A chunk's cache in memory.

    Attributes:
        key: which cache it is.
        address: where the store keeps it.
        kv: its keys and values.
        near: the same on the GPU, once it is there; else `kv`.
        tokens: number of tokens.
        start, unrotated, lead, operators: see `ChunkCache`.
        lossless: whether the store kept every bit.
        beginning: the header of its entry, which holds a digest of the whole.
        nbytes: bytes of memory that the pool counts.
        row_part: what the KV correction `row_part_of` makes of its rows alone, in memory as `kv` is (`blend.chunks.gain`).
        row_part_of: the correction that made `row_part`.

    """

    key: CacheKey
    address: ChunkKey
    kv: ChunkKV
    start: int
    unrotated: bool = False
    lead: int = 0
    lossless: bool = True
    beginning: bytes = b""
    nbytes: int = 0
    operators: list[tuple[Tensor, ...]] = field(default_factory=list)
    row_part: ChunkKV | None = None
    row_part_of: object = None
    near: ChunkKV = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.near = self.kv
        self.tokens = self.kv.tokens

    def cache(self, dtype: torch.dtype) -> ChunkCache:
        """Its KV, which must not be written to."""
        from blend.types import ChunkCache

        layers = [self.layer(index, dtype) for index in range(len(self.kv.keys))]
        return ChunkCache(
            keys=tuple(keys for keys, _ in layers),
            values=tuple(values for _, values in layers),
            start=self.start,
            unrotated=self.unrotated,
            lead=self.lead,
            operators=tuple(self.operators),
        )

    def layer(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, decoded, `[kv_heads, tokens, head_dim]`. Do not write to them."""
        from blend.store.codecs import get_codec

        kv = self.kv
        if kv.shape.packing == "plain" or not kv.keys[index].numel():
            copies = not kv.is_pageable  # the pool's memory is used again when the chunk goes
            keys = kv.keys[index].to(dtype, copy=copies)
            values = kv.values[index].to(dtype, copy=copies)
            return keys, values
        return get_codec(kv.shape.packing).decode(parts_of(kv, index), dtype)


def parts_of(kv: ChunkKV, index: int) -> dict[str, Tensor]:
    """A layer's numbers and scales under the names that codecs give them."""
    return {"k": kv.keys[index], "k.s": kv.key_scales[index], "v": kv.values[index], "v.s": kv.value_scales[index]}
