"""Spans of requests: five below each, one after another, and nobody's text in them."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from served import CHAT, Served

from blend.serve.events import Event
from blend.serve.http.submission import EventChannel
from blend.serve.http.tracing import LogEntry, Tracing, is_wanted

ASKED = {"messages": [{"role": "user", "content": "Which secret has the harbour?"}], "max_tokens": 6}
PARTS = ["receive", "queue", "load", "prefill", "decode"]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(listen: Callable[..., Served]) -> tuple[Served, InMemorySpanExporter]:
    served, spans = listen(), InMemorySpanExporter()
    served.state.tracing = Tracing(SimpleSpanProcessor(spans))
    return served, spans


def post(served: Served, **more: object) -> httpx.Response:
    return httpx.post(f"{served.url}{CHAT}", json={**ASKED, **more}, headers={"traceparent": PARENT}, timeout=60)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_and_its_parts(traced: tuple[Served, InMemorySpanExporter], stream: bool) -> None:
    served, spans = traced
    answered = post(served, stream=stream, kvblend={"retrieve": {"top_k": 3}})
    assert answered.status_code == 200
    *inside, whole = spans.get_finished_spans()
    assert (whole.name, [span.name for span in inside]) == ("request", PARTS)
    assert all(span.parent.span_id == whole.context.span_id for span in inside)
    edges = sorted((span.start_time, span.end_time) for span in inside)
    assert (edges[0][0], edges[-1][1]) == (whole.start_time, whole.end_time)
    assert all(one[1] == other[0] for one, other in pairwise(edges)), "one after another"
    assert all(start <= end for start, end in edges)
    told = dict(whole.attributes)
    assert (told["kvblend.hits"], told["kvblend.outcome"], told["kvblend.completion_tokens"]) == (3, "length", 6)
    assert told["kvblend.request"] == answered.headers["x-request-id"]
    assert f"{whole.context.trace_id:032x}" in PARENT, "part of the client's trace"
    assert whole.resource.attributes["service.name"] == "kvblend"


def test_spans_end_with_the_answer_however_late_it_is_read(
    traced: tuple[Served, InMemorySpanExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, spans = traced
    collect, read_at = EventChannel.collect, list[int]()

    async def late(channel: EventChannel) -> list[Event]:
        events = await collect(channel)
        await asyncio.sleep(0.05)
        read_at.append(time.time_ns())
        return events

    monkeypatch.setattr(EventChannel, "collect", late)
    assert post(served).status_code == 200
    *inside, whole = spans.get_finished_spans()
    assert whole.end_time == inside[-1].end_time < read_at[0]


def test_no_part_ends_after_its_request() -> None:
    """What has no figures has been received and has waited in the queue."""
    spans, now = InMemorySpanExporter(), time.monotonic()
    entry = LogEntry("id", begun=now - 9, accepted=now - 8, ended=now - 5, outcome="cancelled")
    Tracing(SimpleSpanProcessor(spans)).record(entry, {})
    received, waited, whole = spans.get_finished_spans()
    assert [span.name for span in (received, waited)] == ["receive", "queue"]
    assert whole.end_time - whole.start_time == pytest.approx(4e9, abs=1e3)
    assert waited.end_time == whole.end_time
    assert received.end_time - whole.start_time == pytest.approx(1e9, abs=1e3)


def test_nobodys_text_is_in_them(traced: tuple[Served, InMemorySpanExporter]) -> None:
    served, spans = traced
    document = {"title": "A secret title", "text": "The secret of the harbour is its third gate. " * 10}
    answers = [post(served, documents=[document]), post(served, user="secret-user", stop=["secret"])]
    assert post(served, messages=[{"role": "user", "content": " "}]).status_code == 400
    assert [one.status_code for one in answers] == [200, 200]
    texts = [one.json()["choices"][0]["message"]["content"] for one in answers]
    held = "\n".join(span.to_json() for span in spans.get_finished_spans())
    assert '"kvblend.outcome": "refused"' in held
    assert not any(text and text in held for text in ("secret", "harbour", *texts))


def test_nothing_is_imported_unless_an_endpoint_is_named() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert not is_wanted({**endpoint, "OTEL_SDK_DISABLED": "true"})
    code = f"""
import os, sys
from blend.serve.http import app
from blend.serve.http.tracing import exporting, is_wanted
for variables in ({{}}, {endpoint!r}):
    os.environ.update(variables)
    spans = exporting() if is_wanted(os.environ) else None
    print(spans is not None, any(name.startswith("opentelemetry") for name in sys.modules))
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=clean)
    assert printed.splitlines() == ["False False", "True True"]
