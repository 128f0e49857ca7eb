"""Sampling parameters: each against HuggingFace's generate or its formula, computed here from whole forward passes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from cases import make_layout
from engines import FEW, MakeEngine, ask
from models import decoder
from served import Served
from transformers import WatermarkingConfig

from blend.errors import ConfigError
from blend.layout import PromptLayout
from blend.model.generate import logits_processors
from blend.sampling import Sampling
from blend.serve.engine.decoding import Sampler
from blend.serve.prompt import Prompt

LONG = Sampling(max_tokens=40, ignore_eos=True)
DRAWS = 4000


def plain_layout() -> PromptLayout:
    ids = make_layout().token_ids
    return PromptLayout.of_chunks(ids[:1], (), ids[1:])


def formula(sampling: Sampling) -> list[int]:
    """A greedy answer by the definitions of OpenAI and vLLM; every token from a forward pass over all before it."""
    model, prompt, answer = decoder("llama").model, list(plain_layout().token_ids), list[int]()
    for _ in range(sampling.max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, -1].float().tolist()
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        for token in {*prompt, *answer}:
            penalty = sampling.repetition_penalty or 1.0
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token, count in Counter(answer).items():
            logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        answer.append(max(range(len(logits)), key=logits.__getitem__))
    return answer


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -0.5, "presence_penalty": 0.5},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.2},
        {"logit_bias": {5: 100, 7: -100}},
        {"logit_bias": {3: 0.4, 9: 0.5}, "repetition_penalty": 1.2, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_greedy_answers_follow_the_formulas(given: dict[str, Any], make_engine: MakeEngine) -> None:
    sampling = replace(LONG, **given)
    tokens = ask(make_engine(), plain_layout(), sampling).wait().tokens
    assert tokens == formula(sampling)
    assert (tokens == formula(LONG)) == (not given)


def test_a_request_replaces_the_models_penalty(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(decoder("llama").model.generation_config, "repetition_penalty", 1.3)
    assert ask(engine, plain_layout(), LONG).wait().tokens == formula(replace(LONG, repetition_penalty=1.3))
    assert ask(engine, plain_layout(), replace(LONG, repetition_penalty=1.0)).wait().tokens == formula(LONG)


WITHOUT_EFFECT = {"remove_invalid_values", "renormalize_logits"}
ENDS_AT_ONCE = {"sequence_bias": [[[2], 50.0]], "eos_token_id": 2}


@pytest.fixture
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of the model's `generation_config`, which has them during the test."""
    for name, value in request.param.items():
        monkeypatch.setattr(decoder("llama").model.generation_config, name, value)
    return request.param


def generated(**options: Any) -> Any:
    """The answer of `model.generate`."""
    ids = torch.tensor([plain_layout().token_ids])
    options = {"max_new_tokens": 12, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    return decoder("llama").model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.mark.parametrize(
    "settings",
    [
        ENDS_AT_ONCE,
        {"begin_suppress_tokens": [48, 71]},
        {"bad_words_ids": [[71], [48, 82]]},
        {**ENDS_AT_ONCE, "min_new_tokens": 5},
        {**ENDS_AT_ONCE, "min_length": plain_layout().rows + 3},
        {"forced_eos_token_id": 2, "eos_token_id": 2},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"exponential_decay_length_penalty": (2, 1.9), "eos_token_id": 2},
        {"remove_invalid_values": True, "renormalize_logits": True},
        {"sequence_bias": [[[48], -3.0], [[82, 48], -20.0]]},
        {"guidance_scale": 1.5},
        {"watermarking_config": WatermarkingConfig(bias=4.0)},
    ],
    ids=str,
    indirect=True,
)
def test_the_models_settings_apply_as_in_generate(settings: dict[str, Any]) -> None:
    expected = generated(do_sample=False).sequences[0, plain_layout().rows :].tolist()
    prompt = Prompt.of(plain_layout(), sampling=Sampling(max_tokens=12))
    sampler, answer = Sampler(decoder("llama"), prompt), list[int]()
    while len(answer) < 12 and not (answer and sampler.ends(answer[-1])):
        with torch.inference_mode():
            logits = decoder("llama").model(torch.tensor([[*plain_layout().token_ids, *answer]])).logits[0, -1]
        answer.append(sampler.read(sampler.choose(logits)).id)
    assert answer == expected
    assert (answer == formula(replace(LONG, max_tokens=12))) == (settings.keys() <= WITHOUT_EFFECT)


@pytest.mark.parametrize(
    "settings",
    [{"typical_p": 0.6}, {"epsilon_cutoff": 0.01}, {"eta_cutoff": 0.05}, {"top_h": 0.5}, {"suppress_tokens": [30, 44]}],
    ids=str,
    indirect=True,
)
def test_the_models_settings_narrow_sampling_as_in_generate(settings: dict[str, Any]) -> None:
    ids, model = torch.tensor([plain_layout().token_ids]), decoder("llama").model
    own = {"top_k": 0, "top_p": 0.9, "temperature": 1.3}
    expected = generated(do_sample=True, max_new_tokens=1, output_scores=True, **own).scores[0]
    processors = logits_processors(decoder("llama"), Sampling(**own), ids)
    with torch.inference_mode():
        scores = processors(ids, model(ids).logits[:, -1].float())
    torch.testing.assert_close(scores, expected)
    assert (scores == -torch.inf).any()


DRAWN: list[dict[str, Any]] = [
    *({"top_k": 5}, {"top_k": 10**9}, {"top_k": -1}, {"top_k": 6, "top_p": 0.6}),
    *({"temperature": 2.0, "min_p": 0.3}, {"min_p": 0.02, "top_k": 30, "top_p": 0.9, "temperature": 0.7}),
]


@pytest.mark.parametrize("given", DRAWN, ids=str)
def test_drawn_tokens_follow_the_distribution(given: dict[str, Any]) -> None:
    logits = torch.randn(97, generator=torch.Generator().manual_seed(3)) * 2
    sampling = Sampling(seed=1, **{"temperature": 1.0, **given})
    chances = (logits.double() / sampling.temperature).softmax(-1).tolist()
    kept = sorted(range(97), key=lambda token: -chances[token])
    kept = [token for token in kept if chances[token] >= sampling.min_p * max(chances)]
    kept = kept[: sampling.top_k] if sampling.top_k > 0 else kept
    whole, before, nucleus = sum(chances[token] for token in kept), 0.0, list[int]()
    for token in kept:
        nucleus += [token] if before < sampling.top_p * whole else []
        before += chances[token]
    mass = sum(chances[token] for token in nucleus)
    sampler = Sampler(decoder("llama"), Prompt.of(plain_layout(), sampling=sampling))
    drawn = Counter(sampler.read(sampler.choose(logits)).id for _ in range(DRAWS))
    assert drawn.keys() <= set(nucleus)
    distance = sum(abs(drawn[token] / DRAWS - chances[token] / mass) for token in nucleus) / 2
    assert distance < 0.06
    assert len(nucleus) < 97 or sampling.top_k in (-1, 10**9)


def test_log_probabilities_are_those_before_sampling_parameters(make_engine: MakeEngine) -> None:
    engine, layout = make_engine(), plain_layout()
    free = ask(engine, layout, replace(FEW, logprobs=3)).wait().first
    changed = {"temperature": 1.7, "top_k": 2, "presence_penalty": 2.0, "logit_bias": {free.id: -100}, "seed": 4}
    bound = ask(engine, layout, replace(FEW, logprobs=3, **changed)).wait().first
    assert bound.id in (free.top[1].id, free.top[2].id)
    expected = {one.id: one.logprob for one in free.top}
    assert {one.id: one.logprob for one in bound.top} == pytest.approx(expected, abs=1e-5)
    assert bound.logprob == pytest.approx(expected[bound.id], abs=1e-5)


@pytest.mark.parametrize("wrong", [{"temperature": float("nan")}, {"top_p": 1.5}, {"logit_bias": {3: 101}}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_over_http(http: httpx.Client, served: Served, path: str) -> None:
    said = "When did the harbour open?"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": said}]} if "chat" in path else {"prompt": said}

    def answer(**fields: Any) -> str:
        response = http.post(path, json={**asked, "max_tokens": 16, "ignore_eos": True, **fields})
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return str(choice["message"]["content"] if "chat" in path else choice["text"])

    greedy = answer()
    assert answer(temperature=1.5, top_k=1) == greedy
    assert answer(temperature=1.5, min_p=1.0) == greedy
    assert answer(top_k=-1, min_p=0, presence_penalty=0, frequency_penalty=0.0, logit_bias={}) == greedy
    tokenizer = served.state.service.tenant("").rag().decoder.tokenizer
    (forced,) = tokenizer.encode("The", add_special_tokens=False)[:1]
    assert answer(logit_bias={str(forced): 100}) == tokenizer.decode([forced] * 16)
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert answer(**{penalty: 1.8}) != greedy
    nothing = [f"\x00{number}" for number in range(31)]
    assert answer(stop=nothing) == greedy
    assert answer(stop=[*nothing, greedy[5:8]]) == greedy[: greedy.index(greedy[5:8])]
