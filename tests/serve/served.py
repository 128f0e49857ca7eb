"""Servers that tests talk to: uvicorn on loopback, in a thread of its own."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from blend.rag import Rag
from blend.serve.http.app import make_app
from blend.serve.http.keys import ApiKeys
from blend.serve.http.request_log import JsonLines
from blend.serve.http.server import Server, listen, url_of
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "When did the harbour open?"}]


def logged(record: logging.LogRecord) -> dict[str, Any]:
    """The line of the log that the server would write."""
    return dict(json.loads(JsonLines().format(record)))


def refusal(response: httpx.Response) -> tuple[int, str]:
    """Its status, and the code in its body."""
    return response.status_code, response.json()["error"]["code"]


@dataclass
class Served:
    url: str
    server: Server
    thread: threading.Thread
    metrics: Metrics
    state: Any

    @property
    def model(self) -> str:
        return str(self.state.service.model)

    @property
    def rag(self) -> Rag:
        """The corpus without a name."""
        found: Rag = self.state.service.tenant("").rag()
        return found

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def openai(self) -> openai.OpenAI:
        """A client that gives up at once."""
        return openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0)

    def send(self, method: str, path: str, key: str = "", **more: Any) -> httpx.Response:
        """A request with this API key."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(
            method, f"{self.url}{path}", headers={**headers, **more.pop("headers", {})}, timeout=60, **more
        )

    def ask(self, key: str = "", **fields: Any) -> httpx.Response:
        """A short question; fields: others of its body."""
        return self.send("POST", CHAT, key, json={"messages": USER, "max_tokens": 2, **fields})

    def connected(self) -> socket.socket:
        """A connection on which nothing was sent."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    @contextmanager
    def sent(self, raw: bytes, *, path: str = CHAT, length: int = 0) -> Iterator[socket.socket]:
        """A connection on which a request was sent; of a body of `length` bytes only `raw`."""
        with self.connected() as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            yield connection

    def counts(self) -> dict[str, float]:
        """What it has counted, by name and labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name.removeprefix("kvblend_"): float(value) for name, _, value in pairs}

    def stop(self) -> None:
        self.server.stop()

    def ended(self) -> None:
        """Wait until it has."""
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def listening(
    service: Any,
    tenants: ApiKeys | None = None,
    *,
    host: str = "127.0.0.1",
    grace_s: float = 5.0,
    shared: bool = False,
    **limits: Any,
) -> Iterator[Served]:
    """A server. shared: another one uses the service too, so this one does not close it."""
    metrics = Metrics()
    app = make_app(service, tenants or ApiKeys(), RequestLimits(**limits), metrics)
    place = listen(host, 0)
    server = Server(app, place, grace_s=grace_s)
    thread = threading.Thread(target=server.serve_until_stopped, name="test-server")
    thread.start()
    served = Served(url_of(place), server, thread, metrics, app.state.shared)
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield served
    finally:
        served.state.service = None if shared else served.state.service
        served.stop()
        served.ended()
