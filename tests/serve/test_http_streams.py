"""Streams: what a client sees event by event, who leaves early, what comes too late, and how a server ends."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from changing import until
from served import CHAT, USER, Served, refusal


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 4, "stream": True, **fields}


def events(lines: Iterator[str]) -> list[Any]:
    """What stands behind `data:`; the last must be [DONE]."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


@contextmanager
def long_answer(served: Served, *, stream: bool = True) -> Iterator[Any]:
    """What comes on a connection of its own, on which an answer of 3,000 tokens was asked for."""
    raw = json.dumps(body(max_tokens=3000, stream=stream)).encode()
    with served.sent(raw) as connection, connection.makefile("rb") as lines:
        yield lines


@contextmanager
def begun_answer(served: Served) -> Iterator[None]:
    """An answer of 3,000 tokens has begun, and goes on."""
    with long_answer(served) as lines:
        while b"content" not in lines.readline():
            pass
        yield


def test_events_of_a_chat(http: httpx.Client) -> None:
    with http.stream("POST", CHAT, json=body(stream_options={"include_usage": True})) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        found = events(response.iter_lines())
    first, *middle, ending, last = found
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert set(first["kvblend"]) == {"sources", "figures"}
    assert first["kvblend"]["figures"]["ttft_s"] > 0
    assert [one["choices"][0]["finish_reason"] for one in middle] == [None] * 4
    assert ending["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(one["usage"] is None for one in found[:-1])
    assert {one["object"] for one in found} == {"chat.completion.chunk"}
    assert len({one["id"] for one in found}) == 1
    assert all("kvblend" not in one for one in found[1:])


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = http.post(CHAT, json=body(stream_options=options))
    first, *middle, ending, last = [one["usage"] for one in events(response.iter_lines())]
    assert [one["completion_tokens"] for one in (first, *middle, ending)] == [0, 1, 2, 3, 4, 4]
    assert ending == last
    assert {one["prompt_tokens"] for one in (first, *middle)} == {last["prompt_tokens"]}
    assert middle[0]["total_tokens"] == last["prompt_tokens"] + 1


def test_log_probabilities_are_the_same_streamed_and_whole(http: httpx.Client) -> None:
    asked = body(logprobs=True, top_logprobs=2)
    whole = http.post(CHAT, json={**asked, "stream": False}).json()["choices"][0]["logprobs"]["content"]
    chunks = events(http.post(CHAT, json=asked).iter_lines())
    assert all("usage" not in one for one in chunks)
    streamed = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == whole
    assert len(whole) == 4
    for token in whole:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert token["logprob"] <= 0
        likeliest, _ = token["top_logprobs"]
        assert (likeliest["logprob"], likeliest["token"]) == (token["logprob"], token["token"])


def test_likely_tokens_of_a_continued_text_are_told_by_their_texts(http: httpx.Client) -> None:
    asked = {"prompt": "The harbour", "max_tokens": 3, "logprobs": 2}
    told = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    assert len(told["top_logprobs"]) == 3
    for token, logprob, likely in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert likely[token] == logprob == max(likely.values()), "greedy"


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_answered_no_further(served: Served, stream: bool) -> None:
    with begun_answer(served) if stream else long_answer(served, stream=False):
        until(lambda: served.state.service.engine.stats().running > 0)
    until(lambda: served.state.service.engine.stats()[:2] == (0, 0), 30)
    assert b'finished_reason="cancelled"' in served.metrics.page(None)


def test_a_silent_stream_is_kept_alive(serve: Callable[..., Served]) -> None:
    served = serve({"keep_alive_s": 0.05}, most_running=1)
    with begun_answer(served), long_answer(served) as lines:
        seen = [lines.readline() for _ in range(40)]
    assert b": ping\n" in seen
    assert seen[0] == b"HTTP/1.1 200 OK\r\n"


def test_what_comes_too_late_is_said_so(serve: Callable[..., Served]) -> None:
    """With a status, and as an event of a stream that has begun."""
    served = serve({"keep_alive_s": 0.1}, most_running=1)
    with begun_answer(served):
        for stream in (False, True):
            assert refusal(served.ask(stream=stream, kvblend={"deadline_s": 0.05})) == (504, "deadline_exceeded")
        response = served.ask(stream=True, kvblend={"deadline_s": 0.5})
    assert response.status_code == 200
    assert [one["error"]["code"] for one in events(response.iter_lines())] == ["deadline_exceeded"]


def test_a_full_queue_tells_when_to_come_again(serve: Callable[..., Served]) -> None:
    served = serve(most_running=1, most_waiting=1)
    with begun_answer(served), long_answer(served):
        until(lambda: served.state.service.engine.stats().waiting > 0)
        refused = served.ask()
    assert refusal(refused) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


def test_the_end_of_a_server_without_grace(serve: Callable[..., Served]) -> None:
    before = set(threading.enumerate())
    served = serve({"grace_s": 0.0})
    with httpx.stream("POST", f"{served.url}{CHAT}", json=body(max_tokens=3500)) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        served.stop()
        assert events(lines)[-1]["error"]["code"] == "shutting_down"
    served.ended()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kvblend")]
