"""Connections on which no request comes, or no HTTP, or too many of them: they end, and others are answered."""

from __future__ import annotations

import json
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import httpx
import pytest
from changing import until
from served import Served

from blend.serve.faults import LOG
from blend.serve.http.connection import most_connections, raise_descriptor_limit

USER = [{"role": "user", "content": "When did the harbour open?"}]
CHAT = "/v1/chat/completions"


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_a_body_that_does_not_come(serve: Callable[..., Served]) -> None:
    served = serve({"body_s": 0.2})
    with connected(served) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(100_000).startswith(b"HTTP/1.1 408 ")
    with connected(served) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert httpx.get(f"{served.url}/ready").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n",
    ],
)
def test_a_request_that_does_not_come(serve: Callable[..., Served], sent: bytes) -> None:
    """Nor does it help to send a little of it now and then."""
    served = serve({"head_s": 0.3})
    with connected(served) as connection, suppress(OSError):
        connection.sendall(sent)
        while True:
            connection.sendall(b"X")
            connection.settimeout(0.05)
            with suppress(TimeoutError):
                while connection.recv(100_000):
                    pass
                break
    until(lambda: not served.server.server_state.connections, 10)


def test_a_request_that_came_has_time_for_its_body_and_its_answer(serve: Callable[..., Served]) -> None:
    served = serve({"head_s": 0.2})
    raw = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    with connected(served) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(30)
        connection.sendall(raw)
        assert connection.recv(100_000).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_is_refused_as_everything_else_is(served: Served) -> None:
    with connected(served) as connection:
        connection.sendall(b"GET / HTTP/9\r\n\r\n")
        refused = HTTPResponse(connection)
        refused.begin()
        assert (refused.status, refused.headers["content-type"]) == (400, "application/json")
        assert json.loads(refused.read())["error"]["code"] == "invalid_request"
        assert connection.recv(1) == b""


def test_of_too_many_connections_the_one_goes_that_waited_longest(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("blend.serve.http.server.most_connections", lambda: 4)
    served = serve()
    held = served.server.server_state.connections
    with ExitStack() as stack, caplog.at_level(logging.WARNING, logger=LOG.name):
        half = [stack.enter_context(connected(served)) for _ in range(12)]
        until(lambda: len(held) == 4)
        assert httpx.get(f"{served.url}/health").status_code == 200
        for connection in half[:8]:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    (record,) = [one for one in caplog.records if one.name == LOG.name]
    assert record.told["most"] == 4  # type: ignore[attr-defined]


def test_as_many_descriptors_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 512), before[1]))
        few = most_connections()
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 16_384), before[1])
        assert few < most_connections() < 16_384 / 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"GET \xff\r\n\r\n", b"A" * 200_000])
def test_what_is_no_http(served: Served, http: httpx.Client, raw: bytes) -> None:
    with connected(served) as connection, suppress(OSError):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(100_000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert http.post(CHAT, json={"messages": USER, "max_tokens": 2}).status_code == 200
