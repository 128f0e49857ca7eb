"""Load and concatenate: from chunk caches in a store to one cache whose keys stand at the prompt's positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.blended_cache import BlendedCache
from blend.errors import EntryDamagedError
from blend.rope import Rotation
from blend.store.base import ChunkStore
from blend.types import ChunkCache, ChunkKey, PromptLayout

if TYPE_CHECKING:
    from blend.decoder import Decoder


class LoadedChunks(NamedTuple):
    """One entry a chunk of the prompt: its cache, or None for a miss; and one line for every entry that was refused."""

    chunks: tuple[ChunkCache | None, ...]
    problems: tuple[str, ...]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Which chunks came out of the store."""
        return tuple(chunk is not None for chunk in self.chunks)


def load_chunks(
    store: ChunkStore, keys: Sequence[ChunkKey], token_counts: Sequence[int | None], layers: int
) -> LoadedChunks:
    """Read and verify every layer of every chunk. A damaged entry becomes a miss and a line in `problems`.

    token_counts: how many tokens each entry must hold; None takes what it holds.
    """
    loaded: dict[ChunkKey, ChunkCache | None] = {}
    problems = []
    for key, tokens in zip(keys, token_counts, strict=True):
        if key in loaded:
            continue
        try:
            loaded[key] = _load(store, key, tokens, layers)
        except EntryDamagedError as error:
            loaded[key] = None
            problems.append(str(error))
    return LoadedChunks(tuple(loaded[key] for key in keys), tuple(problems))


def _load(store: ChunkStore, key: ChunkKey, tokens: int | None, layers: int) -> ChunkCache | None:
    reader = store.open(key)
    if reader is None:
        return None
    with reader:
        needed = (reader.tokens if tokens is None else tokens, layers)
        if (reader.tokens, reader.layers) != needed:
            raise EntryDamagedError(
                f"entry {key.digest[:12]} holds {reader.tokens} tokens in {reader.layers} layers, not {needed[0]} in {layers}"
            )
        pairs = [reader.layer(index) for index in range(layers)]
    return ChunkCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), reader.start)


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
