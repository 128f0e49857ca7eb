"""Many prompts at once through the embedded engine: each gets what it gets alone, in its turn, within memory, until the end."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import cache_chunks, make_layout
from changing import until
from engines import FEW, LONG, Held, MakeEngine, alone, ask, layouts, passes_of
from models import decoder

from blend.layout import PromptLayout
from blend.model import cpu
from blend.sampling import Sampling
from blend.serve.engine import scheduler
from blend.serve.engine.scheduler import WaitingQueue
from blend.serve.events import Finished, QueueFullError


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3n", "gemma4"])
def test_each_gets_what_it_gets_alone(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(name, most_running=5, pass_rows=25)
    blender, prompts = engine.blender, layouts(9)
    for layout in prompts[:6]:
        cache_chunks(blender, layout)
    expected = [alone(blender, layout) for layout in prompts]
    answers = [ask(engine, layout) for layout in prompts]
    for answer, tokens, layout in zip(answers, expected, prompts, strict=True):
        assert answer.wait().tokens == tokens
        assert answer.last == Finished("length" if len(tokens) == FEW.max_tokens else "stop")
        assert answer.figures.rows == layout.rows
    assert answers[0].started.hits == (True,) * len(prompts[0].chunks)
    assert answers[0].figures.rows_computed < prompts[0].rows / 2
    engine.close(finish_s=60)
    assert engine.stats()[:2] == (0, 0)


def test_what_the_store_lacks_is_computed_though_prompts_always_wait(make_engine: MakeEngine) -> None:
    """Or a busy server would compute it anew in every prompt, and be the busier for it."""
    engine = make_engine(most_running=2, pass_rows=12)
    others = [layout.all_plain() for layout in layouts(3)]
    layout = layouts(1)[0]
    library = engine.blender.library(layout.prefix)
    lacking = library.missing(layout.chunks[:1])
    assert lacking
    asked = [ask(engine, layout) for layout in others * 8]
    left_when_stored: list[int] = []

    def on_done(one: object, error: Exception | None) -> None:
        assert error is None
        left_when_stored.append(sum(not one.done.is_set() for one in asked))

    engine.encode(library, lacking, on_done)
    for one in asked:
        one.wait()
    assert len(left_when_stored) == len(lacking)
    assert min(left_when_stored) > len(asked) // 3
    assert not library.missing(layout.chunks[:1])


@pytest.mark.parametrize("given", [{"temperature": 1e-40}, {"temperature": 1.1e-5}, {"temperature": 1.5, "top_p": 0.0}])
def test_next_to_no_choice_is_greedy(given: dict[str, float], make_engine: MakeEngine) -> None:
    engine, layout = make_engine(), make_layout()
    cache_chunks(engine.blender, layout)
    assert ask(engine, layout, replace(FEW, seed=1, **given)).wait().tokens == ask(engine, layout).wait().tokens


def test_an_answer_goes_on_behind_its_end_if_wanted(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layout = make_engine(), make_layout()
    monkeypatch.setattr(decoder("llama").model.generation_config, "eos_token_id", list(range(97)))
    assert len(ask(engine, layout).wait().tokens) == 1
    assert len(ask(engine, layout, replace(FEW, ignore_eos=True)).wait().tokens) == FEW.max_tokens


def test_freed_memory_goes_back_while_nothing_runs(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    engine = make_engine()
    monkeypatch.setattr(scheduler, "TRIM_S", 0.05)
    monkeypatch.setattr(cpu, "trim_heap", lambda: running.append(engine.stats().running))
    ask(engine, make_layout()).wait()
    until(lambda: len(running) > 2)  # nothing is asked any more
    assert set(running) == {0}


def test_the_engine_keeps_its_threads_whatever_others_are_told(make_engine: MakeEngine) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        engine = make_engine()
        torch.set_num_threads(1)  # as the server does for all other threads, before the engine computes anything
        ask(engine, make_layout(), at_event=lambda: seen.append(torch.get_num_threads())).wait()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}


GREEDY = Sampling(max_tokens=24, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.3, seed=11)
PENALISED = replace(DRAWN, repetition_penalty=1.3, top_p=0.9)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PENALISED])
@pytest.mark.parametrize("right", [0, 7, 24])
def test_the_answer_is_that_without_a_draft(sampling: Sampling, right: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    layout = layouts(1)[0]
    cache_chunks(engine.blender, layout)
    expected = ask(engine, layout, sampling).wait().tokens
    wrong = tuple((token + 1) % engine.decoder.vocabulary for token in expected)
    draft = (*expected[:right], *wrong[right:], 1, 2, 3)
    answer = ask(engine, layout, sampling, draft=draft).wait()
    assert answer.tokens == expected
    # What the draft left in the caches harms no later prompt.
    assert ask(engine, layout, sampling).wait().tokens == expected


def test_a_right_draft_takes_few_passes_beside_others(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    first, second = layouts(2)
    for layout in (first, second):
        cache_chunks(engine.blender, layout)
    expected = [ask(engine, layout, DRAWN).wait().tokens for layout in (first, second)]
    passes = passes_of(engine, monkeypatch)
    assert ask(engine, first, DRAWN, draft=tuple(expected[0])).wait().tokens == expected[0]
    assert len(passes) < 7 < DRAWN.max_tokens
    both = [ask(engine, first, DRAWN, draft=tuple(expected[0][:20])), ask(engine, second, DRAWN)]
    assert [one.wait().tokens for one in both] == expected


def test_who_is_given_up_leaves_the_queue_wherever_it_stands(make_engine: MakeEngine) -> None:
    """Behind a prompt for which there is no room, and long before there is."""
    engine, layout = make_engine(most_running=1, most_waiting=3), make_layout()
    held, cancelled = Held(engine, layout), threading.Event()
    head = ask(engine, layout)
    late = ask(engine, layout, deadline_s=0.0)
    leaving = ask(engine, layout, cancelled=cancelled)
    cancelled.set()
    with pytest.raises(QueueFullError):
        engine.require_room()
    held.let_go()
    assert late.wait().events == [Finished("deadline")]
    assert leaving.wait().events == [Finished("cancelled")]
    engine.require_room()
    assert not head.events
    assert len(held.answer.tokens) < LONG.max_tokens
    assert head.wait().last == held.answer.wait().last == Finished("length")


def test_the_most_urgent_is_next_though_there_is_room_for_all(make_engine: MakeEngine) -> None:
    """Also before those that came while another prompt is prefilled, but for one that may be loading already."""
    engine, order = make_engine(most_running=8, pass_rows=18), list[str]()
    running = Held(engine, make_layout())
    long = PromptLayout.of_chunks(make_layout().prefix, (), tuple(range(3, 93)))

    answers = [ask(engine, long, at_event=partial(order.append, "long"), priority=1)]
    running.step()
    assert engine.stats().running == 2
    for name, priority in (("first", 1), ("second", 1), ("urgent", 0)):
        answers.append(ask(engine, make_layout(), at_event=partial(order.append, name), priority=priority))
        running.step()
    running.let_go()
    for answer in answers:
        answer.wait()
    found = list(dict.fromkeys(order))
    assert found[0] == "long"
    assert found.index("urgent") < found.index("second")
    assert found.index("first") < found.index("second")


def stub(number: int, tenant: str = "", priority: int = 0, age_s: float = 0.0) -> Any:
    """What the queue reads of a sequence."""
    request = SimpleNamespace(tenant=tenant, priority=priority)
    return SimpleNamespace(number=number, end_reason=None, age_s=age_s, request=request)


def admit(queue: WaitingQueue) -> int:
    first = queue.first()
    queue.admit(first)
    return first.number


def retry_after(queue: WaitingQueue, tenant: str = "") -> float:
    with pytest.raises(QueueFullError) as refused:
        queue.require_room(tenant)
    return refused.value.retry_after_s


def test_a_tenant_takes_half_of_the_places_at_most() -> None:
    queue = WaitingQueue(5)
    for number, tenant in enumerate(("ann", "ann", "bob", "", "")):
        queue.require_room(tenant)
        queue.add(stub(number, tenant))
        if number == 1:
            assert retry_after(queue, "ann") == 1
    for tenant in ("bob", "", "carol"):
        retry_after(queue, tenant)


def test_retry_after_is_how_long_no_place_has_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Mock(return_value=1000.0)
    monkeypatch.setattr(scheduler, "time", Mock(monotonic=clock))
    queue = WaitingQueue(2)
    clock.return_value += 100  # nobody waits
    for number in range(3):
        queue.add(stub(number))
    admit(queue)
    assert retry_after(queue) == 1
    clock.return_value += 9
    assert retry_after(queue) == 9


MANY_AND_ONE = [[("many", priority, 500.0)] * 3 + [("one", 0, 0.0)] * 2 for priority in (0, 1)]


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ([("ann", 1, 0.0), ("bob", 1, 0.0), ("ann", 0, 0.0), ("ann", 0, 0.0)], [2, 3, 1, 0]),
        *((waiting, [0, 3, 1, 4, 2]) for waiting in MANY_AND_ONE),  # old prompts take turns with one who has just come
    ],
)
def test_priority_counts_before_turns(waiting: list[tuple[str, int, float]], order: list[int]) -> None:
    queue = WaitingQueue(9)
    for number, given in enumerate(waiting):
        queue.add(stub(number, *given))
    assert [admit(queue) for _ in waiting] == order


def test_who_has_waited_for_long_is_as_urgent_as_the_most_urgent() -> None:
    """One step in `STEP_S` seconds: behind a stream of urgent prompts it comes when its waiting makes up for the steps."""
    queue, patient = WaitingQueue(9), stub(0, priority=3)
    queue.add(patient)
    for number in range(1, 20):
        queue.add(stub(number))
        if admit(queue) == 0:
            break
        patient.age_s += 10.0
    assert patient.age_s == 3 * scheduler.STEP_S


def test_a_less_urgent_prompt_runs_in_small_pieces(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes meanwhile waits for one piece. Audits are such prompts."""
    engine = make_engine(most_running=2, pass_rows=18)
    passes, largest = passes_of(engine, monkeypatch), dict[int, int]()
    long = PromptLayout.of_chunks(make_layout().prefix, (), tuple(range(3, 93)))
    for priority in (0, 1):
        passes.clear()
        ask(engine, long, cold=True, priority=priority).wait()
        largest[priority] = max(map(sum, passes))
    assert largest[0] > 80
    assert largest[1] == 16
