"""/v1/completions with token ids and with several prompts, with the real client."""

from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from served import Served

from blend.serve.events import EngineFailedError, Event, Failed, Finished, Output
from blend.serve.http.submission import JoinedPrompts

TEXTS = ["When did the harbour open?", "How many gates are there?", "The bridge"]
SAMPLED: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 1}


def ids_of(served: Served, text: str) -> list[int]:
    chat = served.state.service.tenant("").chat
    return list(chat.continued(text).token_ids)


def test_token_ids_are_taken_as_they_are(served: Served, client: openai.OpenAI) -> None:
    for text in TEXTS[:2]:
        ids = ids_of(served, text)
        spelled, given = (
            client.completions.create(model=served.model, prompt=prompt, logprobs=2, **SAMPLED)
            for prompt in (text, ids)
        )
        one, other = (choice.choices[0].logprobs for choice in (given, spelled))
        assert (one.tokens, one.text_offset) == (other.tokens, other.text_offset)
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)
        assert given.usage.prompt_tokens == spelled.usage.prompt_tokens == len(ids)


def test_answers_to_several_prompts(served: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": served.model, "n": 2, "logprobs": 2, **SAMPLED}
    singles = [client.completions.create(**asked, prompt=text) for text in TEXTS]
    expected = [choice for one in singles for choice in one.choices]
    for prompts in (TEXTS, [ids_of(served, text) for text in TEXTS]):
        whole: Any = client.completions.create(**asked, prompt=prompts)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert [choice.text for choice in whole.choices] == [choice.text for choice in expected]
        for choice, single in zip(whole.choices, expected, strict=True):
            assert choice.logprobs.tokens == single.logprobs.tokens
            assert choice.logprobs.text_offset == single.logprobs.text_offset
        assert whole.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in singles)
        assert whole.usage.completion_tokens == sum(one.usage.completion_tokens for one in singles)
        rows = [getattr(choice, "kvblend", {}).get("figures", {}).get("rows") for choice in whole.choices]
        assert rows == [n for one in singles for n in (one.usage.prompt_tokens, None)]


def test_several_prompts_in_a_stream(served: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": served.model, "prompt": TEXTS, "n": 2, "logprobs": 1, **SAMPLED}
    whole = client.completions.create(**asked)
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    texts, ends = defaultdict[int, str](str), dict[int, str]()
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert [texts[index] for index in range(6)] == [choice.text for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 36)
    assert sum("kvblend" in chunk.model_extra for chunk in chunks) == 3


WRONG: list[tuple[Any, str]] = [
    ([], "1 to 16 prompts"),
    (["x y"] * 17, "1 to 16 prompts"),
    ([[]], "token ids"),
    ([1], "at least two"),
    ([-1, 2], "from 0 on"),
    ([1, 10**12], "there is no token 1,000,000,000,000"),
    ([[1, 2], [1, 10**6]], "there is no token 1,000,000"),
    ([1, True], "a list of token ids"),
    ([1, "x"], "a list of token ids"),
    ([1.5, 2], "a list of token ids"),
    ([["x"]], "a list of token ids"),
    (5, "a list of token ids"),
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
