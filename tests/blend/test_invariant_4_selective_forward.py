"""Invariant 4: the selective forward equals a dense reference that recomputes exactly the rows R."""

from itertools import pairwise

import pytest
import torch
from blends import assert_dense_blend, views
from cases import CHUNKS, SELECTORS, blended, make_layout, make_store, recorded
from dense_reference import LayerKV, assert_close, assert_dense, dense_blend, dense_prefill, dense_reuse
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CORE, FAMILIES, LAYERS, VOCABULARY, WIDE, build, decoder, eager_model, tokenizer

from blend.config import BlendConfig
from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder
from blend.model.passes import Narrowing, RowRequest

GROUPINGS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1), "GQA of 3": (6, 2)}
WINDOWS = (None, 1, 2, 16, 100)
SOME_MISSING = ((), (0,), (2,), (1, 3))


def _random_kv(like: tuple[LayerKV, ...], seed: int) -> list[LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(t.shape, generator=generator) for t in kv) for kv in like]  # type: ignore[misc]


def _check(dec: Decoder, reference: object, rows: list[torch.Tensor], seed: int) -> None:
    """Arbitrary stored KV, `rows` of the inputs and of each layer: engine against definition."""
    total = int(rows[-1][-1]) + 1
    ids = torch.randint(3, VOCABULARY, (total,), generator=torch.Generator().manual_seed(seed))
    stored = _random_kv(dense_prefill(reference, ids.tolist()).layers, seed)
    rows = rows[: len(stored) + 1]  # layers above may have no KV
    cache = BlendedCache(len(stored), total)
    for layer, kv in zip(cache.layers, stored, strict=True):
        layer.write_run(0, *kv)
    narrowings = tuple(
        Narrowing(layer, lambda keys, values, chosen=chosen: chosen)
        for layer, (before, chosen) in enumerate(pairwise(rows))
        if chosen is not before
    )
    logits = dec.prefill([RowRequest(ids[rows[0]][None], Run.read(rows[0]), cache, narrowings)])
    assert_dense(logits, views(cache), dense_blend(reference, ids.tolist(), stored, rows[1:]))


def _from_layer(start: int, rows: torch.Tensor) -> list[torch.Tensor]:
    """All rows in the layers below, these from there on."""
    every = torch.arange(int(rows[-1]) + 1)
    return [every] * (start + 1) + [rows] * (LAYERS - start) if start else [rows] * (LAYERS + 1)


@st.composite
def row_sets(draw: st.DrawFn) -> torch.Tensor:
    """Sorted rows of a prompt, with its last row."""
    last = draw(st.integers(0, 39))
    return torch.tensor(sorted({*draw(st.sets(st.integers(0, last))), last}))


@pytest.mark.parametrize("name", CORE)
@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(rows=row_sets(), start_layer=st.integers(0, LAYERS - 1), seed=st.integers(0, 3))
def test_invariant_4_any_rows(name, rows, start_layer, seed):
    _check(decoder(name), eager_model(name), _from_layer(start_layer, rows), seed)


@pytest.mark.parametrize("name", CORE)
@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(total=st.integers(1, 30), data=st.data())
def test_invariant_4_rows_that_narrow_more_than_once(name, total, data):
    sets = [torch.arange(total)]
    for _ in range(LAYERS):
        keep = data.draw(st.sets(st.sampled_from(sets[-1].tolist())))
        sets.append(torch.tensor(sorted(keep | {total - 1})))
    _check(decoder(name), eager_model(name), sets, 0)


@pytest.mark.parametrize("start_layer", [0, 1])
@pytest.mark.parametrize("name", WIDE)
def test_invariant_4_scattered_rows_in_many_families(name, start_layer):
    rows = torch.tensor([0, 1, 2, 7, 8, 15, 22, 23, 24, 36, 39])
    _check(decoder(name), eager_model(name), _from_layer(start_layer, rows), 0)


@pytest.mark.parametrize(
    ("heads", "window"), [*((heads, 5) for heads in GROUPINGS.values()), *(((4, 2), window) for window in WINDOWS)]
)
def test_invariant_4_any_window_and_head_grouping(heads, window):
    options = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "sliding_window": window,
        "head_dim": 16,
    }
    dec = Decoder(build(CORE["mistral"], **options), tokenizer(), "mistral")
    reference = build(CORE["mistral"], attn_implementation="eager", **options)
    for rows in ([33], [0, 4, 5, 6, 20, 33], list(range(30, 34)), list(range(34))):
        _check(dec, reference, _from_layer(len(rows) % 2, torch.tensor(rows)), 1)


@pytest.mark.parametrize(
    ("name", "selector", "cached", "store"),
    [
        *(("llama", selector, range(4), "memory") for selector in SELECTORS),
        *(
            (name, selector, range(4), "memory")
            for name in FAMILIES
            for selector in ("hkvd", "mixed")
            if name != "llama"
        ),
        *(("llama", "hkvd", cached, "disk") for cached in SOME_MISSING),
        *(("mistral", "hkvd", cached, "memory") for cached in SOME_MISSING),
    ],
    ids=str,
)
def test_invariant_4_end_to_end(name, selector, cached, store, tmp_path):
    """Stored KV as the model itself would move it, rows as the selector chose them."""
    store = make_store(store, tmp_path)
    prefill = recorded(decoder(name), make_layout(), SELECTORS[selector], cached=cached, store=store)
    blend, _, by_layer = prefill
    assert blend.hits == tuple(index in cached for index in range(len(CHUNKS)))
    above = (1,) * (LAYERS - len(by_layer))  # layers that read the KV of lower ones
    assert blend.selection.rows_per_layer == (*map(len, by_layer), *above)
    assert torch.equal(blend.selection.rows, by_layer[-1])
    assert_dense_blend(eager_model(name), prefill)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "deepseek-v3"])
def test_bottom_right_masks_row_r_of_m_at_r_plus_n_minus_m(name):
    """The convention of FlashAttention, by an explicit mask over all rows."""
    layout = make_layout()
    blend = blended(decoder(name), layout, BlendConfig(selector="first_k", ratio=0.2, mask="bottom-right"))
    rows, total = blend.selection.rows, layout.rows
    sees_up_to = torch.arange(total)
    sees_up_to[rows] = torch.arange(total - len(rows), total)
    hidden = torch.arange(total) > sees_up_to[:, None]
    mask = torch.zeros(1, 1, total, total).masked_fill_(hidden, torch.finfo(torch.float32).min)
    reused = dense_reuse(eager_model(name), layout.prefix, layout.chunks, 0)
    # Rows that see beyond themselves see the suffix too, which is fresh: any finite value stands in for the stored one.
    reused = [tuple(torch.cat((t, t[:, :, : len(layout.suffix)]), 2) for t in kv) for kv in reused]
    dense = dense_blend(eager_model(name), layout.token_ids, reused, [rows] * LAYERS, mask)
    assert_close(blend.logits[0], dense.logits[-1])
    exact = blended(decoder(name), layout, BlendConfig(selector="first_k", ratio=0.2))
    assert (exact.logits - blend.logits).abs().max() > 1e-3
