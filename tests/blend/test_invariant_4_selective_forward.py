"""Invariant 4: the selective forward equals a dense reference that recomputes exactly the rows R."""

from pathlib import Path

import pytest
import torch
from cases import CHUNKS, SELECTORS, blended, cache_of, make_layout, make_store, recorded
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


def _random_kv(like: tuple[LayerKV, ...], seed: int) -> list[LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(t.shape, generator=generator) for t in kv) for kv in like]  # type: ignore[misc]


def _filled(stored: list[LayerKV], total: int) -> BlendedCache:
    cache = BlendedCache(len(stored), total)
    for layer, kv in zip(cache.layers, stored, strict=True):
        layer.write_run(0, *kv)
    return cache


def _check(dec: Decoder, reference: object, total: int, rows: torch.Tensor, start_layer: int, seed: int) -> None:
    """Arbitrary stored KV, rows R from `start_layer` on: engine against definition."""
    ids = torch.randint(3, VOCABULARY, (total,), generator=torch.Generator().manual_seed(seed))
    stored = _random_kv(dense_prefill(reference, ids.tolist()).layers, seed)
    cache, start_layer = _filled(stored, total), min(start_layer, len(stored) - 1)
    every = torch.arange(total)
    narrowings = (Narrowing(start_layer, lambda keys, values: rows),) if start_layer else ()
    positions = every if start_layer else rows
    logits = dec.prefill([RowRequest(ids[positions][None], Run.read(positions), cache, narrowings)])
    by_layer = [every] * start_layer + [rows] * (len(stored) - start_layer)
    dense = dense_blend(reference, ids.tolist(), stored, by_layer)
    assert_dense(logits, map(cache.view, range(len(stored))), dense)


@st.composite
def row_sets(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    """Length of a prompt and sorted rows that hold its last row."""
    total = draw(st.integers(1, 40))
    rows = draw(st.sets(st.integers(0, total - 1)))
    return total, torch.tensor(sorted(rows | {total - 1}))


@pytest.mark.parametrize("name", CORE)
@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(case=row_sets(), start_layer=st.integers(0, LAYERS - 1), seed=st.integers(0, 3))
def test_invariant_4_any_rows(name, case, start_layer, seed):
    _check(decoder(name), eager_model(name), *case, start_layer, seed)


@pytest.mark.parametrize("name", CORE)
@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(total=st.integers(1, 30), data=st.data())
def test_invariant_4_rows_that_narrow_more_than_once(name, total, data):
    sets = [torch.arange(total)]
    for _ in range(LAYERS):
        keep = data.draw(st.sets(st.sampled_from(sets[-1].tolist())))
        sets.append(torch.tensor(sorted(keep | {total - 1})))
    dec, reference = decoder(name), eager_model(name)
    ids = torch.randint(3, VOCABULARY, (total,), generator=torch.Generator().manual_seed(0))
    stored = _random_kv(dense_prefill(reference, ids.tolist()).layers, 0)
    cache = _filled(stored, total)
    narrowings = tuple(Narrowing(at, lambda keys, values, at=at: sets[at + 1]) for at in range(LAYERS))
    logits = dec.prefill([RowRequest(ids[None], Run.read(sets[0]), cache, narrowings)])
    dense = dense_blend(reference, ids.tolist(), stored, sets[1:])
    assert_dense(logits, map(cache.view, range(len(stored))), dense)


@pytest.mark.parametrize("start_layer", [0, 1])
@pytest.mark.parametrize("name", WIDE)
def test_invariant_4_scattered_rows_in_many_families(name, start_layer):
    rows = torch.tensor([0, 1, 2, 7, 8, 15, 22, 23, 24, 36, 39])
    _check(decoder(name), eager_model(name), 40, rows, start_layer, 0)


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
        _check(dec, reference, 34, torch.tensor(rows), len(rows) % 2, 1)


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        *(("llama", selector) for selector in SELECTORS),
        *((name, selector) for name in FAMILIES if name != "llama" for selector in ("hkvd", "mixed")),
    ],
)
def test_invariant_4_end_to_end(name, selector):
    """Stored KV as the model itself would move it, rows as the selector chose them."""
    _check_blend(name, SELECTORS[selector], None)


@pytest.mark.parametrize("cached", [(), (0,), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize(("name", "store"), [("llama", "disk"), ("mistral", "memory")])
def test_invariant_4_with_some_chunks_missing(name, cached, store, tmp_path):
    _check_blend(name, SELECTORS["hkvd"], cached, store, tmp_path)


def _check_blend(
    name: str, config: BlendConfig, cached: tuple[int, ...] | None, store: str = "memory", folder: Path = Path()
) -> None:
    layout = make_layout()
    blend, _, by_layer = recorded(decoder(name), layout, config, cached=cached, store=make_store(store, folder))
    assert blend.hits == tuple(cached is None or index in cached for index in range(len(CHUNKS)))
    reused = dense_reuse(eager_model(name), layout.prefix, layout.chunks, len(layout.suffix))
    above = (1,) * (LAYERS - len(by_layer))  # layers that read the KV of lower ones
    assert blend.selection.rows_per_layer == (*map(len, by_layer), *above)
    assert torch.equal(blend.selection.rows, by_layer[-1])
    dense = dense_blend(eager_model(name), layout.token_ids, reused, by_layer)
    assert_dense(blend.logits, cache_of(blend), dense)


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
