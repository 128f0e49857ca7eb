"""Tables of cases: prompts, selectors, stores. Generic tests run over their products with the model families of `models`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from models import VOCABULARY

from blend.blender import Blend, Blender
from blend.config import BlendConfig
from blend.decoder import Decoder
from blend.store import ChunkStore, open_store
from blend.types import PromptLayout

# Chunks longer than the smallest window (8), one of a single token; the last rows of a model with windows still see several chunks.
PREFIX, CHUNKS, SUFFIX = 5, (20, 13, 1, 12), 7

SELECTORS = {
    "hkvd": BlendConfig(ratio=0.3),
    "hkvd-k-l1": BlendConfig(ratio=0.2, deviation_of="k", norm="l1"),
    "hkvd-kv-layer-2": BlendConfig(ratio=0.2, deviation_of="kv", check_layer=2),
    "first_k": BlendConfig(selector="first_k", ratio=0.25),
    "first_4": BlendConfig(selector="first_k", first_k=4, ratio=0.5),
    "random": BlendConfig(selector="random", ratio=0.3, seed=3),
    "all": BlendConfig(selector="all"),
    "none": BlendConfig(selector="none"),
}

# name -> location and codec; a codec that rounds changes the stored values, never which rows are computed
STORES: dict[str, tuple[str, str]] = {
    "memory": ("memory:", "native"),
    "disk": ("disk", "native"),
    "disk-bfloat16": ("disk", "bfloat16"),
}


def make_store(name: str, folder: Path) -> ChunkStore:
    """An empty store of the table."""
    location, codec = STORES[name]
    return open_store(location if location == "memory:" else folder / "store", codec=codec)


def make_layout(
    prefix: int = PREFIX, chunks: Sequence[int] = CHUNKS, suffix: int = SUFFIX, seed: int = 1
) -> PromptLayout:
    """Random token ids in segments of these lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    return PromptLayout(ids(prefix), tuple(ids(count) for count in chunks), ids(suffix))


def cache_chunks(blender: Blender, layout: PromptLayout, which: Sequence[int] | None = None) -> None:
    """Compute and store the caches of the prompt's chunks, or of some of them."""
    encoder = blender.encoder(layout.prefix)
    chunks = layout.chunks if which is None else [layout.chunks[index] for index in which]
    for index, cache in encoder.encode(chunks):
        blender.store.put(encoder.identity.key(chunks[index]), cache)


def blended(
    decoder: Decoder,
    layout: PromptLayout,
    config: BlendConfig | None = None,
    *,
    cached: Sequence[int] | None = None,
    store: ChunkStore | None = None,
) -> Blend:
    """A blended prefill of a prompt whose chunks (or those of index `cached`) were stored just before."""
    blender = Blender(decoder, open_store("memory:") if store is None else store, config)
    cache_chunks(blender, layout, cached)
    return blender.prefill(layout)


def cache_of(blend: Blend) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the prompt's rows, layer by layer."""
    rows = blend.layout.rows
    views = [blend.cache.view(index) for index in range(len(blend.decoder.layers))]
    return [(keys[:, :, :rows], values[:, :, :rows]) for keys, values in views]
