"""Slow, broken, too many and too large requests do not harm others."""

import gc
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from changing import until
from served import CHAT, Served

from blend.prompt import PromptTemplate
from blend.serve.http.connections import most_connections, raise_descriptor_limit
from blend.serve.http.requests import ApiKeys
from blend.serve.prompts.chat_template import ChatTemplate, Turn
from tests.towns import document

DOCUMENTS = "/v1/documents"


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.fixture
def four_connections(listen: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server that has files for four connections."""
    monkeypatch.setattr("blend.serve.http.connections.most_connections", lambda: 4)
    return listen()


def test_the_oldest_idle_connection_makes_room_for_a_new_one(four_connections: Served) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(four_connections)) for _ in range(6)]
        assert httpx.get(f"{four_connections.url}/health").status_code == 200
        assert [connection.recv(1) for connection in connections[:3]] == [b""] * 3
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connections[-1].recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_connection_is_refused_if_all_others_have_requests(four_connections: Served) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(sent(four_connections, b"{", length=1000))
        until(lambda: len(four_connections.server.server_state.tasks) == 4)
        assert httpx.get(f"{four_connections.url}/health").status_code == 503
    until(lambda: not four_connections.server.server_state.connections)
    assert httpx.get(f"{four_connections.url}/health").status_code == 200


def test_as_many_descriptors_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 512), before[1]))
        few = most_connections()
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 16_384), before[1])
        assert few < most_connections() <= 16_384 / 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


SHORT = {"messages": [{"role": "user", "content": "When did the harbour open?"}], "max_tokens": 1}
TOWNS = "\n\n".join(document("windmill", number) for number in range(500))


@contextmanager
def sent(served: Served, raw: bytes, *, path: str = CHAT, length: int = 0) -> Iterator[socket.socket]:
    """A connection on which a request was sent; of a body of `length` bytes only `raw`."""
    with connected(served) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        yield connection


def copies_in_memory(content: bytes) -> int:
    """Other objects of these bytes."""
    contents = (text for holder in gc.get_objects() for text in gc.get_referents(holder) if type(text) is bytes)
    return len({id(text) for text in contents if text is not content and text == content})


def test_the_body_of_a_refused_request_is_freed_without_the_garbage_collector(served: Served) -> None:
    long = [{"role": "user", "content": "harbour " * 5000}]
    content = json.dumps({"model": "unknown", "messages": long}).encode()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with sent(served, content) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 404 ")
        until(lambda: copies_in_memory(content) == 0)
    finally:
        gc.enable()


def test_a_body_that_does_not_come(listen: Callable[..., Served]) -> None:
    served = listen(body_s=0.2)
    with sent(served, b"{", length=100) as connection:
        assert connection.recv(100_000).startswith(b"HTTP/1.1 408 ")
    with sent(served, b"{", length=100):
        pass
    assert httpx.get(f"{served.url}/ready").status_code == 200


def with_document(text: str, **fields: Any) -> bytes:
    return json.dumps({**SHORT, "documents": [{"text": text}], **fields}).encode()


def with_documents(text: str, **fields: Any) -> bytes:
    """Many, of which each has the word that makes it slow."""
    documents = [{"text": f"windmill {text[at : at + 100]}"} for at in range(0, len(text), 100)]
    return json.dumps({**SHORT, "documents": documents, **fields}).encode()


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokenising takes a while; the lengths of the texts of clients that were tokenised."""
    counted, encode = list[int](), PromptTemplate.encode

    def slowly(self: PromptTemplate, text: str) -> list[int]:
        if "windmill" in text:  # the server's own corpus has none
            counted.append(len(text))
            time.sleep(0.02)
        return encode(self, text)

    monkeypatch.setattr(PromptTemplate, "encode", slowly)
    return counted


def test_a_prompt_beyond_the_context_is_refused_uncut(listen: Callable[..., Served], slow_tokens: list[int]) -> None:
    served = listen()
    asked = [{"role": "user", "content": TOWNS[:200_000]}]
    document, many = {"text": TOWNS[:200_000]}, [{"text": "The harbour has nine gates. " * 20}] * 60
    for fields in ({"documents": [document]}, {"documents": [document], "messages": asked}, {"documents": many}):
        refused = httpx.post(f"{served.url}{CHAT}", json={**SHORT, **fields}, timeout=60)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert "maximum context length is 4096 tokens" in error["message"]
        assert "--" not in error["message"]
    assert len(slow_tokens) < 20
    assert sum(slow_tokens) < 100_000


def test_a_deadline_ends_the_cutting_of_documents(listen: Callable[..., Served], slow_tokens: list[int]) -> None:
    served = listen()
    raw = with_documents(TOWNS[:6000], kvblend={"deadline_s": 0.5})
    refused = httpx.post(f"{served.url}{CHAT}", content=raw, timeout=60)
    assert refused.status_code == 504
    assert refused.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < len(slow_tokens) < 60, "all documents were cut"


@pytest.mark.parametrize("tenants", [("ann", "bob"), ("", "")], ids=["tenants", "keys"])
def test_a_key_leaves_places_to_the_others(
    listen: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, tenants: tuple[str, str]
) -> None:
    go_on, layout = threading.Event(), ChatTemplate.layout

    def waiting(self: ChatTemplate, turns: Sequence[Turn], *more: Any) -> Any:
        assert all(len(turn.content) == 1 for turn in turns) or go_on.wait(60)  # with documents it waits
        return layout(self, turns, *more)

    monkeypatch.setattr(ChatTemplate, "layout", waiting)
    served = listen(ApiKeys(zip(("anns", "bobs"), tenants, strict=True)))
    with ThreadPoolExecutor(50) as pool:

        def ask(key: str, raw: bytes) -> int:
            key_header = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{served.url}{CHAT}", content=raw, headers=key_header, timeout=60).status_code

        anns = [pool.submit(ask, "anns", with_document("The harbour has nine gates.")) for _ in range(45)]
        try:
            until(lambda: served.state.questions.running >= 10)
            time.sleep(0.5)
            assert pool.submit(ask, "bobs", json.dumps(SHORT).encode()).result(20) == 200
        finally:
            go_on.set()
        assert {one.result() for one in anns} <= {200, 429}


@pytest.mark.parametrize("path", [CHAT, DOCUMENTS])
def test_bodies_that_are_received_together_have_a_bound(listen: Callable[..., Served], path: str) -> None:
    """Small requests pass all the same, and what a client leaves behind is free again."""
    served = listen(all_bytes=1_000_000)
    part = b'{"messages": "' + b"x" * 399_986
    with sent(served, part, path=path, length=500_000), sent(served, part, path=path, length=500_000):
        until(lambda: served.state.bodies.used > 600_000)
        with sent(served, part, path=path, length=500_000) as third:
            refused = HTTPResponse(third)
            refused.begin()
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            assert json.loads(refused.read())["error"]["code"] == "unavailable"
        assert httpx.post(f"{served.url}{CHAT}", json=SHORT, timeout=60).status_code == 200
    until(lambda: served.state.bodies.used == 0, 10)
    assert httpx.post(f"{served.url}{path}", content=part, timeout=60).status_code == 400  # that is no JSON
    assert served.state.bodies.used == 0
