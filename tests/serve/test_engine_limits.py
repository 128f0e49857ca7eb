"""Queue, memory and the end: what one of many prompts meets there harms no other."""

import threading

import pytest
import torch
from cases import make_layout
from changing import until
from engines import FEW, Answer, MakeEngine, alone, ask, layouts

from blend.model import cpu
from blend.sampling import Sampling
from blend.serve.engine import scheduler
from blend.serve.events import Event, Finished, QueueFullError
from blend.serve.prompt import Prompt


def test_who_is_cancelled_leaves_and_the_others_stay(make_engine: MakeEngine) -> None:
    engine, prompts = make_engine(), layouts(3)
    answers = [Answer() for _ in prompts]
    submitted = [Prompt.of(layout, sampling=Sampling(max_tokens=200)) for layout in prompts]
    for prompt, answer in zip(submitted, answers, strict=True):
        engine.submit(prompt, answer)
    answers[1].begun()
    submitted[1].request.cancelled.set()
    assert answers[1].wait().last == Finished("cancelled")
    for index in (0, 2):
        expected = alone(engine.blender, prompts[index], Sampling(max_tokens=200))
        assert answers[index].wait().tokens == expected
    assert sum(isinstance(event, Finished) for event in answers[1].events) == 1


def test_a_listener_that_fails_harms_only_itself(make_engine: MakeEngine) -> None:
    engine, prompts = make_engine(), layouts(2)

    def broken(event: Event) -> None:
        raise ValueError("the connection is gone")

    engine.submit(Prompt.of(prompts[0], sampling=FEW), broken)
    assert ask(engine, prompts[1]).wait().tokens == alone(engine.blender, prompts[1])


def test_closing_finishes_what_runs_or_ends_it(make_engine: MakeEngine) -> None:
    engine, layout = make_engine(), make_layout()
    answer = ask(engine, layout)
    engine.close(finish_s=60)
    assert answer.done.is_set()
    assert len(answer.tokens) == 6
    with pytest.raises(QueueFullError):
        ask(engine, layout)
    other = make_engine(most_running=1)
    answers = [ask(other, layout, Sampling(max_tokens=300)) for _ in range(3)]
    other.close()
    assert [answer.last for answer in answers] == [Finished("shutdown")] * 3


def test_freed_memory_goes_back_when_nobody_waits_for_a_token(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    engine = make_engine()
    monkeypatch.setattr(scheduler, "TRIM_IDLE_S", 0.05)
    monkeypatch.setattr(cpu, "trim_heap", lambda: running.append(engine.stats().running))
    for _ in range(2):
        answers = [ask(engine, make_layout()) for _ in range(3)]
        before = len(running)
        for answer in answers:
            answer.wait()
        until(lambda before=before: len(running) > before)
    assert set(running) == {0}


def test_memory_that_other_threads_freed_goes_back_too(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = threading.Semaphore(0)
    monkeypatch.setattr(scheduler, "TRIM_IDLE_S", 0.05)
    monkeypatch.setattr(cpu, "trim_heap", returned.release)
    make_engine()  # nothing is asked
    assert all(returned.acquire(timeout=60) for _ in range(3))


def test_the_engine_keeps_its_threads_whatever_others_are_told(make_engine: MakeEngine) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        engine = make_engine()
        torch.set_num_threads(1)  # as the server does for all other threads, before the engine computes anything
        answer = Answer(lambda: seen.append(torch.get_num_threads()))
        engine.submit(Prompt.of(make_layout(), sampling=FEW), answer)
        answer.wait()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}
