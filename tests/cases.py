"""Tables of cases: prompts, selectors, stores. Generic tests run over their products with the model families of `models`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from models import VOCABULARY

from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.prefill.blender import Blend, Blender
from blend.select import Evidence, HighDeviation, QueryGuided, Random, Selector, make_selector
from blend.store import ChunkStore, open_store

# Chunks longer than the window, one of a single token; the last rows still see several chunks through layers with windows.
PREFIX, CHUNKS, SUFFIX = 5, (20, 13, 1, 12), 7

SELECTORS = {
    "hkvd": BlendConfig("hkvd", ratio=0.3),
    "hkvd-k": BlendConfig("hkvd:of=k", ratio=0.2),
    "hkvd-kv-layer-2": BlendConfig(HighDeviation(check_layer=2, of="kv"), ratio=0.2),
    "gradual": BlendConfig("gradual", ratio=0.3),
    "first_k": BlendConfig(selector="first_k", ratio=0.25),
    "first_4": BlendConfig("first_k:k=4", ratio=0.5),
    "random": BlendConfig(Random(3), ratio=0.3),
    "query_guided": BlendConfig(selector="query_guided", ratio=0.3),
    "query_guided-all-layers": BlendConfig(QueryGuided("all"), ratio=0.3),
    "mixed": BlendConfig("mixed", ratio=0.3),
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

    return PromptLayout.of_chunks(ids(prefix), tuple(ids(count) for count in chunks), ids(suffix))


def cache_chunks(blender: Blender, layout: PromptLayout, which: Sequence[int] | None = None) -> Blender:
    """The blender, after it has computed and stored the caches of the prompt's chunks, or of some of them."""
    encoder = blender.encoder(layout.prefix)
    chunks = layout.chunks if which is None else [layout.chunks[index] for index in which]
    for index, cache in encoder.encode(chunks):
        blender.store.put(encoder.identity.key(chunks[index]), cache)
    return blender


def blended(
    decoder: Decoder,
    layout: PromptLayout,
    config: BlendConfig | None = None,
    *,
    cached: Sequence[int] | None = None,
    store: ChunkStore | None = None,
) -> Blend:
    """A blended prefill of a prompt whose chunks (or those of index `cached`) were stored just before."""
    blender = cache_chunks(Blender(decoder, open_store("memory:") if store is None else store, config), layout, cached)
    return blender.prefill(layout)


class Recorded(NamedTuple):
    """A blended prefill, what its selector was shown, and the rows each layer ran on as the selector's answers imply them."""

    blend: Blend
    evidence: list[Evidence]
    rows_by_layer: list[torch.Tensor]


def recorded(
    decoder: Decoder,
    layout: PromptLayout,
    config: BlendConfig,
    *,
    cached: Sequence[int] | None = None,
    store: ChunkStore | None = None,
) -> Recorded:
    """Like `blended`, listening to the selector."""
    seen: list[tuple[Evidence, torch.Tensor]] = []
    kind = type(make_selector(config.selector))
    select = kind.select

    def spy(selector: Selector, evidence: Evidence) -> torch.Tensor:
        seen.append((evidence, select(selector, evidence)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "select", spy)
        blend = blended(decoder, layout, config, cached=cached, store=store)
    return Recorded(blend, [evidence for evidence, _ in seen], _rows_by_layer(blend, seen))


def _rows_by_layer(blend: Blend, seen: list[tuple[Evidence, torch.Tensor]]) -> list[torch.Tensor]:
    depth = len(blend.cache.layers)
    if not seen:  # a budget of nothing or of everything asks no selector
        return [blend.selection.rows] * depth
    layout = blend.layout
    required = [torch.arange(*span) for span, hit in zip(layout.chunk_spans, blend.hits, strict=True) if not hit]
    required.append(torch.arange(layout.context.stop, layout.rows))
    # A stored first chunk stands where it was computed: it is exact and never run.
    start = layout.chunk_spans[0].stop if blend.hits[0] else len(layout.prefix)
    rows, by_layer = torch.arange(start, layout.rows), []
    for layer in range(depth):
        for chosen in (chosen for evidence, chosen in seen if evidence.layer == layer):
            rows = torch.cat((chosen, *required)).sort().values
        by_layer.append(rows)
    return by_layer


def cache_of(blend: Blend) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the prompt's rows, layer by layer."""
    rows = blend.layout.rows
    views = [blend.cache.view(index) for index in range(len(blend.cache.layers))]
    return [(keys[:, :, :rows], values[:, :, :rows]) for keys, values in views]


def assert_same_blend(one: Blend, other: Blend) -> None:
    """The same logits, chosen rows and KV in every layer, bit for bit."""
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.selection.rows, other.selection.rows)
    for mine, theirs in zip(cache_of(one), cache_of(other), strict=True):
        assert all(map(torch.equal, mine, theirs))
