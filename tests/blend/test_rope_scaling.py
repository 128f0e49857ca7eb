"""RoPE variants: static scalings are moved exactly, frequencies that depend on length end where they begin to change."""

from functools import cache
from typing import Any

import pytest
from blends import assert_dense_blend
from cases import SELECTORS, make_layout, recorded
from models import FAMILIES, HEAD_DIM, build, tokenizer

from blend.errors import ContextLengthError
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.prefill.blender import Blender
from blend.store import open_store

THETA = {"rope_theta": 10_000.0}
HALF = HEAD_DIM // 2
ORIGINAL = 64
EIGHTFOLD = {"factor": 8.0, "original_max_position_embeddings": ORIGINAL, **THETA}
LONG = {"short_factor": [1.0] * HALF, "long_factor": [4.0] * HALF, "original_max_position_embeddings": ORIGINAL}
STATIC = {
    "default": {"rope_type": "default", **THETA},
    "large theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "yarn": {"rope_type": "yarn", **EIGHTFOLD},
    "yarn, attention factor 3": {"rope_type": "yarn", "attention_factor": 3.0, **EIGHTFOLD},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **EIGHTFOLD},
}
BY_LENGTH = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, **THETA},
    "longrope": {"rope_type": "longrope", **LONG, **THETA},
}
TWO_KINDS = {"full_attention": STATIC["yarn"], "sliding_attention": STATIC["default"]}


@cache
def _model(family: str, rope: str, **options: Any) -> Any:
    parameters = {**STATIC, **BY_LENGTH, "two kinds": TWO_KINDS}[rope]
    if rope == "dynamic":  # grows from the configuration's context on
        options["max_position_embeddings"] = ORIGINAL
    return build(FAMILIES[family], rope_parameters=parameters, **options)


@cache
def _decoder(family: str, rope: str) -> Decoder:
    return Decoder(_model(family, rope), tokenizer(), family)


def _check(family: str, rope: str) -> None:
    reference = _model(family, rope, attn_implementation="eager")
    assert_dense_blend(reference, recorded(_decoder(family, rope), make_layout(), SELECTORS["hkvd"]))


@pytest.mark.parametrize("rope", STATIC)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_static_scalings_are_moved_exactly(family, rope):
    _check(family, rope)


def test_local_and_global_layers_may_turn_differently():
    _check("gemma3", "two kinds")
    turns = [rotation.keys for rotation in _decoder("gemma3", "two kinds").rotations]
    assert len({tuple(turn.inv_freq.tolist()) for turn in turns if turn is not None}) == 2


@pytest.mark.parametrize("rope", BY_LENGTH)
def test_frequencies_that_depend_on_length_are_exact_up_to_the_original_context(rope):
    assert _decoder("llama", rope).context_length == ORIGINAL
    assert make_layout().rows <= ORIGINAL
    _check("llama", rope)


@pytest.mark.parametrize("rope", BY_LENGTH)
def test_an_answer_ends_with_the_original_context(rope):
    ids = (1, *range(3, ORIGINAL - 2))
    layout, dec = PromptLayout.of_chunks(ids[:4], (), ids[4:]), _decoder("llama", rope)
    blend = Blender(dec, open_store("memory:")).prefill(layout)
    answer = generate(dec, blend, ids, max_new_tokens=16, eos_token_id=None)
    assert len(answer.token_ids) == ORIGINAL - len(ids)
    with pytest.raises(ContextLengthError, match=f"reads at most {ORIGINAL}"):
        generate(dec, blend, (*ids, *answer.token_ids))


def test_length_dependent_frequencies_of_one_kind_of_layer_count_too():
    """Configurations with one entry per kind of layer."""
    parameters = {"full_attention": BY_LENGTH["longrope"], "sliding_attention": STATIC["default"]}
    dec = Decoder(build(FAMILIES["gemma3"], rope_parameters=parameters), tokenizer(), "gemma3")
    assert dec.context_length == ORIGINAL
