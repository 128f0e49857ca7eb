"""OpenTelemetry spans of requests. Imports nothing unless an endpoint is configured.

A request has one span with up to five children: receive (read, validate, retrieve, tokenise), queue, load, prefill, decode.
Loading and prefill alternate by layer; each is shown as its sum. Attributes hold no text of prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from blend.serve.events import Figures

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue
    from starlette.requests import Request

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PARTS = ("receive", "queue", "load", "prefill", "decode")
_LOADING = ("load", "reposition")
_ATTRIBUTES = (
    *("method", "reason", "rows", "rows_computed", "rows_reused", "rows_inexact"),
    *("rows_moved", "rows_shared", "rows_ahead"),
    *("hits", "chunks", "missing", "bytes_loaded"),
)
"""Figures of the prompt that its span has."""


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether these environment variables name an endpoint."""
    return any(environment.get(name) for name in ENDPOINTS) and environment.get("OTEL_SDK_DISABLED", "") != "true"


def is_installed() -> bool:
    """Whether the extra `[otel]` is installed."""
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.exporter.otlp.proto.http") is not None


def exporting() -> Tracing:
    """Tracing that exports to the endpoint of the environment, in batches."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracing(BatchSpanProcessor(OTLPSpanExporter()))


@dataclass
class LogEntry:
    """The figures of one request for the log and the trace.

    Attributes:
        status: overrides the status that was sent.
        begun, accepted: arrival, and acceptance by the service. Times are those of `time.monotonic`; 0.0 was never reached.
        first, ended: first token and end of the answer.
        tokens: tokens of the answer.

    """

    id: str
    tenant: str = ""
    status: int | None = None
    error: str = ""
    begun: float = field(default_factory=time.monotonic)
    accepted: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    ttft_s: float | None = None
    figures: Figures | None = None
    tokens: int = 0
    outcome: str = ""

    def failed(self, status: int, error: str) -> None:
        """The request ended with this error."""
        self.status = status
        self.error = error

    def parts(self) -> list[tuple[str, float]]:
        """The child spans, each with its end."""
        if self.figures is None:
            return [("receive", self.accepted or self.ended), *([("queue", self.ended)] if self.accepted else [])]
        stages = self.figures.stages
        received = self.first - self.figures.ttft_s + stages.get("prepare", 0.0)
        queue = received + self.figures.waited_s
        load = queue + sum(stages.get(stage, 0.0) for stage in _LOADING)
        ends = (received, queue, load, self.first, self.ended)
        return list(zip(_PARTS, ends, strict=True))

    def attributes(self) -> dict[str, AttributeValue]:
        """The attributes of its span."""
        figures = {name: getattr(self.figures, name) for name in _ATTRIBUTES if self.figures is not None}
        fields = {"request": self.id, "outcome": self.outcome, "completion_tokens": self.tokens, **figures}
        return {f"kvblend.{name}": value for name, value in fields.items()}


class Tracing:
    """Makes spans for a processor. The environment may give the service another name."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "kvblend"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvblend")

    def record(self, request: LogEntry, headers: Mapping[str, str]) -> None:
        """Make the spans of a request. headers: `traceparent` continues another trace."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        offset = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return offset + round(seconds * 1e9)

        above = TraceContextTextMapPropagator().extract(headers)
        begin = request.begun
        whole = self._tracer.start_span("request", above, attributes=request.attributes(), start_time=at(begin))
        inside = set_span_in_context(whole)
        for name, end in request.parts():
            stop = min(max(begin, end), request.ended)
            self._tracer.start_span(name, inside, start_time=at(begin)).end(at(stop))
            begin = stop
        whole.end(at(request.ended))

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def entry_of(request: Request) -> LogEntry:
    """The log entry of a request."""
    entry = request.scope["kvblend.entry"]
    assert isinstance(entry, LogEntry)
    return entry
