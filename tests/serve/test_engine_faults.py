"""Faults inside the engine: whoever is concerned is told, nobody waits for ever, and the others go on where they can."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import cache_chunks, make_layout
from changing import until
from engines import FEW, LONG, Answer, MakeEngine, alone, ask, layouts
from served import Served, refusal

from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.model.passes import RowRequest
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import EngineFailedError, Event, Failed, Finished
from blend.serve.prompt import Prompt
from tests.store.reading import damage_caches


def running(engine: EmbeddedEngine, sampling: Sampling = LONG, number: int = 0) -> Answer:
    return ask(engine, layouts(number + 1)[number], sampling, remember=False).begun()


def fails(*_: object) -> Iterator[None]:
    raise RuntimeError("can't allocate memory")


def test_a_cache_that_cannot_be_computed_is_reported(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layout = make_engine(), make_layout()
    library, told = engine.blender.library(layout.prefix), list[Exception | None]()

    def on_done(_: object, error: Exception | None) -> None:
        told.append(error)
        monkeypatch.undo()

    monkeypatch.setattr(type(library.isolated), "steps", fails)
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
    monkeypatch.setattr(EmbeddedEngine, "step", fails)
    for _ in range(2):
        refused = served.ask()
        assert refusal(refused) == (503, "unavailable")
        assert "started anew" in refused.json()["error"]["message"]
    for path in ("/health", "/ready"):
        assert served.send("GET", path).status_code == 503


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


def break_passes(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, mine: Callable[[RowRequest], bool], prompts: int = 1
) -> list[int]:
    """Let passes with these rows fail, from the first one of so many prompts on; the prompts of each that failed."""
    prefill, failed = engine.decoder.prefill, list[int]()

    def broken(requests: Sequence[RowRequest]) -> torch.Tensor:
        fails = any(map(mine, requests)) and (failed or len(requests) >= prompts)
        logits = prefill(requests)
        if fails:  # though all caches have been written to
            failed.append(len(requests))
            raise RuntimeError("these rows")
        return logits

    monkeypatch.setattr(engine.decoder, "prefill", broken)
    return failed


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
    failed = break_passes(engine, monkeypatch, decoding(answers[1]))
    assert isinstance(answers[1].wait().last, Failed)
    assert [answers[i].wait().tokens for i in (0, 2)] == [expected[0], expected[2]]
    assert failed == [3, 1]


@pytest.mark.parametrize("selector", ["query_guided", "hkvd", "mixed"])
def test_a_prefill_beside_an_answer_that_fails_begins_anew(
    selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pass left in its cache, and what the selector saw of it, counts for nothing."""
    engine, layout = make_engine(pass_rows=24), layouts(2)[1]
    cache_chunks(engine.blender, layout)
    config, sampling = BlendConfig(selector, ratio=0.3), replace(LONG, logprobs=5, max_tokens=2)
    expected = ask(engine, layout, sampling, config=config).wait()
    victim = running(engine)
    failed = break_passes(engine, monkeypatch, decoding(victim), prompts=2)
    answer = ask(engine, layout, sampling, config=config).wait()
    assert isinstance(victim.wait().last, Failed)
    assert max(failed) == 2
    assert answer.tokens == expected.tokens
    assert answer.figures.rows_computed == expected.figures.rows_computed
    assert answer.first.logprob == pytest.approx(expected.first.logprob, abs=1e-5)


def test_a_prefill_that_cannot_run_fails_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layout = make_engine(pass_rows=24, least_gain=1, remember=True), layouts(2)[1]
    expected = alone(engine.blender, layouts(1)[0], LONG)
    other = running(engine)
    failed = break_passes(engine, monkeypatch, lambda request: request.positions.shape[0] > 1)
    assert isinstance(ask(engine, layout).wait().last, Failed)
    assert other.wait().tokens == expected
    until(lambda: engine.stats().idle)
    assert len(failed) <= 3, "no cache is computed for what failed"


def test_a_cache_that_is_computed_beside_an_answer_that_fails_is_stored(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layout = make_engine(), make_layout()
    library, told = engine.blender.library(layout.prefix), list[Exception | None]()
    victim = running(engine)
    mine = decoding(victim)
    break_passes(engine, monkeypatch, lambda request: mine(request) and engine.stats().encoding > 0)
    engine.encode(library, library.missing(layout.chunks)[:1], lambda _, error: told.append(error))
    assert isinstance(victim.wait().last, Failed)
    until(lambda: told == [None])
    assert not library.missing(layout.chunks[:1])


def test_damage_that_shows_while_rows_run_is_computed_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Behind another prefix than the caches' own, rows run before the stored layers were all read."""
    engine, layout = make_engine(), make_layout()
    cache_chunks(engine.blender, layout)
    damage_caches(tmp_path / "store0")
    prefix = (*layout.prefix, 7, 7, 7)
    behind = PromptLayout.of_chunks(prefix, layout.chunks, layout.suffix, canonical_prefix=layout.prefix)
    answer = ask(engine, behind).wait()
    assert answer.last == Finished("length")
    assert answer.started.hits == (False,) * len(layout.chunks)
