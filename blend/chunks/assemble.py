"""Load and concatenate: from chunk caches in a store to one cache whose keys stand at the prompt's positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.errors import EntryDamagedError
from blend.model.cache import BlendedCache
from blend.model.rope import Rotation
from blend.store.base import ChunkStore
from blend.types import ChunkCache, ChunkKey, PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import Decoder


class LoadedChunks(NamedTuple):
    """One entry a chunk of the prompt: its cache, or None for a miss; and one line for every entry that was refused."""

    chunks: tuple[ChunkCache | None, ...]
    problems: tuple[str, ...]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which chunks came out of the store."""
        return tuple(chunk is not None for chunk in self.chunks)


class Expected(NamedTuple):
    """A chunk cache as it must be: under which key, how many tokens, and the position of the first when it was computed."""

    key: ChunkKey
    tokens: int
    start: int


def load_chunks(store: ChunkStore, wanted: Sequence[Expected], decoder: Decoder) -> LoadedChunks:
    """Read and verify every layer of every chunk. A damaged entry becomes a miss and a line in `problems`.

    An entry whose place or shapes are not those of this decoder's cache counts as damaged, whatever its checksums say.
    Raises `StoreError` when the store cannot be read: that is an outage, not a miss.
    """
    loaded: dict[ChunkKey, ChunkCache | None] = {}
    problems = []
    for one in wanted:
        if one.key in loaded:
            continue
        try:
            loaded[one.key] = _load(store, one, decoder)
        except EntryDamagedError as error:
            loaded[one.key] = None
            problems.append(str(error))
    return LoadedChunks(tuple(loaded[one.key] for one in wanted), tuple(problems))


def _load(store: ChunkStore, wanted: Expected, decoder: Decoder) -> ChunkCache | None:
    reader = store.open(wanted.key)
    if reader is None:
        return None
    with reader:
        found, needed = (reader.tokens, reader.layers, reader.start), (wanted.tokens, len(decoder.layers), wanted.start)
        if found != needed:
            raise _unfit(wanted, f"holds {found[0]} tokens in {found[1]} layers from position {found[2]}, not {needed}")
        pairs = [reader.layer(index) for index in range(reader.layers)]
    for index, (pair, layer) in enumerate(zip(pairs, decoder.rotations, strict=True)):
        for tensor, (heads, width) in zip(pair, (layer.key_shape, layer.value_shape), strict=True):
            if tensor.shape != (heads, wanted.tokens, width) or tensor.dtype != decoder.dtype:
                raise _unfit(wanted, f"has {tensor.dtype} {list(tensor.shape)} in layer {index}, not this model's")
    return ChunkCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), reader.start)


def _unfit(wanted: Expected, what: str) -> EntryDamagedError:
    return EntryDamagedError(f"store entry {wanted.key.digest[:16]} must be computed again: it {what}")


def assemble(
    decoder: Decoder, layout: PromptLayout, prefix: ChunkCache, chunks: Sequence[ChunkCache | None], room: int
) -> BlendedCache:
    """A cache with the prefix and every given chunk in place, keys moved to the prompt's positions.

    Rows of missing chunks and of the suffix are left unwritten. room: further rows to reserve for decoding.
    """
    cache = decoder.new_cache(layout.rows + room)
    for index, layer in enumerate(cache.layers):
        layer.write_run(0, prefix.keys[index][None], prefix.values[index][None])
        rotation = decoder.rotations[index]
        for chunk, span in zip(chunks, layout.chunk_spans, strict=True):
            if chunk is None:
                continue
            delta = span.start - chunk.start
            keys, values = (
                t[None].to(layer.device, non_blocking=True) for t in (chunk.keys[index], chunk.values[index])
            )
            _move(rotation.keys, keys, delta, layer.keys[:, :, span.start : span.stop])
            _move(rotation.values, values, delta, layer.values[:, :, span.start : span.stop])
        layer.length = layout.rows
    return cache


def _move(rotation: Rotation, states: torch.Tensor, delta: int, out: torch.Tensor) -> None:
    if delta == 0:
        out.copy_(states)
    else:
        rotation.apply(states, delta, out=out)
