"""What operators watch of `blend vllm`: what `blend serve` has of prompts and caches, and what was handed over to vLLM."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from blend.errors import ConfigError
from blend.limits import shown
from blend.serve.access import is_loopback
from blend.serve.metrics import CONTENT_TYPE, WAITS, PromptMetrics

_SLOW_S = 10.0  # for whoever asks to say what


class PrefillMetrics(PromptMetrics):
    """The metrics of one prefill process; its desk and its connections write them, from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._handover = self.histogram(
            "handover_seconds", "From a question's arrival to its blended KV being ready for vLLM.", WAITS
        )
        self._handed = self.counter("handed_over_bytes", "Bytes of blended KV that was made ready for vLLM.")
        self._fetches = self.counter("fetches", "KV that vLLM's workers asked for, by whether it was held.", "held")
        self._held = self.gauge("held_prompts", "Prompts whose blended KV is held for vLLM.")
        self._bytes = self.gauge("held_bytes", "Bytes of that.")
        self._budget = self.gauge("held_budget_bytes", "Bytes that it may take.")

    def handed_over(self, nbytes: int, seconds: float) -> None:
        """Blended KV of a prompt is ready, so many seconds after its question came."""
        self._handed.inc(nbytes)
        self._handover.observe(seconds)

    def fetched(self, *, held: bool) -> None:
        """A worker asked for KV."""
        self._fetches.labels("yes" if held else "no").inc()

    def holds(self, prompts: int, nbytes: int, budget: int) -> None:
        """What is held just now."""
        self._held.set(prompts)
        self._bytes.set(nbytes)
        self._budget.set(budget)


class MetricsPage:
    """GET /metrics over plain HTTP, for this machine alone: nobody is asked for a key."""

    def __init__(self, host: str, port: int) -> None:
        kind = _ServerV6 if ":" in host else _Server
        try:
            self._server = kind((host, port), BaseHTTPRequestHandler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen at --metrics {host}:{port} ({why}); choose another") from None
        at, self._serving = self._server.server_address[1], False
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{at}/metrics"

    @classmethod
    @contextmanager
    def at(cls, address: str) -> Iterator[MetricsPage]:
        """One that is closed at the end. Raises `ConfigError` for an address that is none, of others, or in use."""
        page = cls(*_host_and_port(address))
        try:
            yield page
        finally:
            page.close()

    def serve(self, page: Callable[[], bytes]) -> None:
        """From now on answer with what this gives, in threads of its own; who came before has waited."""
        self._server.RequestHandlerClass = _answering(page)
        threading.Thread(target=self._server.serve_forever, name="kvblend-metrics", daemon=True).start()
        self._serving = True

    def close(self) -> None:
        """Answer no more."""
        if self._serving:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks and leaves, or says nothing, is nobody's concern."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _answering(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        timeout = _SLOW_S

        def do_GET(self) -> None:  # the name that the standard library looks for
            name = urlsplit(f"//{self.headers.get('host', '')}").hostname or ""
            if not is_loopback(name):  # a page of some site whose name leads here
                self.send_error(403)
            elif self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
            else:
                self._give(page())

        def _give(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *told: Any) -> None:
            """Scrapes are not told of."""

    return Answer


def _host_and_port(address: str) -> tuple[str, int]:
    """Of HOST:PORT; port 0 takes a free one. Raises `ConfigError`."""
    try:
        found = urlsplit(f"//{address}")
        host, port = found.hostname, found.port
    except ValueError:
        host = port = None
    if not host or port is None or found.path or found.username is not None:
        raise ConfigError(f"--metrics {shown(address)} is no address: give HOST:PORT, such as 127.0.0.1:9400")
    if not is_loopback(host):
        raise ConfigError(
            f"--metrics {shown(address)} is reached from other machines, and asks nobody for a key: give an address of this "
            "machine alone, such as 127.0.0.1:9400, and let a proxy stand before it"
        )
    return host, port
