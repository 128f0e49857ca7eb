"""Invariant 8: decoding from a blended cache is what `model.generate` decodes from the same cache."""

import pytest
import torch
from cases import SELECTORS, blended, cache_chunks, cache_of, make_layout
from models import CORE, FAMILIES, WIDE, decoder, tokenizer
from transformers.cache_utils import Cache, DynamicLayer

from blend.model.cache import cache_argument
from blend.model.decoder import Decoder, full_prefill
from blend.model.generate import generate, teacher_forced_logits
from blend.prefill.blender import Blend, Blender
from blend.store import open_store

NEW = 8


def _hf_cache(blend: Blend) -> Cache:
    """The blended KV in transformers' own cache, but for the last row, which `model.generate` computes again."""
    layers = []
    for keys, values in cache_of(blend):
        layer = DynamicLayer()
        layer.update(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
        layers.append(layer)
    return Cache(layers=layers)


def _hf_greedy(blend: Blend, cache: Cache, **options: object) -> tuple[int, ...]:
    ids = torch.tensor([blend.layout.token_ids])
    out = blend.decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        **{cache_argument(blend.decoder.model): cache},
        **options,
    )
    return tuple(out[0, ids.shape[1] :].tolist())


def _ours(blend: Blend, **options: object) -> tuple[int, ...]:
    blend.rewind()
    return generate(blend.decoder, blend, blend.layout.token_ids, max_new_tokens=NEW, **options).token_ids  # type: ignore[arg-type]


def _check(name: str, selector: str) -> None:
    blend = blended(decoder(name), make_layout(), SELECTORS[selector])
    clone = blend.cache.clone()
    clone.truncate(blend.layout.rows - 1)
    # No stop: the comparison is over NEW tokens in every case.
    expected = _hf_greedy(blend, _hf_cache(blend), eos_token_id=None)
    assert len(expected) == NEW
    assert _hf_greedy(blend, clone, eos_token_id=None) == expected
    ours = _ours(blend, eos_token_id=None)
    assert ours == expected
    assert ours[0] == blend.first_token


@pytest.mark.parametrize(
    ("name", "selector"),
    [*((name, "hkvd") for name in CORE), *(("llama", one) for one in ("first_k", "mixed", "none"))],
)
def test_invariant_8_greedy_decoding_is_that_of_model_generate(name, selector):
    _check(name, selector)


@pytest.mark.parametrize("name", WIDE)
def test_invariant_8_in_many_families(name):
    _check(name, "hkvd")


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_after_full_prefill_is_model_generate(name):
    dec, layout = decoder(name), make_layout()
    ids = torch.tensor([layout.token_ids])
    expected = dec.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )[0, layout.rows :]
    full = full_prefill(dec, layout)
    ours = generate(dec, full, layout.token_ids, max_new_tokens=NEW, eos_token_id=None)
    assert ours.token_ids == tuple(expected.tolist())
    every = blended(dec, layout, SELECTORS["all"])
    assert _ours(every, eos_token_id=None) == ours.token_ids


def _answer() -> tuple[Decoder, Blend, tuple[int, ...]]:
    blend = blended(decoder("llama"), make_layout(), SELECTORS["hkvd"])
    return blend.decoder, blend, _ours(blend, eos_token_id=None)


def test_decoding_stops_at_the_end_of_sequence_token():
    _, blend, answer = _answer()
    stop = answer[4]
    expected = answer[: answer.index(stop) + 1]
    assert _ours(blend, eos_token_id=stop) == expected
    assert _hf_greedy(blend, _hf_cache(blend), eos_token_id=stop) == expected
    assert _ours(blend, eos_token_id=[stop, 2]) == expected


@pytest.mark.parametrize("count", [1, 2, NEW])
def test_max_new_tokens_counts_the_first_token(count):
    dec, blend, answer = _answer()
    blend.rewind()
    generation = generate(dec, blend, blend.layout.token_ids, max_new_tokens=count, eos_token_id=None)
    assert generation.token_ids == answer[:count]
    assert (generation.tpot_s is None) == (count == 1)
    # The last token is chosen, never run.
    assert blend.cache.get_seq_length() == blend.layout.rows + count - 1


def test_streamed_pieces_join_to_the_text():
    dec, blend, answer = _answer()
    blend.rewind()
    pieces: list[str] = []
    generation = generate(
        dec, blend, blend.layout.token_ids, max_new_tokens=NEW, on_text=pieces.append, eos_token_id=None
    )
    assert "".join(pieces).strip() == generation.text == tokenizer().decode(list(answer), skip_special_tokens=True)
    assert len(pieces) > 1


def test_sampling_repeats_with_its_seed_and_honours_the_options_of_generate():
    _, blend, answer = _answer()

    def sample(seed: int, **options: object) -> tuple[int, ...]:
        torch.manual_seed(seed)
        return _ours(blend, do_sample=True, eos_token_id=None, **options)

    with torch.random.fork_rng():
        assert sample(1, temperature=2.0) == sample(1, temperature=2.0)
        assert len({sample(seed, temperature=2.0) for seed in range(6)}) > 1
        assert sample(1, top_k=1) == answer
    assert answer[1] not in _ours(blend, suppress_tokens=[answer[1]], eos_token_id=None)


def test_decoding_grows_past_the_room_without_a_difference():
    dec, layout = decoder("qwen2"), make_layout()
    blender = cache_chunks(Blender(dec, open_store("memory:"), SELECTORS["hkvd"]), layout)
    expected, tight = _ours(blender.prefill(layout), eos_token_id=None), blender.prefill(layout, room=0)
    assert all(layer.capacity == layout.rows for layer in tight.cache.layers)
    assert _ours(tight, eos_token_id=None) == expected


@pytest.mark.parametrize("name", [*CORE, "gemma3n", "deepseek-v3"])
def test_teacher_forcing_gives_the_logits_of_decoding(name):
    blend = blended(decoder(name), make_layout(), SELECTORS["hkvd"])
    answer = _ours(blend, eos_token_id=None)
    blend.rewind()
    logits = teacher_forced_logits(blend, answer)
    assert logits.shape == (NEW, blend.logits.shape[1])
    assert tuple(logits.argmax(-1).tolist()) == answer
    blend.rewind()
    assert torch.equal(teacher_forced_logits(blend, answer[:1]), blend.logits.float())
    assert teacher_forced_logits(blend, ()).shape[0] == 0
