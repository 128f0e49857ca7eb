"""Who waits for the engine: whose turn it is, who is given up, who must come again later and when."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import make_layout
from engines import FEW, LONG, Answer, Held, MakeEngine, ask

from blend.model.passes import RowRequest
from blend.serve.engine import scheduler
from blend.serve.engine.scheduler import WaitingQueue
from blend.serve.events import Finished, QueueFullError
from blend.serve.prompt import Prompt
from blend.types import PromptLayout


def test_who_is_given_up_leaves_the_queue_wherever_it_stands(make_engine: MakeEngine) -> None:
    """Behind a prompt for which there is no room, and long before there is."""
    engine, layout = make_engine(most_running=1, most_waiting=3), make_layout()
    held, (head, late, left) = Held(engine, layout), (Answer(), Answer(), Answer())
    engine.submit(Prompt.of(layout, sampling=FEW), head)
    engine.submit(Prompt.of(layout, sampling=FEW, deadline_s=0.0), late)
    leaving = Prompt.of(layout, sampling=FEW)
    engine.submit(leaving, left)
    leaving.request.cancelled.set()
    with pytest.raises(QueueFullError):
        engine.require_room()
    held.let_go()
    assert late.wait().events == [Finished("deadline")]
    assert left.wait().events == [Finished("cancelled")]
    engine.require_room()
    assert not head.events
    assert len(held.answer.tokens) < LONG.max_tokens
    assert head.wait().last == held.answer.wait().last == Finished("length")


def test_the_most_urgent_is_next_though_there_is_room_for_all(make_engine: MakeEngine) -> None:
    """Also before those that came while another prompt is prefilled, but for one that may be loading already."""
    engine, order = make_engine(most_running=8, pass_rows=18), list[str]()
    running = Held(engine, make_layout())
    long = PromptLayout.of_chunks(make_layout().prefix, (), tuple(range(3, 93)))

    def submit(name: str, layout: PromptLayout, priority: int) -> Answer:
        answer = Answer(partial(order.append, name))
        engine.submit(Prompt.of(layout, sampling=FEW, priority=priority), answer)
        return answer

    answers = [submit("long", long, 1)]
    running.step()
    assert engine.stats().running == 2
    for name, priority in (("first", 1), ("second", 1), ("urgent", 0)):
        answers.append(submit(name, make_layout(), priority))
        running.step()
    running.let_go()
    for answer in answers:
        answer.wait()
    found = list(dict.fromkeys(order))
    assert found[0] == "long"
    assert found.index("urgent") < found.index("second")
    assert found.index("first") < found.index("second")


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(scheduler, "time", made)
    return made


def stub(number: int, tenant: str = "", priority: int = 0, age_s: float = 0.0) -> Any:
    """What the queue reads of a sequence."""
    request = SimpleNamespace(tenant=tenant, priority=priority)
    return SimpleNamespace(number=number, end_reason=None, age_s=age_s, request=request)


def admit(queue: WaitingQueue) -> int:
    first = queue.first()
    assert first is not None
    queue.admit(first)
    return first.number


def retry_after(queue: WaitingQueue, tenant: str = "") -> float:
    with pytest.raises(QueueFullError) as refused:
        queue.require_room(tenant)
    return refused.value.retry_after_s


def test_a_tenant_takes_half_of_the_places_at_most(clock: Clock) -> None:
    queue = WaitingQueue(5)
    for number in range(2):
        queue.require_room("ann")
        queue.add(stub(number, "ann"))
    assert retry_after(queue, "ann") == 1
    for number, tenant in enumerate(("bob", "", "")):
        queue.require_room(tenant)
        queue.add(stub(2 + number, tenant))
    for tenant in ("bob", "", "carol"):
        retry_after(queue, tenant)
    alone = WaitingQueue(4)  # without tenants all places are everybody's
    for number in range(4):
        alone.require_room("")
        alone.add(stub(number))
    retry_after(alone)


def test_retry_after_is_when_a_place_becomes_free(clock: Clock) -> None:
    """And neither how long somebody waited nor how long all of them take."""
    queue = WaitingQueue(3)
    for number in range(3):
        queue.add(stub(number))
    assert retry_after(queue) == 1
    for number in range(20):
        clock.now += 4
        admit(queue)
        queue.add(stub(3 + number))
    assert retry_after(queue) == pytest.approx(4, rel=0.05)
    clock.now += 9
    assert retry_after(queue) == 9, "it takes longer than it did"


def test_time_in_which_nobody_waits_is_not_counted(clock: Clock) -> None:
    queue = WaitingQueue(1)
    for number in range(5):
        clock.now += 100
        queue.add(stub(number))
        admit(queue)
    queue.add(stub(5))
    assert retry_after(queue) == 1


def test_priority_counts_before_turns(clock: Clock) -> None:
    queue = WaitingQueue(9)
    for number, (tenant, priority) in enumerate((("ann", 1), ("bob", 1), ("ann", 0), ("ann", 0))):
        queue.add(stub(number, tenant, priority))
    order = []
    while (first := queue.first()) is not None:
        order.append(first.number)
        admit(queue)
    assert order == [2, 3, 1, 0]


def test_who_has_waited_for_long_is_as_urgent_as_the_most_urgent(clock: Clock) -> None:
    """One step in `STEP_S` seconds: behind a stream of urgent prompts it comes when its waiting makes up for the steps."""
    queue, patient = WaitingQueue(9), stub(0, priority=3)
    queue.add(patient)
    for number in range(1, 20):
        queue.add(stub(number))
        if admit(queue) == 0:
            break
        patient.age_s += 10.0
    assert patient.age_s == 3 * scheduler.STEP_S


def test_waiting_brings_nobody_before_others_of_the_same_priority(clock: Clock) -> None:
    """A tenant with many old prompts takes turns with one who has just come, and so it does when they have caught up."""
    for priority in (0, 1):
        queue = WaitingQueue(9)
        for number in range(3):
            queue.add(stub(number, "many", priority, age_s=500.0))
        for number in range(3, 5):
            queue.add(stub(number, "one"))
        assert [admit(queue) for _ in range(5)] == [0, 3, 1, 4, 2]


def test_any_difference_of_priority_is_made_up_for(clock: Clock) -> None:
    queue = WaitingQueue(9)
    patient = stub(0, priority=1000, age_s=1999 * scheduler.STEP_S)
    queue.add(patient)
    queue.add(stub(1, priority=-1000))
    assert admit(queue) == 1
    queue.add(stub(2, priority=-1000))
    patient.age_s += scheduler.STEP_S
    assert admit(queue) == 0


def test_a_less_urgent_prompt_runs_in_small_pieces_though_it_is_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes meanwhile waits for one piece. Audits are such prompts."""
    engine, passes = make_engine(most_running=2, pass_rows=18), list[int]()
    prefill = engine.decoder.prefill

    def counted(requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
        passes.append(sum(int(request.positions.shape[0]) for request in requests))
        return prefill(requests, **more)

    monkeypatch.setattr(engine.decoder, "prefill", counted)
    long, largest = PromptLayout.of_chunks(make_layout().prefix, (), tuple(range(3, 93))), dict[int, int]()
    for priority in (0, 1):
        passes.clear()
        ask(engine, long, cold=True, priority=priority).wait()
        largest[priority] = max(passes)
    assert largest[0] > 80
    assert largest[1] == 16
