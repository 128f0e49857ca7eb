"""A store that is slow, or fails half way, holds up nobody but the prompts that read it, and leaves nothing behind."""

import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from cases import cache_chunks, make_layout
from changing import until
from engines import FEW, LONG, Answer, MakeEngine, alone, ask, layouts, passes_of
from gate import Gate
from layouts import marked
from models import LAYERS

from blend.errors import StoreError
from blend.layout import PromptLayout
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import EndReason, Finished, Output, Started
from blend.serve.prompt import Prompt
from tests.store.reading import watched

RUNNING, SLOW = layouts(2)


Slow = Callable[[EmbeddedEngine, str], Gate]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Has this call to an engine's store wait."""

    def wait(engine: EmbeddedEngine, call: str) -> Gate:
        gate = Gate()
        if call == "read":
            watched(engine.blender.store, monkeypatch, lambda layer: gate())
        else:
            gate.before(monkeypatch, engine.blender.store, call)
        return gate

    return wait


@pytest.fixture
def engine(make_engine: MakeEngine) -> EmbeddedEngine:
    """Its store has the caches of a prompt."""
    made = make_engine()
    cache_chunks(made.blender, SLOW)
    return made


def tokens_meanwhile(answer: Answer, count: int) -> None:
    """So many more tokens come now."""
    while not answer.seen.empty():
        answer.seen.get()
    while count:
        event = answer.seen.get(timeout=120)
        assert isinstance(event, Output | Started)
        count -= isinstance(event, Output)


def running(engine: EmbeddedEngine) -> Answer:
    return ask(engine, RUNNING, LONG, method="full").begun()


@pytest.mark.parametrize("call", ["readable", "open_many", "read"])
def test_an_answer_goes_on_while_caches_are_loaded(call: str, engine: EmbeddedEngine, slow: Slow) -> None:
    expected, answer = alone(engine.blender, SLOW), running(engine)
    gate, other = slow(engine, call), ask(engine, SLOW)
    gate.wait()
    tokens_meanwhile(answer, 40)
    assert not other.events
    gate.open()
    assert other.wait().tokens == expected
    assert all(other.started.hits)
    assert answer.wait().tokens == ask(engine, RUNNING, LONG, method="full").wait().tokens


def test_a_prompt_that_loaded_alone_runs_in_small_pieces_beside_an_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, slow: Slow
) -> None:
    engine, layout = make_engine(most_running=4, pass_rows=20), make_layout(suffix=60)
    cache_chunks(engine.blender, layout)
    gate, other = slow(engine, "read"), ask(engine, layout)
    gate.wait()
    answer, passes = running(engine), passes_of(engine, monkeypatch)
    gate.open()
    assert other.wait().tokens
    assert not answer.done.is_set()
    assert max(map(sum, passes)) == 16 + 1


@pytest.mark.parametrize("call", ["put", "held"])
def test_an_answer_goes_on_while_caches_are_stored(call: str, make_engine: MakeEngine, slow: Slow) -> None:
    engine = make_engine(remember=True)
    answer, gate = running(engine), slow(engine, call)
    assert ask(engine, SLOW).wait().started.hits == (False,) * len(SLOW.chunks)
    gate.wait()
    tokens_meanwhile(answer, 40)
    # Caches wait, or the prompt that asks for them.
    assert engine.stats().encoding == (len(SLOW.chunks) if call == "put" else 1)
    gate.open()
    until(lambda: not engine.stats().encoding)
    assert ask(engine, SLOW).wait().started.hits == (True,) * len(SLOW.chunks)


@pytest.mark.parametrize("place", ["readable", "open_many", 0, LAYERS - 1])
def test_a_store_that_fails_half_way_makes_everything_be_computed(
    place: str | int, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a call, or at a layer that is read."""
    down = StoreError("the network is down")

    def fail(index: int) -> None:
        if index == place:
            raise down

    full = ask(engine, SLOW, method="full").wait()
    answer, opened = running(engine), watched(engine.blender.store, monkeypatch, fail)
    if isinstance(place, str):
        monkeypatch.setattr(engine.blender.store, place, Mock(side_effect=down))
    other = ask(engine, SLOW).wait()
    tokens_meanwhile(answer, 2)
    assert opened or isinstance(place, str)
    assert all(one.closed for one in opened)
    assert (other.figures.reason, sum(other.started.hits)) == ("store_unreachable", 0)
    assert (other.tokens, other.figures.rows_computed) == (full.tokens, full.figures.rows_computed)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kvblend-loader")]


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "shutdown"])
def test_a_prompt_that_is_given_up_while_it_is_loaded_leaves_nothing(
    reason: EndReason, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, other = Gate(), Answer()
    opened = watched(engine.blender.store, monkeypatch, lambda layer: gate())
    prompt = Prompt.of(SLOW, sampling=FEW, deadline_s=0.2 if reason == "deadline" else None)
    engine.submit(prompt, other)
    gate.wait()
    closing = threading.Thread(target=engine.close)
    if reason == "shutdown":
        closing.start()
    elif reason == "cancelled":
        prompt.request.cancelled.set()
    assert other.wait().events == [Finished(reason)]
    assert reason == "shutdown" or engine.stats().running == 1, "its memory is not free before nobody writes to it"
    gate.open()
    until(lambda: not engine.stats().running)
    if reason == "shutdown":
        closing.join(120)
    assert all(one.closed for one in opened)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kvblend-loader")]


def test_a_prompt_waits_for_one_that_is_loaded_only_where_it_begins_alike(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = make_engine(prefix_budget=1 << 30), Gate()
    first = make_layout()
    second = marked(PromptLayout.of_chunks(first.prefix, (*first.chunks[:3], (9, 8, 7, 6)), first.suffix), plain={3})
    cache_chunks(engine.blender, first)
    opened = watched(engine.blender.store, monkeypatch, lambda layer: gate())
    loading, alike = ask(engine, first), ask(engine, second)
    other = ask(engine, RUNNING.all_plain())
    assert len(other.wait().tokens) == FEW.max_tokens
    gate.wait()
    assert loading.events == alike.events == []
    assert len([one for one in opened if not one.closed]) == len(first.chunks)
    gate.open()
    assert all(loading.wait().started.hits)
    assert all(alike.wait().started.hits)
