"""The invariants on the default model's real weights and real text."""

from typing import NamedTuple

import pytest
import torch
from cases import cache_chunks, cache_of, recorded
from dense_reference import Dense, LayerKV, assert_dense, dense_blend, dense_prefill, dense_reuse
from transformers.cache_utils import Cache, DynamicLayer

from blend.config import BlendConfig, PromptConfig
from blend.model.cache import cache_argument
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.prefill.blender import Blender
from blend.prompt import PromptTemplate
from blend.store import ChunkStore, open_store
from blend.types import PromptLayout

pytestmark = pytest.mark.real

# Rotations by float32 angles, and 24 layers of float32 sums in other orders.
TOLERANCE = 2e-3


class Passage(NamedTuple):
    title: str
    text: str


PASSAGES = (
    Passage(
        "The lighthouse", "The lighthouse of Varn was built in 1874 by Ida Holm. Its lamp burned whale oil until 1911."
    ),
    Passage("The keeper", "Tomas lived there for twenty-six years and kept a journal of the ships."),
    Passage("", "Ships bound for Varn came home with salt, glass and letters."),
)
PROMPT = PromptConfig(
    system="Answer from the documents.", instruction="Documents:\n\n", question="Question: {question}"
)
QUESTION = "When was the lighthouse built?"
CONFIGS = {
    "hkvd": BlendConfig("hkvd", ratio=0.15),
    "first_k": BlendConfig(selector="first_k", ratio=0.15),
    "mixed": BlendConfig(selector="mixed", ratio=0.15),
}


@pytest.fixture(scope="module")
def layout(real_decoder: Decoder) -> PromptLayout:
    return PromptTemplate(real_decoder.tokenizer, PROMPT).layout(QUESTION, PASSAGES)


@pytest.fixture(scope="module")
def store(real_decoder: Decoder, layout: PromptLayout) -> ChunkStore:
    """Holds every chunk of the prompt."""
    store = open_store("memory:")
    cache_chunks(Blender(real_decoder, store), layout)
    return store


@pytest.fixture(scope="module")
def full(real_decoder: Decoder, layout: PromptLayout) -> Dense:
    return dense_prefill(real_decoder.model, layout.token_ids)


@pytest.fixture(scope="module")
def reused(real_decoder: Decoder, layout: PromptLayout) -> list[LayerKV]:
    return dense_reuse(real_decoder.model, layout.prefix, layout.chunks, len(layout.suffix))


def test_invariant_1_ratio_one_is_full_recompute(real_decoder, layout, store, full):
    blend = Blender(real_decoder, store).prefill(layout, config=BlendConfig("hkvd", ratio=1.0))
    assert all(blend.hits)
    assert_dense(blend.logits, cache_of(blend), full, TOLERANCE)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_invariant_4_the_selective_forward_is_the_dense_reference(real_decoder, layout, store, reused, config):
    blend, _, rows_by_layer = recorded(real_decoder, layout, config, cached=(), store=store)
    assert 0 < blend.rows_recomputed < 0.7 * layout.rows
    dense = dense_blend(real_decoder.model, layout.token_ids, reused, rows_by_layer)
    assert_dense(blend.logits, cache_of(blend), dense, TOLERANCE)


def test_invariant_8_greedy_decoding_is_that_of_model_generate(real_decoder, layout, store):
    blend = Blender(real_decoder, store).prefill(layout, config=BlendConfig("hkvd", ratio=0.15))
    layers = []
    for keys, values in cache_of(blend):
        layer = DynamicLayer()
        layer.update(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
        layers.append(layer)
    ids = torch.tensor([layout.token_ids])
    expected = real_decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        **{cache_argument(real_decoder.model): Cache(layers=layers)},
    )[0, ids.shape[1] :]
    pieces: list[str] = []
    ours = generate(real_decoder, blend, layout.token_ids, max_new_tokens=16, on_text=pieces.append)
    assert ours.token_ids == tuple(expected.tolist())
    assert "".join(pieces).strip() == ours.text
    assert "1874" in ours.text
