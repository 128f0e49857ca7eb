"""Faults inside the engine: whoever is concerned is told, nobody waits for ever, and the others go on where they can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from cases import cache_chunks, make_layout
from engines import FEW, Answer, ask, layouts
from served import Served

from blend.chunks import encode
from blend.chunks.loader import LayerLoader
from blend.serve.embedded import EmbeddedEngine
from blend.serve.engine import Ended, EngineFailedError, Failed, Sampling, Token, Work
from blend.serve.job import Job

LONG = Sampling(max_tokens=300, ignore_eos=True)


def running(engine: EmbeddedEngine, sampling: Sampling = LONG, number: int = 0) -> Answer:
    """An answer that has begun."""
    answer = ask(engine, layouts(number + 1)[number], sampling)
    while not isinstance(answer.seen.get(timeout=60), Token):
        pass
    return answer


def fails(*_: object) -> Iterator[None]:
    raise RuntimeError("can't allocate memory")


def test_a_cache_that_cannot_be_taken_out_is_told_and_the_next_is_computed(
    make_engine: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layout = make_engine(), make_layout()
    library, told, done = engine._blender.library(layout.prefix), list[Exception | None](), threading.Event()
    wanted, cut = library.missing(layout.chunks)[:2], encode._cut

    def on_done(one: object, error: Exception | None) -> None:
        told.append(error)
        monkeypatch.setattr(encode, "_cut", cut)
        if len(told) == len(wanted):
            done.set()

    library.isolated.prefix  # noqa: B018  # computed here, where it may not fail
    monkeypatch.setattr(encode, "_cut", fails)
    engine.encode(library, wanted, on_done)
    assert done.wait(60)
    assert [type(error) for error in told] == [RuntimeError, type(None)]
    assert engine.alive
    assert ask(engine, layout).wait().tokens


def test_entries_that_cannot_be_closed_harm_nobody(
    make_engine: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, layout, close = make_engine(pass_rows=18), make_layout(chunks=(60, 60), suffix=90), LayerLoader.close
    cache_chunks(engine._blender, layout)
    other, begun = running(engine), threading.Event()
    begin = Job.begin

    def beginning(job: Job, most_rows: int) -> None:
        begin(job, most_rows)
        handle.cancel()
        begun.set()

    def failing(loader: LayerLoader) -> None:
        close(loader)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Job, "begin", beginning)
    monkeypatch.setattr(LayerLoader, "close", failing)
    answer = Answer()
    with engine._changed:  # so that it is not begun before there is a handle
        handle = engine.submit(Work(layout, FEW), answer)
    assert answer.wait().last == Ended("cancelled")
    assert begun.is_set()
    assert other.wait().last == Ended("length")
    assert [record.told["error"] for record in caplog.records] == ["OSError"]


def test_a_fault_that_nobody_foresaw_is_told_to_all(
    make_engine: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layout = make_engine(most_running=1), make_layout()
    first = running(engine)
    waits, told = ask(engine, layout), list[Exception | None]()
    library = engine._blender.library(layout.prefix)
    engine.encode(library, library.missing(layout.chunks), lambda one, error: told.append(error))
    monkeypatch.setattr(engine, "_leave", fails)
    for answer in (first, waits):
        assert isinstance(answer.wait().last, Failed)
        assert isinstance(answer.last.error, EngineFailedError)
    engine._thread.join(60)
    assert told
    assert all(isinstance(error, EngineFailedError) for error in told[-3:])
    assert not engine.alive
    assert engine.holding() == engine.holding()._replace(running=0, waiting=0, encoding=0)
    for late in (lambda: ask(engine, layout), engine.require_room, lambda: engine.encode(library, (), lambda *_: None)):
        with pytest.raises(EngineFailedError):
            late()


def test_an_engine_that_failed_shows_at_the_door(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    engine, body = served.hall.service.engine, {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 2}
    monkeypatch.setattr(engine, "_leave", fails)
    for _ in range(2):
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "started anew" in refused.json()["error"]["message"]
    for path in ("health", "ready"):
        assert httpx.get(f"{served.url}/{path}", timeout=60).status_code == 503
