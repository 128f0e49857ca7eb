"""Invariant 8: decoding from a blended cache is what `model.generate` decodes from the same cache."""

from typing import Any

import pytest
import torch
from blends import filled, greedy, greedy_by_transformers, transformers_cache
from cases import SELECTORS, blended, cache_of, make_layout
from models import CORE, FAMILIES, WIDE, decoder, tokenizer

from blend.model.decoder import full_prefill
from blend.model.generate import generate, logits_processors, teacher_forced_logits
from blend.prefill.blender import Blend
from blend.sampling import Sampling

NEW = 8


def _theirs(blend: Blend, cache: Any, **options: Any) -> tuple[int, ...]:
    options[blend.decoder.cache_argument] = cache
    return greedy_by_transformers(blend.decoder, blend.layout.token_ids, NEW, **options)


def _ours(blend: Blend, **options: Any) -> tuple[int, ...]:
    blend.rewind()
    return greedy(blend, NEW, **options)


@pytest.mark.parametrize(
    ("name", "selector"),
    [*((name, "hkvd") for name in (*CORE, *WIDE)), *(("llama", one) for one in ("first_k", "mixed", "none"))],
)
def test_invariant_8_greedy_decoding_is_that_of_model_generate(name, selector):
    blend = blended(decoder(name), make_layout(), SELECTORS[selector])
    clone = blend.cache.clone()
    clone.truncate(blend.layout.rows - 1)
    expected = _theirs(blend, transformers_cache(cache_of(blend)))
    assert len(expected) == NEW
    assert _theirs(blend, clone) == expected
    assert _ours(blend) == expected
    assert expected[0] == blend.first_token


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_after_full_prefill_is_model_generate(name):
    dec, layout = decoder(name), make_layout()
    full = generate(dec, full_prefill(dec, layout), layout.token_ids, max_new_tokens=NEW, eos_token_id=None)
    every = blended(dec, layout, SELECTORS["all"])
    assert full.token_ids == _theirs(every, None) == _ours(every)


@pytest.fixture
def blend() -> Blend:
    return blended(decoder("llama"), make_layout(), SELECTORS["hkvd"])


def test_decoding_stops_at_the_end_of_sequence_token(blend):
    answer = _ours(blend)
    stop = answer[4]
    expected = answer[: answer.index(stop) + 1]
    assert _ours(blend, eos_token_id=stop) == expected
    assert _theirs(blend, transformers_cache(cache_of(blend)), eos_token_id=stop) == expected
    assert _ours(blend, eos_token_id=[stop, 2]) == expected


@pytest.mark.parametrize("count", [1, 2, NEW])
def test_max_new_tokens_counts_the_first_token(count, blend):
    answer = _ours(blend)
    blend.rewind()
    generation = generate(blend.decoder, blend, blend.layout.token_ids, max_new_tokens=count, eos_token_id=None)
    assert generation.token_ids == answer[:count]
    assert (generation.tpot_s is None) == (count == 1)
    # The last token is chosen, never run.
    assert blend.cache.get_seq_length() == blend.layout.rows + count - 1


def test_streamed_pieces_join_to_the_text(blend):
    pieces: list[str] = []
    generation = generate(
        blend.decoder, blend, blend.layout.token_ids, max_new_tokens=NEW, on_text=pieces.append, eos_token_id=None
    )
    text = tokenizer().decode(list(generation.token_ids), skip_special_tokens=True)
    assert "".join(pieces).strip() == generation.text == text
    assert len(pieces) > 1


def test_sampling_repeats_with_its_seed_and_honours_the_options_of_generate(blend):
    def sample(seed: int, **options: object) -> tuple[int, ...]:
        torch.manual_seed(seed)
        return _ours(blend, do_sample=True, **options)

    answer = _ours(blend)
    with torch.random.fork_rng():
        assert sample(1, temperature=2.0) == sample(1, temperature=2.0)
        assert len({sample(seed, temperature=2.0) for seed in range(6)}) > 1
        assert sample(1, top_k=1) == answer
    assert answer[1] not in _ours(blend, suppress_tokens=[answer[1]])


def test_a_request_replaces_what_its_model_samples_with(monkeypatch):
    dec = decoder("llama")
    for name, value in {"temperature": 0.5, "top_k": 2, "top_p": 0.1, "min_p": 0.9}.items():
        monkeypatch.setattr(dec.model.generation_config, name, value)
    logits = torch.linspace(-1, 1, dec.vocabulary)[None]
    ids = torch.tensor([make_layout().token_ids])
    torch.testing.assert_close(logits_processors(dec, Sampling(temperature=1.25), ids)(ids, logits), logits / 1.25)


def test_decoding_grows_past_the_room_without_a_difference():
    layout = make_layout()
    blender = filled(decoder("qwen2"), layout, SELECTORS["hkvd"])
    roomy, tight = blender.prefill(layout), blender.prefill(layout, room=0)
    assert all(layer.capacity == layout.rows for layer in tight.cache.layers)
    assert _ours(tight) == _ours(roomy)


@pytest.mark.parametrize("name", [*CORE, "gemma3n", "deepseek-v3"])
def test_teacher_forcing_gives_the_logits_of_decoding(name):
    blend = blended(decoder(name), make_layout(), SELECTORS["hkvd"])
    answer = _ours(blend)
    blend.rewind()
    logits = teacher_forced_logits(blend, answer)
    assert logits.shape == (NEW, blend.logits.shape[1])
    assert tuple(logits.argmax(-1).tolist()) == answer
    blend.rewind()
    assert torch.equal(teacher_forced_logits(blend, answer[:1]), blend.logits.float())
    assert teacher_forced_logits(blend, ()).shape[0] == 0
