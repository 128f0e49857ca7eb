"""Several answers to one prompt: one prefill, each answer as if it were alone, and one end for all."""

import json
from collections import defaultdict
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
from engines import FEW, Answer, MakeEngine, alone, ask, layouts
from models import decoder
from served import Served

from blend.errors import ConfigError, PromptError
from blend.model.passes import RowRequest
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import Event, Failed, Finished, Output, Started
from blend.serve.prompt import Prompt
from blend.types import PromptLayout

SAID = "When did the harbour open?"
USER: list[Any] = [{"role": "user", "content": SAID}]
DRAWN = Sampling(max_tokens=8, temperature=1.5, seed=7, ignore_eos=True)
ENDLESS = Sampling(max_tokens=300, ignore_eos=True, n=3)


def stored_prompt(engine: EmbeddedEngine) -> PromptLayout:
    layout = layouts(1)[0]
    cache_chunks(engine.blender, layout)
    return layout


def test_greedy_answers_are_equal_and_come_from_one_prefill(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(pass_rows=40)
    layout, rows, prefill = stored_prompt(engine), list[int](), engine.decoder.prefill
    expected = alone(engine.blender, layout)

    def counted(requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
        rows.extend(int(request.positions.shape[0]) for request in requests)
        return prefill(requests, **more)

    monkeypatch.setattr(engine.decoder, "prefill", counted)
    single = ask(engine, layout).wait()
    of_one, rows[:] = sum(rows), []
    answer = ask(engine, layout, replace(FEW, n=3)).wait()
    assert single.tokens == expected
    assert [answer.tokens_of(index) for index in range(3)] == [expected] * 3
    assert sum(isinstance(event, Started) for event in answer.events) == 1
    ends = [event for event in answer.events if isinstance(event, Finished)]
    assert ends == [Finished("length", 0, last=False), Finished("length", 1, last=False), Finished("length", 2)]
    assert sum(rows) == of_one + 2 * (FEW.max_tokens - 1)


def test_each_drawn_answer_is_that_of_its_own_seed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    layout = stored_prompt(engine)
    together, again = (ask(engine, layout, replace(DRAWN, n=4)) for _ in range(2))
    singles = [ask(engine, layout, replace(DRAWN, seed=7 + index)).wait().tokens for index in range(4)]
    assert [together.wait().tokens_of(index) for index in range(4)] == singles
    assert [again.wait().tokens_of(index) for index in range(4)] == singles
    assert len({tuple(tokens) for tokens in singles}) == 4
    free = ask(engine, layout, replace(DRAWN, seed=None, n=2)).wait()
    assert free.tokens_of(0) != free.tokens_of(1)


def test_those_that_end_leave_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    layout = stored_prompt(engine)
    config = decoder("llama").model.generation_config
    drawn = [ask(engine, layout, replace(DRAWN, seed=7 + index)).wait().tokens for index in range(3)]
    (end,) = [token for token in drawn[1][2:4] if token not in drawn[0] + drawn[2] + drawn[1][:2]][:1]
    before, config.eos_token_id = config.eos_token_id, end
    try:
        answer = ask(engine, layout, replace(DRAWN, ignore_eos=False, n=3)).wait()
    finally:
        config.eos_token_id = before
    assert answer.tokens_of(1) == drawn[1][: drawn[1].index(end) + 1]
    assert [answer.tokens_of(0), answer.tokens_of(2)] == [drawn[0], drawn[2]]
    ends = [event for event in answer.events if isinstance(event, Finished)]
    assert ends == [Finished("stop", 1, last=False), Finished("length", 0, last=False), Finished("length", 2)]


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


def test_cancelled_they_end_together(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer, prompt = Answer(), Prompt.of(stored_prompt(engine), sampling=ENDLESS)
    engine.submit(prompt, answer)
    answer.begun()
    prompt.request.cancelled.set()
    assert answer.wait().last == Finished("cancelled")
    assert sum(isinstance(event, Finished) for event in answer.events) == 1
    until(lambda: engine.stats()[:3] == (0, 0, 0))


def test_a_shutdown_ends_them_with_one_event(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = ask(engine, stored_prompt(engine), ENDLESS).begun()
    engine.close()
    assert [event for event in answer.events if isinstance(event, Finished)] == [Finished("shutdown")]


def test_one_whose_row_cannot_be_computed_fails_the_request_and_no_other(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    layout = stored_prompt(engine)
    expected = alone(engine.blender, layout, Sampling(max_tokens=60))
    answer, other = ask(engine, layout, ENDLESS), ask(engine, layout, Sampling(max_tokens=60, ignore_eos=True))
    while len(answer.tokens) < 6 or not other.tokens:
        pass
    assert answer.sequence is not None
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


def test_memory_is_reserved_for_all_of_them(make_engine: MakeEngine) -> None:
    layout = layouts(1)[0]
    row_bytes = sum(layer.width for layer in decoder("llama").rotations) * 4
    engine = make_engine(kv_budget=2 * row_bytes * (layout.rows + FEW.max_tokens))
    expected, running = alone(engine.blender, layout), list[tuple[int, int]]()
    answers = [Answer(lambda: running.append((engine.stats().running, engine.stats().kv_bytes))) for _ in range(3)]
    for answer, n in zip(answers, (2, 1, 2), strict=True):
        engine.submit(Prompt.of(layout, sampling=replace(FEW, n=n)), answer)
    for answer in answers:
        assert answer.wait().tokens_of(0) == expected
    assert max(bytes_ for _, bytes_ in running) == 2 * row_bytes * (layout.rows + FEW.max_tokens)
    assert max(count for count, _ in running) == 1
    with pytest.raises(PromptError, match="MiB of KV memory"):
        ask(engine, layout, replace(FEW, n=3))


def test_more_than_the_server_computes_at_a_time_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(most_running=4)
    with pytest.raises(PromptError, match="n is 5; this server computes at most 4 answers at a time"):
        ask(engine, layouts(1)[0], replace(FEW, n=5))
    with pytest.raises(ConfigError, match="n is 17; give a number from 1 to 16"):
        replace(FEW, n=17)
    most = list[int]()
    answers = [Answer(lambda: most.append(engine.stats().running)) for _ in range(3)]
    for answer in answers:
        engine.submit(Prompt.of(layouts(1)[0], sampling=replace(FEW, n=3)), answer)
    assert all(len(answer.wait().tokens) == 3 * FEW.max_tokens for answer in answers)
    assert max(most) == 1


def test_every_answer_can_be_gone_on_with(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_budget=1 << 24)
    layout = stored_prompt(engine)
    answer = ask(engine, layout, replace(DRAWN, n=3)).wait()
    until(lambda: engine.stats().idle)
    for index in range(3):
        ids = (*layout.token_ids, *answer.tokens_of(index), 5, 6, 7)
        turn = PromptLayout.of_chunks(ids[:1], (), ids[1:])
        assert ask(engine, turn).wait().figures.rows_reused == len(ids) - 4


# Over HTTP


def test_openai_chat(served: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": served.model, "messages": USER, "max_tokens": 9, "temperature": 1.2, "seed": 5}
    asked |= {"logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked, n=3)
    singles = [client.chat.completions.create(**{**asked, "seed": 5 + index}) for index in range(3)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice, single in zip(whole.choices, singles, strict=True):
        assert choice.message.content == single.choices[0].message.content
        told, expected = choice.logprobs.content, single.choices[0].logprobs.content
        assert [one.token for one in told] == [one.token for one in expected]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert choice.finish_reason == single.choices[0].finish_reason
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage.prompt_tokens == singles[0].usage.prompt_tokens
    assert whole.usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, n=3, **options))
    texts, ends, roles = defaultdict[int, str](str), dict[int, str](), list[int]()
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert [texts[index] for index in range(3)] == [choice.message.content for choice in whole.choices]
    assert [ends[index] for index in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert roles == [0, 1, 2]
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_openai_completions(served: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": served.model, "prompt": SAID, "max_tokens": 6, "temperature": 1.0, "seed": 1}
    whole = client.completions.create(**asked, n=2, best_of=2, logprobs=2)
    singles = [client.completions.create(**{**asked, "seed": 1 + index}, logprobs=2) for index in range(2)]
    assert whole.object == "text_completion"
    assert [choice.text for choice in whole.choices] == [single.choices[0].text for single in singles]
    for choice, single in zip(whole.choices, singles, strict=True):
        assert choice.text == "".join(choice.logprobs.tokens)
        assert choice.logprobs.text_offset[0] == 0
        assert choice.logprobs.tokens == single.choices[0].logprobs.tokens
        assert choice.logprobs.text_offset == single.choices[0].logprobs.text_offset
        assert all(map(dict.__contains__, choice.logprobs.top_logprobs, choice.logprobs.tokens))
    chunks = list(client.completions.create(**asked, n=2, stream=True, logprobs=2))
    for index, choice in enumerate(whole.choices):
        mine = [one.choices[0] for one in chunks if one.choices[0].index == index]
        assert "".join(one.text for one in mine) == choice.text
        assert [at for one in mine if one.logprobs for at in one.logprobs.text_offset] == choice.logprobs.text_offset
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**asked, n=2, best_of=3)
    assert refused.value.param == "best_of"


def test_a_stop_text_ends_only_the_answer_that_has_it(http: httpx.Client) -> None:
    asked = {"messages": USER, "max_tokens": 30, "temperature": 1.2, "seed": 5, "n": 2, "ignore_eos": True}

    def texts(**more: Any) -> list[tuple[str, str]]:
        choices = http.post("/v1/chat/completions", json={**asked, **more}).json()["choices"]
        return [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]

    (first, _), (second, _) = texts()
    stop = next(second[at : at + 3] for at in range(10, len(second) - 3) if second[at : at + 3] not in first)
    assert texts(stop=stop) == [(first, "length"), (second[: second.index(stop)], "stop")]


def test_metrics_count_one_prompt_and_every_answer(serve: Callable[..., Served]) -> None:
    served = serve()
    with httpx.Client(base_url=served.url, timeout=60) as client:
        asked = {"messages": USER, "max_tokens": 5, "ignore_eos": True}
        one = client.post("/v1/chat/completions", json={**asked, "n": 3}).raise_for_status().json()
        found = served.counts()
        assert found["prompt_tokens_total"] == one["usage"]["prompt_tokens"]
        assert found["generation_tokens_total"] == one["usage"]["completion_tokens"] == 15
        assert found['request_success_total{finished_reason="length"}'] == 3
        assert found["inter_token_latency_seconds_count"] == 12
        assert found["time_to_first_token_seconds_count"] == 1
        with client.stream(
            "POST", "/v1/chat/completions", json={**asked, "n": 2, "max_tokens": 3000, "stream": True}
        ) as reply:
            seen = [json.loads(line[6:]) for line, _ in zip(filter(None, reply.iter_lines()), range(8), strict=False)]
    assert {chunk["choices"][0]["index"] for chunk in seen} == {0, 1}
    until(lambda: served.state.service.engine.stats()[:3] == (0, 0, 0), 30)
    until(lambda: served.counts().get('request_success_total{finished_reason="cancelled"}') == 1)
    assert served.counts()["generation_tokens_total"] >= 15 + 6
