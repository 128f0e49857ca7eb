"""The KV of a stored chunk in one piece of memory, from which a kernel can read it by address."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Packing = Literal["plain", "int8", "int4"]
Integers: TypeAlias = npt.NDArray[np.int64]

# Scales start at a multiple of this many bytes.
ALIGNMENT = 16
# What `ChunkKV.location` says of memory that is on no GPU.
PAGE_LOCKED, PAGEABLE = -1, -2


class LayerShape(NamedTuple):
    """Heads and head dimensions of one layer's keys and values; no heads in a layer without KV."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def key_width(self) -> int:
        """Numbers in the keys of a row."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Numbers in the values of a row."""
        return self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Numbers in the keys and values of a row."""
        return self.key_width + self.value_width


class Part(NamedTuple):
    """The keys or the values of one layer inside a chunk's memory.

    Attributes:
        heads: how many heads.
        dim: numbers in a row of a head.
        start: bytes of the parts before this one, for each token of the chunk.
        column: numbers of the parts before this one in a row of all parts, which is where its scales are.
    """

    heads: int
    dim: int
    start: int
    column: int

    @property
    def width(self) -> int:
        """Numbers in a row of all heads."""
        return self.heads * self.dim


@dataclass(frozen=True)
class ChunkShape:
    """What all chunks of a model have in common; let them share the object, which is then compared by identity.

    Attributes:
        layers: shape of each layer.
        dtype: of plain keys and values.
        packing: "plain", or a codec's numbers and scales.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    packing: Packing = "plain"

    def nbytes(self, tokens: int, groups: int = 1) -> int:
        """Bytes of a chunk's memory; groups: how many groups of tokens have scales, ignored for "plain"."""
        scales = 0 if self.packing == "plain" else 4 * groups * self.width
        return self.scales_start(tokens) + scales

    def scales_start(self, tokens: int) -> int:
        """Bytes before the scales of a chunk."""
        numbers = tokens * self.token_bytes
        if self.packing == "plain":
            return numbers
        return -(-numbers // ALIGNMENT) * ALIGNMENT

    def layer_bytes(self, layer: int) -> int:
        """Bytes of the numbers of a layer, for each token."""
        parts = self.parts[2 * layer : 2 * layer + 2]
        return sum(part.heads * self._row_bytes(part.dim) for part in parts)

    @cached_property
    def number_alignment(self) -> int:
        """Bytes of which the address of a chunk's memory is a multiple: those of a number, or of a scale."""
        return self.dtype.itemsize if self.packing == "plain" else torch.bfloat16.itemsize

    @cached_property
    def number_dtype(self) -> torch.dtype:
        """Dtype of a chunk's keys and values in memory."""
        packed = {"int8": torch.int8, "int4": torch.uint8}
        return packed.get(self.packing, self.dtype)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Keys and values of the first layer, then of the second, and so on."""
        parts = []
        start = 0
        column = 0
        for layer in self.layers:
            for heads, dim in (layer[:2], layer[2:]):
                parts.append(Part(heads, dim, start, column))
                start += heads * self._row_bytes(dim)
                column += heads * dim
        return tuple(parts)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of all numbers of a token."""
        return sum(part.heads * self._row_bytes(part.dim) for part in self.parts)

    @cached_property
    def width(self) -> int:
        """Numbers of a token in all layers."""
        return sum(part.width for part in self.parts)

    def _row_bytes(self, dim: int) -> int:
        return row_bytes(dim, self.packing, self.number_dtype.itemsize)


class ChunkKV:
    """Keys and values of a chunk, every layer in one piece of memory: `[layers, 2, kv_heads, tokens, head_dim]`, then scales.

    Args:
        shape: shape of the layers.
        tokens: how many tokens the chunk has.
        memory: uint8 `[shape.nbytes(tokens, groups)]`, on a CPU (page-locked for kernels on a GPU) or on a GPU. Not copied.
        groups: how many groups of tokens have scales; ignored for "plain".

    Attributes:
        address: of the first byte.
        location: the index of a GPU, -1 for page-locked memory, -2 for any other.
        keys, values: one view a layer, `[kv_heads, tokens, head_dim]` for "plain" and "int8". For "int4"
            `[kv_heads, 1, bytes]`, as the codec packs them: a head's first half in the lower halves of the bytes.
        key_scales, value_scales: one view a layer, bfloat16 `[kv_heads, 2 * groups, head_dim]`, centres before steps; empty
            for "plain".

    Raises:
        ValueError: memory of another size or dtype, or not aligned to its numbers; no token, or more groups than tokens.
    """

    def __init__(self, shape: ChunkShape, tokens: int, memory: Tensor, groups: int = 1) -> None:
        if tokens < 1:
            raise ValueError(f"a chunk has at least one token, got {tokens}")
        if not 1 <= groups <= tokens:
            raise ValueError(f"a chunk of {tokens} tokens has 1 to {tokens} groups, got {groups}")
        needed = shape.nbytes(tokens, groups)
        if memory.dtype != torch.uint8 or memory.shape != (needed,) or not memory.is_contiguous():
            kind = f"{memory.dtype} {list(memory.shape)}"
            raise ValueError(f"a chunk of {tokens} tokens takes contiguous uint8 [{needed}], got {kind}")
        if memory.data_ptr() % shape.number_alignment:
            raise ValueError(f"a chunk's memory must start at a multiple of {shape.number_alignment} bytes")
        self.shape = shape
        self.tokens = tokens
        self.groups = groups
        self.memory = memory
        self.address = memory.data_ptr()
        self.location = _location(memory)
        numbers = self._numbers()
        self.keys = numbers[0::2]
        self.values = numbers[1::2]
        scales = self._scales()
        self.key_scales = scales[0::2]
        self.value_scales = scales[1::2]

    @property
    def is_pageable(self) -> bool:
        """Whether the memory is neither page-locked nor on a GPU."""
        return self.location == PAGEABLE

    def to(self, device: torch.device | str) -> ChunkKV:
        """The chunk on a device, by one copy, which is asynchronous from page-locked memory; itself if it is there."""
        target = torch.device(device)
        memory = self.memory.to(target, non_blocking=target.type != "cpu")
        if memory is self.memory:
            return self
        return ChunkKV(self.shape, self.tokens, memory, self.groups)

    def _numbers(self) -> tuple[Tensor, ...]:
        """Views of all parts' numbers."""
        shape = self.shape
        dtype = shape.number_dtype
        tokens = self.tokens
        flat = self.memory[: tokens * shape.token_bytes].view(dtype)
        base = flat.storage_offset()
        views = []
        for heads, dim, start, _ in shape.parts:
            offset = base + tokens * start // dtype.itemsize
            if shape.packing == "int4":
                size = (heads, 1, packed_bytes(tokens, dim))
                head_bytes = tokens * row_bytes(dim, "int4", 1)
                strides = (head_bytes, head_bytes, 1)
            else:
                size = (heads, tokens, dim)
                strides = (tokens * dim, dim, 1)
            views.append(flat.as_strided(size, strides, offset))
        return tuple(views)

    def _scales(self) -> tuple[Tensor, ...]:
        """Views of all parts' scales."""
        if self.shape.packing == "plain":
            return ()
        rows = 2 * self.groups
        flat = self.memory[self.shape.scales_start(self.tokens) :].view(torch.bfloat16)
        base = flat.storage_offset()
        return tuple(
            flat.as_strided((heads, rows, dim), (rows * dim, dim, 1), base + rows * column)
            for heads, dim, _, column in self.shape.parts
        )


def row_bytes(dim: int, packing: Packing, size: int) -> int:
    """Bytes of a row of one head with numbers of so many bytes. An odd int4 head leaves half a byte a token unused."""
    if packing == "int4":
        return max(1, (dim + 1) // 2)
    return dim * size


def packed_bytes(tokens: int, dim: int) -> int:
    """Bytes of an int4 head, as the codec counts them: two numbers a byte, but one token of a head of width 0 or 1."""
    return tokens if dim < 2 else -(-tokens * dim // 2)


def _location(memory: Tensor) -> int:
    if memory.is_cuda:
        return memory.get_device()
    return PAGE_LOCKED if memory.is_pinned() else PAGEABLE


def numbers_of(name: str, chunks: tuple[ChunkKV, ...]) -> Integers:
    """An attribute of every chunk, read without Python code for each."""
    return np.fromiter(map(attrgetter(name), chunks), np.int64, len(chunks))


def sums_before(lengths: Integers) -> Integers:
    """The sum of the lengths before each."""
    return np.cumsum(lengths) - lengths
