"""Connections whose body does not come, that carry no HTTP, or that are too many: others are answered."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import httpx
import pytest
from changing import until
from served import Served

from blend.serve.http.server import most_connections, raise_descriptor_limit

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


def test_more_connections_than_there_are_files_for_are_refused(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blend.serve.http.server.most_connections", lambda: 4)
    served = serve()
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connected(served))
        until(lambda: len(served.server.server_state.connections) == 6)
        assert httpx.get(f"{served.url}/health").status_code == 503
    until(lambda: not served.server.server_state.connections)
    assert httpx.get(f"{served.url}/health").status_code == 200


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


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"GET \xff\r\n\r\n", b"A" * 200_000])
def test_what_is_no_http(served: Served, http: httpx.Client, raw: bytes) -> None:
    with connected(served) as connection, suppress(OSError):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(100_000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert http.post(CHAT, json={"messages": USER, "max_tokens": 2}).status_code == 200
