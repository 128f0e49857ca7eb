"""The invariants on the default model's real weights and real text."""

import pytest
from blends import Passage, assert_dense_blend, greedy_by_transformers, transformers_cache
from cases import cache_chunks, cache_of, recorded
from dense_reference import assert_dense, dense_prefill

from blend.config import BlendConfig, PromptConfig
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.prefill.blender import Blender
from blend.prompt_template import PromptTemplate
from blend.store import ChunkStore, open_store

pytestmark = pytest.mark.real

# Rotations by float32 angles, and 24 layers of float32 sums in other orders.
TOLERANCE = 2e-3


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


@pytest.fixture(scope="module")
def layout(real_decoder: Decoder) -> PromptLayout:
    return PromptTemplate(real_decoder.tokenizer, PROMPT).layout(QUESTION, PASSAGES)


@pytest.fixture(scope="module")
def store(real_decoder: Decoder, layout: PromptLayout) -> ChunkStore:
    """Holds every chunk of the prompt."""
    return cache_chunks(Blender(real_decoder, open_store("memory:")), layout).store


def test_invariant_1_ratio_one_is_full_recompute(real_decoder, layout, store):
    blend = Blender(real_decoder, store).prefill(layout, config=BlendConfig("hkvd", ratio=1.0))
    assert all(blend.hits)
    dense = dense_prefill(real_decoder.model, layout.token_ids)
    assert_dense(blend.logits, cache_of(blend), dense, TOLERANCE)


@pytest.mark.parametrize("selector", ["hkvd", "first_k", "mixed"])
def test_invariant_4_the_selective_forward_is_the_dense_reference(real_decoder, layout, store, selector):
    config = BlendConfig(selector, ratio=0.15)
    prefill = recorded(real_decoder, layout, config, cached=(), store=store)
    assert 0 < prefill.blend.rows_recomputed < 0.7 * layout.rows
    assert_dense_blend(real_decoder.model, prefill, TOLERANCE)


def test_invariant_8_greedy_decoding_is_that_of_model_generate(real_decoder, layout, store):
    blend = Blender(real_decoder, store).prefill(layout, config=BlendConfig("hkvd", ratio=0.15))
    cache = {real_decoder.cache_argument: transformers_cache(cache_of(blend))}
    expected = greedy_by_transformers(real_decoder, layout.token_ids, 16, **cache)
    pieces: list[str] = []
    ours = generate(real_decoder, blend, layout.token_ids, max_new_tokens=16, on_text=pieces.append, eos_token_id=None)
    assert ours.token_ids == expected
    assert "".join(pieces).strip() == ours.text
    assert "1874" in ours.text
