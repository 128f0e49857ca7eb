"""Several answers to one prompt, or to several: each answer as if it were alone, and one end for all."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
import torch
from cases import cache_chunks
from changing import until
from engines import FEW, Answer, MakeEngine, alone, ask, layouts, passes_of
from models import decoder
from served import Served

from blend.errors import PromptError
from blend.layout import PromptLayout
from blend.model.passes import RowRequest
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import EndReason, EngineFailedError, EngineStats, Event, Failed, Finished, Output, Started
from blend.serve.http.submission import JoinedPrompts
from blend.serve.prompt import Prompt

SAID = "When did the harbour open?"
USER: list[Any] = [{"role": "user", "content": SAID}]
DRAWN = Sampling(max_tokens=8, temperature=1.5, seed=7, ignore_eos=True)
ENDLESS = Sampling(max_tokens=300, ignore_eos=True, n=3)


def stored_prompt(engine: EmbeddedEngine) -> PromptLayout:
    layout = layouts(1)[0]
    cache_chunks(engine.blender, layout)
    return layout


def test_greedy_answers_are_equal_after_one_prefill(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(pass_rows=40)
    layout = stored_prompt(engine)
    expected, passes = alone(engine.blender, layout), passes_of(engine, monkeypatch)
    single = ask(engine, layout).wait()
    of_one, passes[:] = sum(map(sum, passes)), []
    answer = ask(engine, layout, replace(FEW, n=3)).wait()
    assert single.tokens == expected
    assert [answer.tokens_of(index) for index in range(3)] == [expected] * 3
    assert sum(isinstance(event, Started) for event in answer.events) == 1
    ends = [event for event in answer.events if isinstance(event, Finished)]
    assert ends == [Finished("length", 0, last=False), Finished("length", 1, last=False), Finished("length", 2)]
    assert sum(map(sum, passes)) == of_one + 2 * (FEW.max_tokens - 1)


def test_other_answers_go_on_while_they_begin(make_engine: MakeEngine) -> None:
    """Each needs a copy of the prompt's KV, which takes as long as a pass."""
    engine, order, done = make_engine(), list[int](), Answer()
    layout, other = stored_prompt(engine), Answer(lambda: order.append(-1))
    prompt = Prompt.of(layouts(2)[1], sampling=replace(ENDLESS, n=1))
    engine.submit(prompt, other)
    other.begun()

    def note(event: Event) -> None:
        order.extend([event.answer] if isinstance(event, Output) else [])
        done(event)

    engine.submit(Prompt.of(layout, sampling=replace(DRAWN, n=6)), note)
    done.wait()
    firsts = [order.index(index) for index in range(1, 6)]  # the first of them needs no copy
    assert all(-1 in order[start:stop] for start, stop in pairwise(firsts))
    prompt.request.cancelled.set()
    assert other.wait().end_reason == "cancelled"


@pytest.mark.parametrize("reason", ["cancelled", "shutdown"])
def test_they_end_together_with_one_event(make_engine: MakeEngine, reason: EndReason) -> None:
    engine, cancelled = make_engine(), threading.Event()
    answer = ask(engine, stored_prompt(engine), ENDLESS, cancelled=cancelled).begun()
    cancelled.set() if reason == "cancelled" else engine.close()
    assert [event for event in answer.wait().events if isinstance(event, Finished)] == [Finished(reason)]
    until(lambda: engine.stats()[:3] == (0, 0, 0))


def test_one_that_cannot_run_fails_the_request_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    layout = stored_prompt(engine)
    expected = alone(engine.blender, layout, Sampling(max_tokens=60))
    answer, other = ask(engine, layout, ENDLESS), ask(engine, layout, Sampling(max_tokens=60, ignore_eos=True))
    while len(answer.tokens) < 6 or not other.tokens:
        pass
    broken, prefill = answer.sequence.answers[1].cache, engine.decoder.prefill

    def fails(requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
        if any(request.cache is broken for request in requests):
            raise RuntimeError("these rows")
        return prefill(requests, **more)

    monkeypatch.setattr(engine.decoder, "prefill", fails)
    assert isinstance(answer.wait().last, Failed)
    assert not [event for event in answer.events if isinstance(event, Finished)]
    assert other.wait().tokens == expected
    until(lambda: engine.stats()[:3] == (0, 0, 0))


@pytest.mark.parametrize(
    ("limit", "refusal"),
    [("kv_budget", "MiB of KV memory"), ("most_running", "n is 3; this server computes at most 2 answers at a time")],
)
def test_they_begin_when_there_is_room_for_all_of_them(limit: str, refusal: str, make_engine: MakeEngine) -> None:
    layout, seen = layouts(1)[0], list[EngineStats]()
    row_bytes = sum(layer.width for layer in decoder("llama").rotations) * 4
    room = {"kv_budget": 2 * row_bytes * (layout.rows + FEW.max_tokens), "most_running": 2}[limit]
    engine = make_engine(**{limit: room})
    expected = alone(engine.blender, layout)
    answers = [Answer(lambda: seen.append(engine.stats())) for _ in range(3)]
    for answer, n in zip(answers, (2, 1, 2), strict=True):
        engine.submit(Prompt.of(layout, sampling=replace(FEW, n=n)), answer)
    assert [answer.wait().tokens_of(0) for answer in answers] == [expected] * 3
    assert max(stats.running for stats in seen) == 1
    assert limit == "most_running" or max(stats.kv_bytes for stats in seen) == room
    with pytest.raises(PromptError, match=refusal):
        ask(engine, layout, replace(FEW, n=3))


# Over HTTP


def joined(chunks: Sequence[Any]) -> list[tuple[str, str]]:
    """Text and end of each answer that a stream tells apart by its index."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    answers = [[one for one in choices if one.index == index] for index in sorted({one.index for one in choices})]
    texts = [[one.text if hasattr(one, "text") else one.delta.content or "" for one in answer] for answer in answers]
    return [("".join(text), answer[-1].finish_reason) for text, answer in zip(texts, answers, strict=True)]


USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def test_openai_chat(served: Served, client: openai.OpenAI) -> None:
    asked: Any = {"model": served.model, "messages": USER, "max_tokens": 9, "temperature": 1.2, "logprobs": True}
    singles = [client.chat.completions.create(**asked, seed=seed) for seed in (5, 6, 7)]
    asked["seed"] = 5
    whole = client.chat.completions.create(**asked, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice, single in zip(whole.choices, singles, strict=True):
        told, expected = choice.logprobs.content, single.choices[0].logprobs.content
        assert [one.token for one in told] == [one.token for one in expected]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage.prompt_tokens == singles[0].usage.prompt_tokens
    assert whole.usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)
    chunks = list(client.chat.completions.create(**asked, n=3, **USAGE))
    assert joined(chunks) == [(choice.message.content, choice.finish_reason) for choice in whole.choices]
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_text_ends_only_the_answer_that_has_it(http: httpx.Client) -> None:
    asked = {"messages": USER, "max_tokens": 30, "temperature": 1.2, "seed": 5, "n": 2, "ignore_eos": True}

    def texts(**more: Any) -> list[tuple[str, str]]:
        choices = http.post("/v1/chat/completions", json={**asked, **more}).json()["choices"]
        return [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]

    (first, _), (second, _) = texts()
    stop = next(second[at : at + 3] for at in range(10, len(second) - 3) if second[at : at + 3] not in first)
    assert texts(stop=stop) == [(first, "length"), (second[: second.index(stop)], "stop")]


def test_metrics_count_one_prompt_and_every_answer(listen: Callable[..., Served]) -> None:
    served = listen()
    asked = {"messages": USER, "max_tokens": 5, "ignore_eos": True, "n": 3}
    usage = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60).json()["usage"]
    found = served.counts()
    assert found["prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["generation_tokens_total"] == usage["completion_tokens"] == 15
    assert found['request_success_total{finished_reason="length"}'] == 3
    assert found["inter_token_latency_seconds_count"] == 12
    assert found["time_to_first_token_seconds_count"] == 1


TEXTS = ["When did the harbour open?", "How many gates are there?", "The bridge"]
SAMPLED: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 1}


def ids_of(served: Served, text: str) -> list[int]:
    chat = served.state.service.tenant("").chat
    return list(chat.continued(text).token_ids)


def test_answers_to_several_prompts(served: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": served.model, "n": 2, "best_of": 2, "logprobs": 2, **SAMPLED}
    singles = [client.completions.create(**asked, prompt=text) for text in TEXTS]
    expected = [choice for one in singles for choice in one.choices]
    ids = [ids_of(served, text) for text in TEXTS]
    for prompts in (TEXTS, ids):
        whole: Any = client.completions.create(**asked, prompt=prompts)
        assert [choice.index for choice in whole.choices] == list(range(6))
        for choice, single in zip(whole.choices, expected, strict=True):
            assert choice.text == single.text == "".join(choice.logprobs.tokens)
            assert choice.logprobs.text_offset == single.logprobs.text_offset
            assert all(map(dict.__contains__, choice.logprobs.top_logprobs, choice.logprobs.tokens))
        assert whole.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in singles)
        assert whole.usage.completion_tokens == sum(one.usage.completion_tokens for one in singles)
        rows = [getattr(choice, "kvblend", {}).get("figures", {}).get("rows") for choice in whole.choices]
        assert rows == [n for one in singles for n in (one.usage.prompt_tokens, None)]
    of_one = client.completions.create(**asked, prompt=ids[0])
    assert [choice.text for choice in of_one.choices] == [choice.text for choice in singles[0].choices]
    assert of_one.usage.prompt_tokens == len(ids[0])


def test_several_prompts_in_a_stream(served: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": served.model, "prompt": TEXTS, "n": 2, "logprobs": 1, **SAMPLED}
    whole = client.completions.create(**asked)
    *chunks, last = client.completions.create(**asked, **USAGE)
    assert joined(chunks) == [(choice.text, choice.finish_reason) for choice in whole.choices]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 36)
    assert sum("kvblend" in chunk.model_extra for chunk in chunks) == 3


WRONG: list[tuple[Any, str]] = [
    ([], "1 to 16 prompts"),
    (["x y"] * 17, "1 to 16 prompts"),
    ([1], "at least two"),
    ([-1, 2], "from 0 on"),
    ([[1, 2], [1, 10**6]], "there is no token 1,000,000"),
    ([1, True], "a list of token ids"),
    ([["x"]], "a list of token ids"),
]


@pytest.mark.parametrize(("prompt", "words"), WRONG, ids=lambda value: str(value)[:30])
def test_what_is_wrong_is_refused(http: httpx.Client, prompt: Any, words: str) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert words in error["message"]


def test_one_prompt_that_cannot_be_answered_fails_all(http: httpx.Client) -> None:
    asked = {"prompt": ["The harbour", "gates " * 5000], "max_tokens": 2}
    for stream in (False, True):
        response = http.post("/v1/completions", json={**asked, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert http.post("/v1/completions", json={**asked, "prompt": TEXTS}).status_code == 200


@pytest.mark.parametrize("end", [Failed(EngineFailedError()), Finished("deadline"), Finished("shutdown")])
def test_the_first_failure_ends_all(end: Failed | Finished) -> None:
    events = list[Event]()
    joined = JoinedPrompts(3, 2, events.append)
    joined.send(1, Output((), "a", answer=1))
    joined.send(2, Finished("stop", 0, last=False))
    joined.send(2, Finished("stop", 1))
    joined.send(0, end)
    joined.send(1, Output((), "b"))
    joined.send(1, end)
    assert events == [Output((), "a", answer=3), Finished("stop", 4, last=False), Finished("stop", 5, last=False), end]
