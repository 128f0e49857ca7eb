"""Clients that are slow, silent or busy for nothing: each part of a request has its time, and others have their turn."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from typing import Any

import pytest
from changing import until
from served import CHAT, USER, Served

from blend.serve.http.keys import ApiKeys
from blend.serve.prompts.chat_template import ChatTemplate, Turn

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def answer(connection: socket.socket) -> tuple[int, Any]:
    """The status and the document of the only answer; the server closes the connection behind it."""
    connection.settimeout(20)
    reply = HTTPResponse(connection)
    reply.begin()
    assert reply.headers["connection"] == "close"
    document = json.loads(reply.read())
    assert connection.recv(1) == b""
    return reply.status, document


def is_silent(connection: socket.socket) -> bool:
    """Whether the server neither answers nor closes the connection."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


def trickle(connection: socket.socket, piece: bytes) -> float:
    """Send a byte again and again until the server has closed the connection; after how many seconds that was."""
    begun = time.monotonic()
    with suppress(ConnectionError):
        while time.monotonic() - begun < 10:
            connection.sendall(piece)
            time.sleep(0.02)
    return time.monotonic() - begun


def healthy(connection: socket.socket) -> None:
    """Read the answer to a health check."""
    reply = b""
    while not reply.endswith(b'{"status": "ok"}'):
        reply += connection.recv(1000)


@pytest.mark.parametrize("path", [CHAT, "/v1/documents", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"])
def test_bodies_whose_first_bytes_do_not_come(listen: Callable[..., Served], path: str) -> None:
    served = listen(first_s=0.2)
    with served.sent(b"", path=path, length=100) as connection:
        status, document = answer(connection)
    assert status == 408
    is_anthropics = path.startswith("/v1/messages")
    assert document["error"]["type"] == ("timeout_error" if is_anthropics else "invalid_request_error")
    assert is_anthropics or document["error"]["code"] == "timeout"


def test_a_body_that_trickles_ends_with_its_time(listen: Callable[..., Served]) -> None:
    served = listen(first_s=0.2, body_s=0.6)
    with served.sent(b"{", length=10_000) as connection:
        assert 0.4 < trickle(connection, b" ") < 5


@pytest.mark.parametrize("first", [b"", GET], ids=["first request", "second request"])
def test_a_head_that_trickles(listen: Callable[..., Served], first: bytes) -> None:
    served = listen(head_s=0.3)
    with served.connected() as connection:
        connection.sendall(first)
        if first:
            healthy(connection)
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nA: b")
        assert answer(connection)[1]["error"]["type"] == "timeout_error"
    with served.connected() as connection:
        connection.sendall(first)
        assert trickle(connection, b"a") < 5


def test_silent_connections_are_closed(listen: Callable[..., Served]) -> None:
    served = listen(head_s=0.2)
    with served.connected() as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("part", [b"x", b""], ids=["trickles", "is silent"])
def test_the_rest_of_a_body_behind_its_answer(listen: Callable[..., Served], part: bytes) -> None:
    served = listen(head_s=0.3)
    with served.connected() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n")
        healthy(connection)
        if part:
            assert trickle(connection, part) < 5
        else:
            assert connection.recv(1) == b""


def test_an_upload_that_stops_is_noticed(listen: Callable[..., Served]) -> None:
    served = listen(upload_s=0.3)
    with served.sent(b'{"documents": [', path="/v1/documents", length=1000) as connection:
        assert answer(connection)[0] == 408
    with served.sent(b'{"documents": [', path="/v1/documents", length=1000) as connection:
        connection.shutdown(socket.SHUT_WR)
    until(lambda: not served.server.server_state.tasks)


def test_an_answer_that_is_not_read_is_given_up(listen: Callable[..., Served]) -> None:
    """The server holds little of it in memory, and then closes the connection."""
    served = listen(unread_s=0.3)
    with served.connected() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        requests = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
        sender = threading.Thread(target=send_all, args=(connection, requests))
        sender.start()
        until(lambda: served.server.server_state.total_requests > 64)
        until(lambda: not served.server.server_state.connections, 20)
        sender.join()
        assert served.server.server_state.total_requests < 2000


def send_all(connection: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        connection.sendall(content)


@pytest.mark.parametrize(
    "content",
    [
        GET * 3000,
        b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nx\r\n" * 90_000,
    ],
    ids=["requests in one write", "chunks of a byte"],
)
def test_a_connection_that_keeps_the_server_busy_rests(served: Served, content: bytes) -> None:
    with served.connected() as connection:
        sender = threading.Thread(target=send_all, args=(connection, content))
        sender.start()
        until(lambda: served.state.resting == 1)
        assert served.send("GET", "/health").status_code == 200
    sender.join()
    until(lambda: served.state.resting == 0)


def test_a_body_in_small_packets_rests_and_is_answered(served: Served) -> None:
    body = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    with served.connected() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + 1000}\r\n\r\n".encode()
        )
        for _ in range(1000):
            connection.sendall(b" ")
            if not served.state.resting:
                time.sleep(0.001)  # so that it is a packet of its own
        assert served.state.resting == 1
        connection.sendall(body)
        connection.settimeout(20)
        reply = HTTPResponse(connection)
        reply.begin()
        assert reply.status == 200
    until(lambda: served.state.resting == 0)


@pytest.fixture
def four_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have files for four connections."""
    monkeypatch.setattr("blend.serve.http.connections.most_connections", lambda: 4)


@pytest.mark.usefixtures("four_connections")
def test_a_new_request_takes_the_place_of_the_key_that_has_most(listen: Callable[..., Served]) -> None:
    served = listen(ApiKeys([("anns", ""), ("bobs", "")]))
    with ExitStack() as stack:
        bob = stack.enter_context(waiting(served, "bobs", b""))
        first, slow, fast = (stack.enter_context(waiting(served, "anns", b"{" * size)) for size in (20_000, 1, 10_000))
        assert served.ask("bobs").status_code == 200
        assert answer(slow)[0] == 503
        assert all(map(is_silent, (bob, first, fast)))


@pytest.mark.usefixtures("four_connections")
def test_a_key_that_is_unknown_takes_no_place(listen: Callable[..., Served]) -> None:
    served = listen(ApiKeys([("anns", "")]))
    with ExitStack() as stack:
        ann = stack.enter_context(waiting(served, "anns", b""))
        for number in range(12):
            stack.enter_context(sent_with(served, f"unknown{number}", b"{"))
        assert served.ask("anns").status_code == 200
        assert is_silent(ann)


def waiting(served: Served, key: str, part: bytes) -> Any:
    """A connection on which a request with this key waits for the rest of its body."""
    before = len(served.server.server_state.tasks)
    connection = sent_with(served, key, part)
    until(lambda: len(served.server.server_state.tasks) > before)
    return connection


def sent_with(served: Served, key: str, part: bytes) -> socket.socket:
    connection = served.connected()
    fields = f"Host: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 50000\r\n\r\n"
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\n{fields}".encode() + part)
    return connection


def test_memory_for_bodies_is_taken_from_the_key_that_has_most(listen: Callable[..., Served]) -> None:
    served = listen(ApiKeys([("anns", ""), ("bobs", "")]), all_bytes=1_000_000)
    part = b'{"messages": "' + b"x" * 399_986

    def large(key: str) -> socket.socket:
        connection = served.connected()
        fields = f"Host: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 500000\r\n\r\n"
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\n{fields}".encode() + part)
        return connection

    with large("anns") as first:
        until(lambda: served.state.bodies.used > 300_000)
        with large("anns") as second:
            until(lambda: served.state.bodies.used > 600_000)
            with large("bobs") as bob:
                assert answer(first)[0] == 503
                assert is_silent(second)
                assert is_silent(bob)
    until(lambda: served.state.bodies.used == 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Questions with documents wait until it is set."""
    go_on, layout = threading.Event(), ChatTemplate.layout

    def after_it(self: ChatTemplate, turns: Sequence[Turn], *more: Any) -> Any:
        assert go_on.wait(60)
        return layout(self, turns, *more)

    monkeypatch.setattr(ChatTemplate, "layout", after_it)
    yield go_on
    go_on.set()


@pytest.mark.usefixtures("four_connections")
def test_health_has_places_while_all_others_are_answered(listen: Callable[..., Served], gate: threading.Event) -> None:
    served = listen()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(served.ask) for _ in range(4)]
        until(lambda: len(served.server.server_state.tasks) == 4)
        for path in ("/health", "/ready", "/metrics"):
            assert served.send("GET", path).status_code == 200
        refused = served.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        gate.set()
        assert {future.result().status_code for future in asked} == {200}
