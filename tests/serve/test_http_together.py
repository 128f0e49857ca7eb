"""Clients that ask over HTTP at the same time and bring the same text; one of them goes away."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from changing import until
from rooms import serving
from served import Served, listening
from test_single_flight import FILES, Passes, agent

from blend.chunks.library import ChunkLibrary
from blend.serve.engine.profile import PrefillProfile
from blend.serve.service import Service


@pytest.fixture
def service(store: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(PrefillProfile, "seconds", lambda profile, rows: 60.0)  # a tiny model is faster than any store
    with serving(store, model, least_gain=32) as running:
        yield running


def body(number: int) -> dict[str, Any]:
    [message] = agent(number).messages
    return {"messages": [{"role": "user", "content": message.content}], "max_tokens": 2}


def in_flight(service: Service, count: int) -> None:
    """Wait until so many requests are."""
    flights = service.tenant("").flights
    assert flights is not None
    until(lambda: flights.begun("") == count)


def test_the_others_go_on_where_one_client_goes_away(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(service, monkeypatch)
    all_there = threading.Event()
    passes.at_pass = lambda rows: all_there.wait(60)
    keep = ChunkLibrary.keep
    leaving = ExitStack()
    puts = list[object]()

    def put(library: ChunkLibrary, *cache: Any) -> None:
        keep(library, *cache)
        puts.append(cache[0])
        if len(puts) == 2:
            leaving.close()  # the owner's client
            time.sleep(0.3)

    monkeypatch.setattr(ChunkLibrary, "keep", put)
    with listening(service, shared=True) as served, ThreadPoolExecutor(3) as pool:
        raw = json.dumps(body(0)).encode()
        leaving.enter_context(served.sent(raw))
        in_flight(service, 1)
        replies = [pool.submit(asked, served, number) for number in (1, 2, 3)]
        in_flight(service, 4)
        all_there.set()
        figures = [reply.result() for reply in replies]
        until(lambda: service.engine.stats().idle)
        counts = served.counts()
    assert len(puts) >= 2 * len(FILES) - 2, "the owner was computing"
    assert all(each["method"] == "blend" and each["rows_shared"] > 0.6 * each["rows"] for each in figures)
    ahead = sum(each["rows_ahead"] for each in figures)
    assert 0 < ahead < figures[0]["rows"], "the next one computed what was left"
    assert sum(each["rows_computed"] for each in figures) + ahead < 0.6 * 4 * figures[0]["rows"]
    assert counts["rows_ahead_total"] == ahead
    ends = {name: count for name, count in counts.items() if name.startswith("request_success_total")}
    assert sum(count for name, count in ends.items() if "length" in name) == 3, ends


def asked(served: Served, number: int) -> dict[str, Any]:
    """The figures of a reply."""
    response = served.ask(**body(number))
    assert response.status_code == 200, response.text
    figures: dict[str, Any] = response.json()["kvblend"]["figures"]
    return figures
