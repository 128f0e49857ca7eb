"""Invariant 5: rows outside R keep the stored, repositioned KV bit for bit; query rows and missing chunks are always in R."""

from dataclasses import replace

import pytest
import torch
from blends import assert_bits, assert_kv, views
from cases import SELECTORS, STORES, blended, cache_chunks, cache_of, make_layout, make_store
from dense_reference import LayerKV
from models import CORE, IN_BOTH_DTYPES, decoder

from blend.chunks.assemble import assemble
from blend.chunks.opened import open_chunks
from blend.layout import PromptLayout
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender


def _before(blender: Blender, layout: PromptLayout) -> list[LayerKV]:
    """KV as assembled from the store, before any row is computed."""
    library = blender.library(layout.prefix)
    with open_chunks(library, layout) as opened:
        opened.loader.read_all()
        return views(assemble(blender.decoder, layout, library.isolated.prefix, opened.chunks).cache)


def _assert_untouched(blend: Blend, before: list[LayerKV]) -> None:
    after, untouched = cache_of(blend), torch.ones(blend.layout.rows, dtype=torch.bool)
    untouched[blend.selection.rows] = False
    assert_kv(after, before, slice(len(blend.layout.prefix)), assert_bits)
    for index, rows in enumerate(blend.selection.rows_per_layer[: len(before)]):
        if rows == blend.rows_recomputed:
            assert_kv(after[index : index + 1], before[index : index + 1], untouched, assert_bits)
    assert not any(part.isnan().any() for pair in after for part in pair)


@pytest.mark.parametrize(
    ("name", "selector", "store"),
    [*(("llama", selector, "memory") for selector in SELECTORS), *(("mistral", "hkvd", store) for store in STORES)],
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
    stored, computed = (layers[-1][0][:, :, slice(*layout.context)] for layers in (before, cache_of(blend)))
    assert not torch.equal(stored, computed), "nothing was recomputed"
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
def test_invariant_5_query_rows_and_missing_chunks_are_always_in_r(config, cached, ratio):
    layout = make_layout()
    blend = blended(decoder("llama"), layout, replace(config, ratio=ratio), cached=cached)
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
