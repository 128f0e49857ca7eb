"""Streams whose prompt takes longer than their clients wait for a byte, or for a part of the answer."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from served import CHAT, USER, Served
from tool_rooms import ASKED, WEATHER

KEEP_ALIVE_S, EVENT_S, READ_S = 0.04, 0.2, 1.0
TURNS = 30
"""Pings and empty events, at least KEEP_ALIVE_S apart each: together they take longer than READ_S."""
ASKING: dict[str, Any] = {"messages": USER, "max_tokens": 6}


class HeldEngine:
    """A server's engine that computes nothing until it is let go on. turns: what a client has read by then."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = served.state.service.engine.decoder
        self._prefill = decoder.prefill
        self._goes_on = threading.Event()
        self.turns = list[bytes]()
        monkeypatch.setattr(decoder, "prefill", self._waiting)

    def _waiting(self, *arguments: Any, **fields: Any) -> Any:
        assert self._goes_on.wait(60)
        return self._prefill(*arguments, **fields)

    def go_on(self) -> None:
        self._goes_on.set()

    def read(self, part: bytes) -> None:
        """A client has read this."""
        self.turns.append(part)
        if len(self.turns) >= TURNS:
            self.go_on()


def watched(library: Any, engine: HeldEngine) -> Any:
    """A client of `httpx` or `httpx2` that gives up after READ_S without a byte, and tells the engine what it reads."""

    class Parts(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, response: Any) -> None:
            self._response = response

        def __iter__(self) -> Iterator[bytes]:
            for part in self._response.stream:
                engine.read(part)
                yield part

        def close(self) -> None:
            self._response.close()

    class Transport(library.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            return library.Response(response.status_code, headers=response.headers, stream=Parts(response))

    return library.Client(transport=Transport(), timeout=READ_S)


@pytest.fixture
def held(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, HeldEngine]]:
    served = serve({"keep_alive_s": KEEP_ALIVE_S, "event_s": EVENT_S})
    engine = HeldEngine(served, monkeypatch)
    yield served, engine
    engine.go_on()


def openai_client(served: Served, engine: HeldEngine) -> openai.OpenAI:
    client = watched(httpx, engine)
    return openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0, http_client=client, timeout=READ_S)


def anthropic_client(served: Served, engine: HeldEngine) -> anthropic.Anthropic:
    client = watched(httpx2, engine)
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, http_client=client, timeout=READ_S)


def test_chat_waits(held: tuple[Served, HeldEngine]) -> None:
    served, engine = held
    asked: Any = {**ASKING, "model": served.model}
    with openai_client(*held) as client:
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        expected = client.chat.completions.create(**asked).choices[0].message.content
    assert "".join(delta.content or "" for delta in deltas) == expected
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert len(deltas) > ASKING["max_tokens"] + 3, "a client that counts chunks gets empty ones"
    assert b": ping\n\n" in engine.turns


def test_a_text_waits(held: tuple[Served, HeldEngine]) -> None:
    served, engine = held
    asked: Any = {"prompt": "The harbour", "max_tokens": 6, "model": served.model}
    with openai_client(*held) as client:
        texts = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
        assert "".join(texts) == client.completions.create(**asked).choices[0].text
    assert b": ping\n\n" in engine.turns


def test_responses_wait(held: tuple[Served, HeldEngine]) -> None:
    served, engine = held
    asked: Any = {"input": "The harbour", "max_output_tokens": 6, "model": served.model}
    with openai_client(*held) as client:
        events = list(client.responses.create(**asked, stream=True))
        assert events[-1].response.output_text == client.responses.create(**asked).output_text
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds.count("response.created") == 1
    assert kinds.count("response.in_progress") > 2, "a client that counts events gets some"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.kvblend["figures"]["rows"] > 0
    assert b": ping\n\n" in engine.turns


def test_messages_wait(held: tuple[Served, HeldEngine]) -> None:
    served, engine = held
    with anthropic_client(*held) as client:
        asked: Any = {**ASKING, "model": served.model}
        with client.messages.stream(**asked) as stream:
            events = list(stream)
            message = stream.get_final_message()
        whole = client.messages.create(**asked)
        assert [block.text for block in message.content] == [block.text for block in whole.content]
        assert message.stop_reason == whole.stop_reason
        rows = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == rows
        assert message.usage.output_tokens == whole.usage.output_tokens
        kinds = [event.type for event in events]
        assert kinds.count("message_start") == kinds.count("content_block_start") == 1
        assert kinds.count("content_block_delta") > message.usage.output_tokens, (
            "a client that counts events gets empty ones"
        )
        [last] = [event for event in events if event.type == "message_delta"]
        assert last.kvblend["figures"]["rows"] == rows
        assert b'event: ping\ndata: {"type": "ping"}\n\n' in engine.turns
        told = {"role": "assistant", "content": [{"type": "text", "text": ""}, *message.to_dict()["content"]]}
        plain = {"role": "assistant", "content": message.content[0].text}
        counts = []
        for answer in (told, plain):
            messages: Any = [*USER, answer, *USER]
            counts.append(client.messages.count_tokens(model=served.model, messages=messages).input_tokens)
        assert counts[0] == counts[1], "an empty block changes no prompt"


def test_the_head_comes_at_once(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up a request without a head sooner than a stream that is silent."""
    served = serve()
    engine = HeldEngine(served, monkeypatch)
    body = {**ASKING, "stream": True}
    with httpx.stream("POST", f"{served.url}{CHAT}", json=body, timeout=5) as response:
        assert response.status_code == 200
        parts = response.iter_raw()
        assert next(parts) == b": ping\n\n"
        engine.go_on()
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")


def test_pings_come_while_a_call_is_written(served_tools: Callable[[str], Served], monkeypatch: Any) -> None:
    """It is sent when it is complete."""
    served = served_tools("qwen")
    monkeypatch.setattr(served.state, "limits", type(served.state.limits)(keep_alive_s=0.0005))
    asked = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{served.url}{CHAT}", json=asked, timeout=60) as response:
        text = "".join(response.iter_text())
    _, _, end = text.partition('"role":')
    assert end
    before_call, called, _ = end.partition('"tool_calls":')
    assert called
    assert before_call.count(": ping") > 5
