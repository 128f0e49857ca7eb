"""Invariant 5: rows outside R keep the stored, repositioned KV bit for bit; query rows and missing chunks are always in R."""

import pytest
import torch
from cases import SELECTORS, STORES, cache_chunks, cache_of, make_layout, make_store
from models import CORE, IN_BOTH_DTYPES, decoder

from blend.chunks.assemble import assemble
from blend.chunks.opened import open_chunks
from blend.config import BlendConfig
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.types import PromptLayout

Parts = list[torch.Tensor]


def _before(blender: Blender, layout: PromptLayout) -> Parts:
    """Keys and values of every layer side by side, as assembled from the store, before any row is computed."""
    library = blender.library(layout.prefix)
    with open_chunks(library, layout) as opened:
        opened.loader.read_all()
        cache = assemble(blender.decoder, layout, library.isolated.prefix, opened.chunks).cache
    return [torch.cat(cache.view(index), -1) for index in range(len(cache.layers))]


def _after(blend: Blend) -> Parts:
    return [torch.cat(kv, -1) for kv in cache_of(blend)]


def _untouched(blend: Blend) -> torch.Tensor:
    rows = torch.ones(blend.layout.rows, dtype=torch.bool)
    rows[blend.selection.rows] = False
    return rows


def _assert_untouched(blend: Blend, before: Parts) -> None:
    keep = _untouched(blend)
    prefix = slice(0, len(blend.layout.prefix))
    for index, (was, now) in enumerate(zip(before, _after(blend), strict=True)):
        assert torch.equal(now[:, :, prefix], was[:, :, prefix])
        if blend.selection.rows_per_layer[index] == blend.rows_recomputed:
            assert torch.equal(now[:, :, keep], was[:, :, keep])
        assert not now.isnan().any()


@pytest.mark.parametrize(
    ("name", "selector", "store"),
    [
        *(("llama", selector, "memory") for selector in SELECTORS),
        *(("mistral", "hkvd", store) for store in STORES),
    ],
)
def test_invariant_5_rows_outside_r_are_bit_for_bit_as_stored(name, selector, store, tmp_path):
    layout = make_layout()
    blender = cache_chunks(Blender(decoder(name), make_store(store, tmp_path), SELECTORS[selector]), layout)
    _assert_untouched(blender.prefill(layout), _before(blender, layout))


@pytest.mark.parametrize(("name", "dtype"), IN_BOTH_DTYPES)
def test_invariant_5_in_many_families(name, dtype, tmp_path):
    layout = make_layout()
    blender = cache_chunks(Blender(decoder(name, dtype), make_store("memory", tmp_path), SELECTORS["hkvd"]), layout)
    before = _before(blender, layout)
    blend = blender.prefill(layout, room=4)
    assert blend.selection.rows_per_layer[len(before) - 1] == blend.rows_recomputed
    context = slice(*layout.context)
    assert not torch.equal(before[-1][:, :, context], _after(blend)[-1][:, :, context]), "nothing was recomputed"
    _assert_untouched(blend, before)
    generate(blender.decoder, blend, layout.token_ids, max_new_tokens=6)
    _assert_untouched(blend, before)


@pytest.mark.parametrize("name", CORE)
def test_invariant_5_a_chunk_that_does_not_move_keeps_the_very_bits(name, tmp_path):
    layout = make_layout(chunks=(20,))
    store = make_store("disk", tmp_path)
    blender = cache_chunks(Blender(decoder(name), store, SELECTORS["none"]), layout)
    blend = blender.prefill(layout)
    span = slice(*layout.chunk_spans[0])
    reader = store.open(blender.encoder(layout.prefix).identity.key(layout.chunks[0]))
    for index, kv in enumerate(cache_of(blend)):
        for part, stored in zip(kv, reader.layer(index), strict=True):
            assert torch.equal(part[0, :, span], stored)


@pytest.mark.parametrize(
    ("cached", "ratio"), [((), 0.5), ((0,), 0.05), ((1, 2), 0.5), ((0, 1, 2, 3), 0.0), ((0, 1, 2, 3), 1.0)]
)
@pytest.mark.parametrize("config", SELECTORS.values(), ids=SELECTORS)
def test_invariant_5_query_rows_and_missing_chunks_are_always_in_r(config, cached, ratio, tmp_path):
    layout = make_layout()
    blender = cache_chunks(Blender(decoder("llama"), make_store("memory", tmp_path)), layout, cached)
    options = {**config.__dict__, "ratio": ratio}
    blend = blender.prefill(layout, config=BlendConfig(**options))
    rows = blend.selection.rows
    assert torch.equal(rows, rows.unique()), "sorted, no row twice"
    needed = set(range(layout.context.stop, layout.rows))
    for index, span in enumerate(layout.chunk_spans):
        needed |= set() if index in cached else set(range(*span))
    assert needed <= set(rows.tolist())
    assert set(rows.tolist()) <= set(range(len(layout.prefix), layout.rows))
    stored = sum(layout.chunk_spans[index].length for index in cached)
    if config.selector != "all":
        assert len(rows) - len(needed) <= round(ratio * stored)
