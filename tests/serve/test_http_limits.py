"""Slow, broken, too many and too large requests do not harm others."""

import gc
import json
import logging
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from changing import until
from places import PYTHONPATH
from served import CHAT, USER, Served, refusal

from blend.prompt_template import PromptTemplate
from blend.serve.http.connections import most_connections, raise_descriptor_limit
from blend.serve.http.keys import ApiKeys
from blend.serve.http.request_log import OncePerMinute
from blend.serve.prompts.chat_template import ChatTemplate, Turn
from tests.towns import document


@pytest.fixture
def four_connections(listen: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server that has files for four connections."""
    monkeypatch.setattr("blend.serve.http.connections.most_connections", lambda: 4)
    return listen()


def test_the_oldest_idle_connection_makes_room_for_a_new_one(four_connections: Served) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(four_connections.connected()) for _ in range(6)]
        assert four_connections.send("GET", "/health").status_code == 200
        assert [connection.recv(1) for connection in connections[:3]] == [b""] * 3
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connections[-1].recv(100).startswith(b"HTTP/1.1 200 ")


def test_bodies_that_do_not_come_keep_nobody_out(four_connections: Served) -> None:
    with ExitStack() as stack:
        waiting = [stack.enter_context(four_connections.sent(b"{", length=1000)) for _ in range(4)]
        until(lambda: len(four_connections.server.server_state.tasks) == 4)
        assert four_connections.send("GET", "/health").status_code == 200
        assert four_connections.ask().status_code == 200
        ended = HTTPResponse(waiting[0])
        ended.begin()
        assert (ended.status, ended.headers["connection"], ended.headers["retry-after"]) == (503, "close", "5")
        assert json.loads(ended.read())["error"]["code"] == "unavailable"
        for connection in waiting[1:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


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


@pytest.fixture
def url(model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a process that may open 64 files; its log goes to `log`."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "blend", "serve", "--port=0", f"--model={model}", f"--store={tmp_path / 'store'}"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        ) as process,
    ):
        ready = re.fullmatch(r"Ready at (http://.*)\n", process.stdout.readline())
        assert ready is not None, (tmp_path / "log").read_text()
        yield ready[1]
        process.terminate()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
ATTACKS = [b"", HEAD + b"A: b", HEAD + b"Content-Length: 100\r\n\r\n", HEAD + b"Content-Length: 100\r\n\r\n{"]


def test_silent_connections_and_requests_that_do_not_end_keep_nobody_out(url: str, tmp_path: Path) -> None:
    host, port = url.removeprefix("http://").split(":")
    question = {"messages": USER, "max_tokens": 1}
    for attack in ATTACKS:
        with ExitStack() as stack:
            for _ in range(100):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                connection.sendall(attack)
            begun = time.monotonic()
            for _ in range(10):
                assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            assert time.monotonic() - begun < 5, "each would wait for its own place"
            assert httpx.post(f"{url}{CHAT}", json=question, timeout=60).status_code == 200
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    [warning] = [line["event"] for line in lines if line["event"] != "request"]
    assert warning == "kvblend.connections: more connections than open files allow: idle ones are closed"


def test_thousands_of_heads_that_do_not_end_keep_nobody_out(served: Served) -> None:
    """Each health check opens a connection of its own. As many heads as this process may open both ends of, up to 2,000."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 6000 if most == resource.RLIM_INFINITY else min(6000, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(few, limit), most))
    count = min(2000, (max(few, limit) - 500) // 2)
    try:
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(served.connected()).sendall(HEAD + b"A: b")
            seconds = []
            for _ in range(9):
                begun = time.perf_counter()
                assert served.send("GET", "/health").status_code == 200
                seconds.append(time.perf_counter() - begun)
            assert statistics.median(seconds) < 1
            assert served.ask().status_code == 200
        until(lambda: not served.server.server_state.tasks)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


def test_each_message_is_logged_once_in_a_minute() -> None:
    now = [0.0]
    once = OncePerMinute(clock=lambda: now[0])

    def passes(message: str, at: float) -> logging.LogRecord | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), None)
        now[0], record.created = at, -60 * at  # the system's clock is set back meanwhile
        return record if once.filter(record) else None

    assert passes("no descriptor", 0.0)
    assert passes("another fault", 1.0)
    assert [passes("no descriptor", second) for second in (1.0, 30.0, 59.0)] == [None] * 3
    assert passes("no descriptor", 61.0)


TOWNS = "\n\n".join(document("windmill", number) for number in range(500))


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
            with served.sent(content) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 404 ")
        until(lambda: copies_in_memory(content) == 0)
    finally:
        gc.enable()


def test_a_body_that_does_not_come(listen: Callable[..., Served]) -> None:
    served = listen(body_s=0.2)
    with served.sent(b"{", length=100) as connection:
        assert connection.recv(100_000).startswith(b"HTTP/1.1 408 ")
    with served.sent(b"{", length=100):
        pass
    assert served.send("GET", "/ready").status_code == 200


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


def test_a_prompt_beyond_the_context_is_refused_uncut(served: Served, slow_tokens: list[int]) -> None:
    document = {"text": TOWNS[:90_000]}
    long, many = [{"role": "user", "content": document["text"]}], [{"text": "The harbour has nine gates. " * 20}] * 60
    for fields in ({"documents": [document]}, {"messages": long}, {"documents": many}):
        refused = served.ask(**fields)
        assert refusal(refused) == (400, "context_length_exceeded")
        assert "maximum context length is 4096 tokens" in refused.json()["error"]["message"]
    assert len(slow_tokens) < 20
    assert sum(slow_tokens) < 100_000


def test_a_prompt_that_just_fits_is_not_refused_for_how_it_is_counted(served: Served) -> None:
    """It has more characters than the context has tokens, so its tokens are counted, in several pieces."""
    tokenizer = served.rag.decoder.tokenizer
    words = " ".join(TOWNS[:30_000].split())
    fitting = tokenizer.encode(words, add_special_tokens=False)[: 4096 - 60]
    text = tokenizer.decode(fitting)
    assert len(text) > 2 * 4096
    reply = served.ask(messages=[{"role": "user", "content": text}], max_tokens=1, kvblend={"method": "full"})
    assert reply.status_code == 200, reply.text


def test_a_deadline_ends_the_cutting_of_documents(served: Served, slow_tokens: list[int]) -> None:
    documents = [{"text": f"windmill {TOWNS[at : at + 100]}"} for at in range(0, 6000, 100)]
    refused = served.ask(documents=documents, kvblend={"deadline_s": 0.5})
    assert refusal(refused) == (504, "deadline_exceeded")
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
        documents = [{"text": "The harbour has nine gates."}]
        anns = [pool.submit(served.ask, "anns", documents=documents) for _ in range(45)]
        try:
            until(lambda: served.state.questions.running >= 10)
            time.sleep(0.5)
            assert pool.submit(served.ask, "bobs").result(20).status_code == 200
        finally:
            go_on.set()
        assert {one.result().status_code for one in anns} <= {200, 429}


@pytest.mark.parametrize("path", [CHAT, "/v1/documents"])
def test_bodies_that_are_received_together_have_a_bound(listen: Callable[..., Served], path: str) -> None:
    """Small requests pass all the same, and what a client leaves behind is free again."""
    served = listen(all_bytes=1_000_000)
    part = b'{"messages": "' + b"x" * 399_986
    with served.sent(part, path=path, length=500_000), served.sent(part, path=path, length=500_000):
        until(lambda: served.state.bodies.used > 600_000)
        with served.sent(part, path=path, length=500_000) as third:
            refused = HTTPResponse(third)
            refused.begin()
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            assert json.loads(refused.read())["error"]["code"] == "unavailable"
        assert served.ask().status_code == 200
    until(lambda: served.state.bodies.used == 0, 10)
    assert served.send("POST", path, content=part).status_code == 400  # that is no JSON
    assert served.state.bodies.used == 0


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"GET \xff\r\n\r\n", b"A" * 200_000])
def test_what_is_no_http_is_refused_and_harms_nobody(served: Served, raw: bytes) -> None:
    with served.connected() as connection, suppress(OSError):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        reply = connection.recv(100_000)
        assert reply == b"" or reply.startswith(b"HTTP/1.1 400 ")
    assert served.ask().status_code == 200
