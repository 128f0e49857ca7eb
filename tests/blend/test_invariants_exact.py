"""Invariants 1 to 3: where blended prefill must be full recompute, and where stored KV must be its KV."""

from pathlib import Path

import pytest
import torch
from cases import STORES, blended, cache_of, make_layout, make_store
from dense_reference import assert_close, assert_dense, dense_blend, dense_prefill, dense_reuse
from models import CORE, FAMILIES, IN_BOTH_DTYPES, decoder, eager_model

from blend.config import BlendConfig
from blend.model.decoder import full_prefill

ALL_WAYS = {
    "hkvd at ratio 1": BlendConfig("hkvd", ratio=1.0),
    "first_k at ratio 1": BlendConfig(selector="first_k", ratio=1.0),
    "random at ratio 1": BlendConfig(selector="random", ratio=1.0),
    "all": BlendConfig(selector="all", ratio=0.0),
    "bottom-right": BlendConfig("hkvd", ratio=1.0, mask="bottom-right"),
}


@pytest.mark.parametrize(("name", "dtype"), IN_BOTH_DTYPES)
def test_invariant_1_ratio_one_is_full_recompute(name: str, dtype: torch.dtype) -> None:
    layout = make_layout()
    blend = blended(decoder(name, dtype), layout, BlendConfig("hkvd", ratio=1.0))
    dense = dense_prefill(eager_model(name, dtype), layout.token_ids)
    assert all(blend.hits)
    assert_dense(blend.logits, cache_of(blend), dense)
    if dtype is torch.float32:  # rounding decides between two likely tokens in bfloat16
        assert blend.first_token == int(dense.logits[-1].argmax())


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("config", ALL_WAYS.values(), ids=ALL_WAYS)
@pytest.mark.parametrize("name", CORE)
def test_invariant_1_for_every_selector_and_store(name: str, config: BlendConfig, store: str, tmp_path: Path) -> None:
    layout = make_layout()
    blend = blended(decoder(name), layout, config, store=make_store(store, tmp_path))
    dense = dense_prefill(eager_model(name), layout.token_ids)
    assert_dense(blend.logits, cache_of(blend), dense)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_prefill_is_the_models_own(name: str) -> None:
    layout = make_layout()
    full = full_prefill(decoder(name), layout)
    assert_close(full.logits[0], dense_prefill(eager_model(name), layout.token_ids).logits[-1])


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_2_one_chunk_after_its_prefix_is_exact(name: str, length: int) -> None:
    layout = make_layout(chunks=(length,))
    blend = blended(decoder(name), layout, BlendConfig("hkvd", ratio=0.0))
    dense = dense_prefill(eager_model(name), layout.token_ids)
    assert blend.hits == (True,)
    assert blend.rows_recomputed == len(layout.suffix)
    assert_dense(blend.logits, cache_of(blend), dense)


@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_3_layer_0_of_repositioned_chunks_is_exact(name: str) -> None:
    layout = make_layout()
    blend = blended(decoder(name), layout, BlendConfig(selector="none"))
    keys, values = cache_of(blend)[0]
    expected = dense_prefill(eager_model(name), layout.token_ids).layers[0]
    assert_close(keys, expected[0])
    assert_close(values, expected[1])


@pytest.mark.parametrize(("name", "dtype"), IN_BOTH_DTYPES)
def test_invariant_3_every_layer_of_a_repositioned_chunk_is_what_the_model_computes_there(
    name: str, dtype: torch.dtype
) -> None:
    layout = make_layout()
    blend = blended(decoder(name, dtype), layout, BlendConfig(selector="none"))
    reused = dense_reuse(eager_model(name, dtype), layout.prefix, layout.chunks, len(layout.suffix))
    context = layout.context
    for got, expected in zip(cache_of(blend), reused, strict=True):
        for part, wanted in zip(got, expected, strict=True):
            assert_close(part[:, :, : context.stop], wanted[:, :, : context.stop])


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_reuse_is_not_full_recompute(name: str) -> None:
    """The invariants above could not fail on models whose context does not matter."""
    layout = make_layout()
    reused = dense_reuse(eager_model(name), layout.prefix, layout.chunks, len(layout.suffix))
    suffix = torch.arange(layout.context.stop, layout.rows)
    dense = dense_blend(eager_model(name), layout.token_ids, reused, [suffix] * len(reused))
    full = dense_prefill(eager_model(name), layout.token_ids)
    assert (dense.logits[-1] - full.logits[-1]).abs().max() > 0.01 * full.logits[-1].abs().max()
