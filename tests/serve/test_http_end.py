"""What the server refuses while it ends, and what fails outside of the application's own code, is JSON."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from changing import until
from gate import Gate
from served import CHAT, USER, Served, refusal

from blend.serve.documents.documents import Documents
from blend.serve.http import request_log

LONG = {"messages": USER, "max_tokens": 3900, "ignore_eos": True}


def last_event(served: Served, path: str, begun: list[str]) -> Any:
    """The last event of a stream that the server ends."""
    with httpx.stream("POST", f"{served.url}{path}", json={**LONG, "stream": True}, timeout=60) as response:
        assert response.status_code == 200
        begun.append(path)
        events = [line for line in response.iter_lines() if line.startswith("data: {")]
    return json.loads(events[-1].removeprefix("data: "))


def test_what_runs_when_the_last_seconds_run_out(
    listen: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams end with their event, all others with 503, wherever they stand."""
    served, documents = listen(grace_s=0.0), Gate()
    monkeypatch.setattr(Documents, "listing", lambda self: documents())
    served.server.config.timeout_graceful_shutdown = 1
    begun = list[str]()
    with ThreadPoolExecutor(6) as pool:
        try:
            listing = pool.submit(served.send, "GET", "/v1/documents")
            streams = [pool.submit(last_event, served, path, begun) for path in (CHAT, "/v1/messages")]
            answers = [pool.submit(served.send, "POST", path, json=LONG) for path in (CHAT, "/v1/messages")]
            until(lambda: len(begun) == 2 and len(served.server.server_state.tasks) == 5)
            documents.wait()
            served.state.service = None  # what runs goes on, as if it could not be ended
            served.stop()
            assert refusal(listing.result(60)) == (503, "shutting_down")
        finally:
            documents.open()
        openais, anthropics = (answer.result() for answer in answers)
        assert refusal(openais) == (503, "shutting_down")
        assert openais.headers["connection"] == "close"
        assert (anthropics.status_code, anthropics.json()["error"]["type"]) == (503, "overloaded_error")
        assert streams[0].result()["error"]["code"] == "shutting_down"
        assert streams[1].result()["error"]["type"] == "overloaded_error"


def test_bodies_that_arrive_when_the_server_ends_are_refused_at_once(listen: Callable[..., Served]) -> None:
    served = listen()
    with served.sent(b"{", length=100) as question, served.sent(b"", path="/v1/documents", length=100) as upload:
        until(lambda: len(served.server.server_state.tasks) == 2)
        begun = time.monotonic()
        served.stop()
        for connection in (question, upload):
            reply = b"".join(iter(lambda: connection.recv(100_000), b""))  # noqa: B023
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
        assert time.monotonic() - begun < 3


@pytest.mark.parametrize(("path", "keys"), [("/health", {"error"}), ("/v1/messages", {"type", "error"})])
def test_what_fails_in_a_middleware(served: Served, monkeypatch: pytest.MonkeyPatch, path: str, keys: set[str]) -> None:
    monkeypatch.setattr(request_log, "LogEntry", lambda name: 1 / 0)
    failed = served.send("GET", path)
    assert failed.status_code == 500
    assert set(failed.json()) == keys
    assert "ZeroDivision" not in failed.text
