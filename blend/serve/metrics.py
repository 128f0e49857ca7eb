"""What operators watch of `blend serve`: what `prompt_metrics` has, and its answers."""

from __future__ import annotations

from collections.abc import Iterable

from blend.serve.engine import EndReason
from blend.serve.prompt_metrics import WAITS, PromptMetrics
from blend.serve.request import Opened

_GAP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics(PromptMetrics):
    """The metrics of one server; the door and the service write them."""

    def __init__(self) -> None:
        super().__init__()
        self._ttft = self.histogram("time_to_first_token_seconds", "From arrival to the first token.", WAITS)
        self._gap = self.histogram("inter_token_latency_seconds", "Between two tokens of one answer.", _GAP)
        self._whole = self.histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._generated = self.counter("generation_tokens", "Tokens of answers.")
        self._success = self.counter("request_success", "Answers that ended, by how.", "finished_reason")
        self._http = self.counter("http_requests", "Requests by route and status.", "path", "status")

    def opened(self, opened: Opened, seconds: float) -> None:
        """The first token of an answer came so many seconds after its request."""
        self._ttft.observe(seconds)
        self.begun(opened)

    def gaps(self, seconds: Iterable[float]) -> None:
        """Tokens of an answer came, each so many seconds after the one before it."""
        for one in seconds:
            self._gap.observe(one)

    def closed(self, reason: EndReason, tokens: int, seconds: float) -> None:
        """An answer ended, so many seconds after its request."""
        self._generated.inc(tokens)
        self._success.labels(reason).inc()
        self._whole.observe(seconds)

    def responded(self, route: str, status: int) -> None:
        """A response was given. route: as the application knows it, never as a client wrote it."""
        self._http.labels(route, str(status)).inc()
