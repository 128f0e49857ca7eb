"""Servers that tests talk to: uvicorn on loopback, in a thread of its own."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from blend.serve.http.app import make_app
from blend.serve.http.requests import ApiKeys, JsonLines
from blend.serve.http.server import Server, listen, url_of
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics

CHAT = "/v1/chat/completions"


def logged(record: logging.LogRecord) -> dict[str, Any]:
    """The line of the log that the server would write."""
    return dict(json.loads(JsonLines().format(record)))


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
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def openai(self) -> openai.OpenAI:
        """A client that gives up at once."""
        return openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0)

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
