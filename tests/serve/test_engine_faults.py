"""Faults inside the engine: whoever is concerned is told, nobody waits for ever, and the others go on where they can."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from cases import cache_chunks, make_layout
from changing import until
from engines import FEW, LONG, Answer, MakeEngine, alone, ask, layouts
from models import decoder
from served import Served

from blend.config import BlendConfig
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import EngineFailedError, Event, Failed, Finished
from blend.serve.prompt import Prompt
from blend.store import open_store
from blend.types import PromptLayout
from tests.store.reading import damage_caches


def running(engine: EmbeddedEngine, sampling: Sampling = LONG, number: int = 0) -> Answer:
    """An answer that has begun."""
    return ask(engine, layouts(number + 1)[number], sampling, remember=False).begun()


def fails(*_: object) -> Iterator[None]:
    raise RuntimeError("can't allocate memory")


def test_a_cache_that_cannot_be_computed_is_reported(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layout = make_engine(), make_layout()
    library, told = engine.blender.library(layout.prefix), list[Exception | None]()
    encoder = type(library.isolated)
    steps = encoder.steps

    def on_done(_: object, error: Exception | None) -> None:
        told.append(error)
        monkeypatch.setattr(encoder, "steps", steps)

    monkeypatch.setattr(encoder, "steps", fails)
    engine.encode(library, library.missing(layout.chunks)[:2], on_done)
    until(lambda: len(told) == 2)
    assert [type(error) for error in told] == [RuntimeError, type(None)]
    assert engine.alive
    assert ask(engine, layout).wait().tokens


def test_a_fault_that_nobody_foresaw_is_told_to_all(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layout = make_engine(most_running=1), make_layout()
    first = running(engine)
    waits, told = ask(engine, layout), list[Exception | None]()
    library = engine.blender.library(layout.prefix)
    engine.encode(library, library.missing(layout.chunks), lambda one, error: told.append(error))
    monkeypatch.setattr(EmbeddedEngine, "step", fails)
    for answer in (first, waits):
        assert isinstance(answer.wait().last, Failed)
        assert isinstance(answer.last.error, EngineFailedError)
    until(lambda: len(told) >= 3)
    assert all(isinstance(error, EngineFailedError) for error in told[-3:])
    assert not engine.alive
    assert engine.stats() == engine.stats()._replace(running=0, waiting=0, encoding=0)
    for late in (lambda: ask(engine, layout), engine.require_room, lambda: engine.encode(library, (), lambda *_: None)):
        with pytest.raises(EngineFailedError):
            late()


def test_an_engine_that_failed_shows_at_the_door(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 2}
    monkeypatch.setattr(EmbeddedEngine, "step", fails)
    for _ in range(2):
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "started anew" in refused.json()["error"]["message"]
    for path in ("health", "ready"):
        assert httpx.get(f"{served.url}/{path}", timeout=60).status_code == 503


def test_a_listener_that_fails_at_the_end_of_an_answer_hears_of_it(make_engine: MakeEngine) -> None:
    """As where the text of an answer cannot be made: its client must not wait for ever."""
    engine, answer = make_engine(), Answer()

    def listen(event: Event) -> None:
        if isinstance(event, Finished):
            raise RuntimeError("no text")
        answer(event)

    engine.submit(Prompt.of(layouts(1)[0], sampling=FEW), listen)
    assert isinstance(answer.wait().last, Failed)
    assert ask(engine, layouts(1)[0]).wait().end_reason == "length"


class Broken:
    """Passes with the rows of these prompts fail; how many rows each pass that failed had of how many prompts."""

    def __init__(self, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._prefill, self.whose = engine.decoder.prefill, list[Callable[[RowRequest], bool]]()
        self.failed: list[int] = []
        monkeypatch.setattr(engine.decoder, "prefill", self)

    def __call__(self, requests: Sequence[RowRequest]) -> torch.Tensor:
        if any(mine(request) for mine in self.whose for request in requests):
            self._prefill(requests)  # so that all caches have been written to
            self.failed.append(len(requests))
            raise RuntimeError("these rows")
        return self._prefill(requests)


def decoding(answer: Answer) -> Callable[[RowRequest], bool]:
    """The rows of an answer that runs."""
    blend = answer.sequence.blend
    return lambda request: request.cache is blend.cache


def test_only_the_answer_fails_whose_row_cannot_run(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampling = make_engine(), Sampling(max_tokens=60, ignore_eos=True)
    expected = [alone(engine.blender, layout, sampling) for layout in layouts(3)]
    answers = [ask(engine, layout, sampling) for layout in layouts(3)]
    while engine.stats().running < 3 or any(len(answer.tokens) < 2 for answer in answers):
        pass
    broken = Broken(engine, monkeypatch)
    broken.whose.append(decoding(answers[1]))
    assert isinstance(answers[1].wait().last, Failed)
    assert [answers[i].wait().tokens for i in (0, 2)] == [expected[0], expected[2]]
    assert broken.failed == [3, 1]


@pytest.mark.parametrize("selector", ["query_guided", "hkvd", "mixed"])
def test_a_prefill_beside_an_answer_that_fails_begins_anew(
    selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pass left in its cache, and what the selector saw of it, counts for nothing."""
    engine, layout = make_engine(pass_rows=24), layouts(2)[1]
    cache_chunks(engine.blender, layout)
    config, sampling = BlendConfig(selector, ratio=0.3), replace(LONG, logprobs=5, max_tokens=2)
    expected = ask(engine, layout, sampling, config=config).wait()
    victim, broken = running(engine), Broken(engine, monkeypatch)
    mine, begun = decoding(victim), threading.Event()

    def once_it_is_prefilled(request: RowRequest) -> bool:
        if request.positions.shape[0] > 1:
            begun.set()
        return begun.is_set() and mine(request)

    broken.whose.extend((once_it_is_prefilled, once_it_is_prefilled))  # asked of all before and after it is set
    answer = ask(engine, layout, sampling, config=config).wait()
    assert isinstance(victim.wait().last, Failed)
    assert max(broken.failed) == 2
    assert answer.tokens == expected.tokens
    assert answer.figures.rows_computed == expected.figures.rows_computed
    assert answer.first.logprob == pytest.approx(expected.first.logprob, abs=1e-5)


def test_a_prefill_that_cannot_run_fails_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layout = make_engine(pass_rows=24, least_gain=1, remember=True), layouts(2)[1]
    expected = alone(engine.blender, layouts(1)[0], LONG)
    other, broken = running(engine), Broken(engine, monkeypatch)
    broken.whose.append(lambda request: request.positions.shape[0] > 1)
    assert isinstance(ask(engine, layout).wait().last, Failed)
    assert other.wait().tokens == expected
    until(lambda: engine.stats().idle)
    assert len(broken.failed) <= 3, "no cache is computed for what failed"


def test_a_cache_that_is_computed_beside_an_answer_that_fails_is_stored(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layout = make_engine(), make_layout()
    library, told = engine.blender.library(layout.prefix), list[Exception | None]()
    victim, broken = running(engine), Broken(engine, monkeypatch)
    mine = decoding(victim)
    broken.whose.append(lambda request: mine(request) and engine.stats().encoding > 0)
    engine.encode(library, library.missing(layout.chunks)[:1], lambda _, error: told.append(error))
    assert isinstance(victim.wait().last, Failed)
    until(lambda: told == [None])
    assert not library.missing(layout.chunks[:1])


def test_damage_that_shows_while_rows_run_is_computed_again(tmp_path: Path) -> None:
    """Behind another prefix than the caches' own, rows run before the stored layers were all read."""
    blender = Blender(decoder("llama"), open_store(tmp_path, codec="native"), BlendConfig(ratio=0.3))
    layout = make_layout()
    behind = PromptLayout.of_chunks(
        (*layout.prefix, 7, 7, 7), layout.chunks, layout.suffix, canonical_prefix=layout.prefix
    )
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks))
    damage_caches(tmp_path)
    engine = EmbeddedEngine(blender, prefix_budget=0, least_gain=-(10**6), remember=False)
    answer = ask(engine, behind).wait()
    engine.close()
    assert answer.last == Finished("length")
    assert answer.started.hits == (False,) * len(layout.chunks)
