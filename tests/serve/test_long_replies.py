"""A whole reply with many log-probabilities is made beside the event loop, in pieces, and is the same as in one."""

import threading
from typing import Any

import httpx
import pytest
from served import CHAT, USER, Served

from blend.serve.http.completions import ChatReply
from blend.text import json_parts, json_text

DOCUMENT = {
    "a": [{"b": [], "c": {}, "d": "x\u202e\ud800\n", "e": [1, 2.5, None, True, [{"k": ("v", 1)}] * 3]}],
    "f": {},
    "g\u009b": [[[[[[[[1]]]]]]]],
}


@pytest.mark.parametrize("depth", range(8))
def test_the_parts_of_a_text_make_it_up(depth: int) -> None:
    assert "".join(json_parts(DOCUMENT, depth)) == json_text(DOCUMENT)


@pytest.mark.parametrize(("tokens", "in_loop"), [(2, True), (40, False)])
def test_other_streams_do_not_wait_for_a_long_reply(
    tokens: int, in_loop: bool, served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ChatReply.whole
    threads = list[threading.Thread]()

    def noted(reply: ChatReply, events: Any) -> Any:
        threads.append(threading.current_thread())
        return whole(reply, events)

    monkeypatch.setattr(ChatReply, "whole", noted)
    body = {"messages": USER, "max_tokens": tokens, "logprobs": True, "top_logprobs": 20, "n": 4, "ignore_eos": True}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    contents = [choice["logprobs"]["content"] for choice in reply.json()["choices"]]
    assert [len(content) for content in contents] == [tokens] * 4
    assert [thread is served.thread for thread in threads] == [in_loop]
