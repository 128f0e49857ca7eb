"""The invariants on the default model's real weights and real text."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from cases import blended, cache_of, recorded
from dense import assert_close, dense_blend, dense_prefill, dense_reuse
from transformers.cache_utils import Cache, DynamicLayer

from blend.config import BlendConfig
from blend.decoder import Decoder
from blend.generate import generate
from blend.prompt import PromptTemplate
from blend.types import PromptLayout

pytestmark = pytest.mark.real

# Rotations by float32 angles, and 24 layers of float32 sums in other orders.
TOLERANCE = 2e-3


class Passage(NamedTuple):
    title: str
    text: str


PASSAGES = (
    Passage(
        "The lighthouse",
        "The lighthouse of Varn was built in 1874 by the engineer Ida Holm. Its lamp burned whale oil until 1911, when the "
        "keeper, a former sailor named Tomas, had it replaced by an electric arc.",
    ),
    Passage(
        "The keeper",
        "He lived there with his sister for twenty-six years and kept a daily journal of the ships that passed.",
    ),
    Passage("", "Ships bound for Varn carried timber on the way out and came home with salt, glass and letters."),
)
QUESTION = "When was the lighthouse built?"
CONFIGS = {
    "hkvd": BlendConfig(ratio=0.15),
    "first_k": BlendConfig(selector="first_k", ratio=0.15),
    "mixed": BlendConfig(selector="mixed", ratio=0.15),
}


@cache
def _layout(decoder: Decoder) -> PromptLayout:
    return PromptTemplate(decoder.tokenizer).layout(QUESTION, PASSAGES)


@pytest.fixture
def layout(real_decoder: Decoder) -> PromptLayout:
    return _layout(real_decoder)


def test_invariant_1_ratio_one_is_full_recompute(real_decoder: Decoder, layout: PromptLayout) -> None:
    blend = blended(real_decoder, layout, BlendConfig(ratio=1.0))
    dense = dense_prefill(real_decoder.model, layout.token_ids)
    assert all(blend.hits)
    assert_close(blend.logits[0], dense.logits[-1], TOLERANCE)
    for got, expected in zip(cache_of(blend), dense.layers, strict=True):
        assert_close(got[0], expected[0], TOLERANCE)
        assert_close(got[1], expected[1], TOLERANCE)


def test_invariant_2_one_chunk_after_its_prefix_is_exact(real_decoder: Decoder, layout: PromptLayout) -> None:
    alone = PromptLayout(layout.prefix, layout.chunks[:1], layout.suffix)
    blend = blended(real_decoder, alone, BlendConfig(ratio=0.0))
    dense = dense_prefill(real_decoder.model, alone.token_ids)
    assert blend.rows_recomputed == len(alone.suffix)
    assert_close(blend.logits[0], dense.logits[-1], TOLERANCE)
    for got, expected in zip(cache_of(blend), dense.layers, strict=True):
        assert_close(torch.cat(got), torch.cat(expected), TOLERANCE)


def test_invariant_3_layer_0_of_repositioned_chunks_is_exact(real_decoder: Decoder, layout: PromptLayout) -> None:
    blend = blended(real_decoder, layout, BlendConfig(selector="none"))
    expected = dense_prefill(real_decoder.model, layout.token_ids).layers[0]
    for got, wanted in zip(cache_of(blend)[0], expected, strict=True):
        assert_close(got, wanted, TOLERANCE)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_invariant_4_the_selective_forward_is_the_dense_reference(
    real_decoder: Decoder, layout: PromptLayout, config: BlendConfig
) -> None:
    blend, _, rows_by_layer = recorded(real_decoder, layout, config)
    assert 0 < blend.rows_recomputed < layout.rows / 2
    reused = dense_reuse(real_decoder.model, layout.prefix, layout.chunks, len(layout.suffix))
    dense = dense_blend(real_decoder.model, layout.token_ids, reused, rows_by_layer)
    assert_close(blend.logits[0], dense.logits[-1], TOLERANCE)
    for got, expected in zip(cache_of(blend), dense.layers, strict=True):
        assert_close(got[0], expected[0], TOLERANCE)
        assert_close(got[1], expected[1], TOLERANCE)


def test_invariant_8_greedy_decoding_is_that_of_model_generate(real_decoder: Decoder, layout: PromptLayout) -> None:
    blend = blended(real_decoder, layout, BlendConfig(ratio=0.15))
    layers = []
    for keys, values in cache_of(blend):
        layer = DynamicLayer()
        layer.update(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
        layers.append(layer)
    ids = torch.tensor([layout.token_ids])
    expected = real_decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=Cache(layers=layers),
        max_new_tokens=12,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
    )[0, ids.shape[1] :]
    pieces: list[str] = []
    ours = generate(real_decoder, blend, layout.token_ids, max_new_tokens=12, on_text=pieces.append)
    assert ours.token_ids == tuple(expected.tolist())
    assert "".join(pieces).strip() == ours.text
    assert "1874" in ours.text
