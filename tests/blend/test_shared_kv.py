"""Layers that read the KV of earlier ones (Gemma 3n, Gemma 4): what is kept, what runs, and what is refused.

The invariants run on both families too (`models.FAMILIES`).
"""

from typing import Any

import pytest
import torch
from blends import consecutive, counted_rows, refused
from cases import blended, make_layout
from dense_reference import assert_close, dense_prefill
from models import CORE, LAYERS, build, decoder, eager_model, tokenizer

from blend.config import BlendConfig
from blend.errors import ConfigError, UnsupportedModelError
from blend.model.decoder import Decoder
from blend.model.outline import query_numbers
from blend.serve.engine.profile import PrefillProfile

SHARING = ("gemma3n", "gemma4")
KEPT = 2


@pytest.mark.parametrize("name", SHARING)
def test_only_layers_with_kv_of_their_own_are_kept(name):
    dec, layout = decoder(name), make_layout()
    assert (len(dec.layers), len(dec.rotations), len(dec.new_cache(3).layers)) == (LAYERS, KEPT, KEPT)
    blend = blended(dec, layout, BlendConfig(ratio=0.3))
    assert all(blend.hits)
    assert blend.selection.rows_per_layer == (blend.rows_recomputed,) * KEPT + (1,) * (LAYERS - KEPT)


@pytest.mark.parametrize("name", SHARING)
def test_the_layers_above_run_for_the_last_row_alone(name):
    dec, ids = decoder(name), torch.arange(3, 33)
    with counted_rows(dec) as counts:
        logits = dec.prefill([consecutive(ids[None], 0, dec.new_cache(30))])
    assert [counts[f"{layer}.self_attn.o_proj"] for layer in range(LAYERS)] == [[30], [1], [1], [1]]
    assert_close(logits[0], dense_prefill(eager_model(name), ids.tolist()).logits[-1])
    with counted_rows(dec) as counts:
        dec.encode_rows(ids[None], 0, dec.new_cache(30))
    assert [counts[f"{layer}.self_attn.o_proj"] for layer in range(LAYERS)] == [[30], [], [], []]


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("selector", ["hkvd:check_layer=2", "mixed:check_layer=3"])
def test_a_selector_that_looks_where_there_is_no_kv_is_refused(name, selector):
    with refused(ConfigError, r"layer \d has no KV: the model keeps KV in layers 0 to 1"):
        blended(decoder(name), make_layout(), BlendConfig(selector, ratio=0.3))


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("layers", ["0", "3", "all"])
def test_the_question_may_be_asked_in_every_layer(name, layers):
    layout = make_layout()
    blend = blended(decoder(name), layout, BlendConfig(f"query_guided:layers={layers}", ratio=0.3))
    assert blend.logits.isfinite().all()
    assert float(blend.selection.scores.sum()) > 0


def _forget(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do not show the KV to the cache."""
    return args, {name: None if "cache" in name or "past" in name else kwargs[name] for name in kwargs}


def test_a_layer_without_kv_below_others_is_refused():
    model = build(CORE["llama"])
    model.model.layers[1].self_attn.register_forward_pre_hook(_forget, with_kwargs=True)
    with refused(UnsupportedModelError, "llama: layers without a KV cache stand below"):
        Decoder(model, tokenizer(), "llama")


def test_attention_is_counted_though_heads_differ_from_layer_to_layer():
    """Gemma 4's global layers have larger heads: 4 of 16, then 4 of 32."""
    assert query_numbers(decoder("gemma4").config) == (4 * 16 + 4 * 32) / 2
    assert query_numbers(decoder("gemma3n").config) == 4 * 16
    PrefillProfile(decoder("gemma4")).measure()
