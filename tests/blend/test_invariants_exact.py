"""Invariants 1 to 3: where blended prefill must be full recompute, and where stored KV must be its KV."""

import pytest
import torch
from blends import assert_kv
from cases import STORES, blended, cache_of, make_layout, make_store
from dense_reference import assert_dense, dense_prefill, dense_reuse
from models import CORE, FAMILIES, IN_BOTH_DTYPES, decoder, eager_model

from blend.config import BlendConfig

ALL_WAYS = {
    "hkvd at ratio 1": BlendConfig("hkvd", ratio=1.0),
    "first_k at ratio 1": BlendConfig(selector="first_k", ratio=1.0),
    "random at ratio 1": BlendConfig(selector="random", ratio=1.0),
    "all": BlendConfig(selector="all", ratio=0.0),
    "bottom-right": BlendConfig("hkvd", ratio=1.0, mask="bottom-right"),
}


@pytest.mark.parametrize(
    ("name", "dtype", "way", "store"),
    [
        *((*case.values, "hkvd at ratio 1", "memory") for case in IN_BOTH_DTYPES),
        *(("llama", torch.float32, way, "memory") for way in ALL_WAYS),
        *((name, torch.float32, "all", "memory") for name in CORE if name != "llama"),
        *(("mistral", torch.float32, "random at ratio 1", store) for store in STORES),
    ],
)
def test_invariant_1_ratio_one_is_full_recompute(name, dtype, way, store, tmp_path):
    layout = make_layout()
    blend = blended(decoder(name, dtype), layout, ALL_WAYS[way], store=make_store(store, tmp_path))
    dense = dense_prefill(eager_model(name, dtype), layout.token_ids)
    assert all(blend.hits)
    assert_dense(blend.logits, cache_of(blend), dense)
    if dtype is torch.float32:  # rounding decides between two likely tokens in bfloat16
        assert blend.first_token == int(dense.logits[-1].argmax())


@pytest.mark.parametrize(
    ("name", "length"), [*((name, 20) for name in FAMILIES), *(("mistral", length) for length in (1, 3))]
)
def test_invariant_2_one_chunk_after_its_prefix_is_exact(name, length):
    layout = make_layout(chunks=(length,))
    blend = blended(decoder(name), layout, BlendConfig("hkvd", ratio=0.0))
    dense = dense_prefill(eager_model(name), layout.token_ids)
    assert blend.hits == (True,)
    assert blend.rows_recomputed == len(layout.suffix)
    assert_dense(blend.logits, cache_of(blend), dense)


@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_3_layer_0_of_repositioned_chunks_is_exact(name):
    layout = make_layout()
    blend = blended(decoder(name), layout, BlendConfig(selector="none"))
    assert_kv(cache_of(blend)[:1], dense_prefill(eager_model(name), layout.token_ids).layers[:1])


@pytest.mark.parametrize(("name", "dtype"), IN_BOTH_DTYPES)
def test_invariant_3_every_layer_of_a_repositioned_chunk_is_what_the_model_computes_there(name, dtype):
    layout = make_layout()
    blend = blended(decoder(name, dtype), layout, BlendConfig(selector="none"))
    reused = dense_reuse(eager_model(name, dtype), layout.prefix, layout.chunks, len(layout.suffix))
    assert_kv(cache_of(blend), reused, slice(layout.context.stop))
