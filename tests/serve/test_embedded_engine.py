"""Many prompts at once through the embedded engine: each gets what it gets alone, and none harms another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import Queue

import pytest
import torch
from cases import cache_chunks, make_layout
from changing import until
from models import decoder

from blend.blender import Blender
from blend.config import BlendConfig
from blend.errors import ConfigError, PromptError, StoreError
from blend.model.full_prefill import full_prefill
from blend.model.generate import generate
from blend.serve import embedded
from blend.serve.embedded import EmbeddedEngine
from blend.serve.engine import Ended, Event, Failed, QueueFullError, Sampling, Started, Token, Work
from blend.store import open_store
from blend.types import PromptLayout

FEW = Sampling(max_tokens=6)


class Answer:
    """What came back for one prompt; at_event: called for each event first."""

    def __init__(self, at_event: Callable[[], object] = lambda: None) -> None:
        self.at_event = at_event
        self.events: list[Event] = []
        self.done = threading.Event()
        self.seen: Queue[Event] = Queue()

    def __call__(self, event: Event) -> None:
        self.at_event()
        self.events.append(event)
        self.seen.put(event)
        if isinstance(event, Ended | Failed):
            self.done.set()

    def wait(self) -> Answer:
        assert self.done.wait(120)
        return self

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def started(self) -> Started:
        assert isinstance(self.events[0], Started)
        return self.events[0]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., EmbeddedEngine]]:
    made: list[EmbeddedEngine] = []
    before = set(threading.enumerate())

    def make(name: str = "llama", **options: int) -> EmbeddedEngine:
        blender = Blender(decoder(name), open_store("memory:", codec="native"), BlendConfig(ratio=0.3))
        # Unless a test says otherwise every prompt is blended, however short, and leaves nothing to later ones.
        usual = {"prefix_budget": 0, "least_gain": -(10**6), "remember": False}
        made.append(EmbeddedEngine(blender, **{**usual, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("kvblend")]


def ask(engine: EmbeddedEngine, layout: PromptLayout, sampling: Sampling = FEW, **more: object) -> Answer:
    answer = Answer()
    engine.submit(Work(layout, sampling, **more), answer)  # type: ignore[arg-type]
    return answer


def layouts(count: int) -> list[PromptLayout]:
    """Prompts of several lengths with the same prefix; every other one uses chunks of the one before, in another order."""
    first = make_layout()
    found = []
    for number in range(count):
        other = make_layout(chunks=(9 + number, 17, 5), suffix=3 + number % 5, seed=number + 2)
        chunks = (*other.chunks[:2], *reversed(first.chunks)) if number % 2 else (*first.chunks[1:], *other.chunks)
        found.append(PromptLayout(first.prefix, chunks, other.suffix))
    return found


def alone(blender: Blender, layout: PromptLayout, sampling: Sampling = FEW) -> list[int]:
    blend = blender.prefill(layout)
    return list(generate(blender.decoder, blend, layout.token_ids, max_new_tokens=sampling.max_tokens).token_ids)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2"])
def test_each_gets_what_it_gets_alone(name: str, make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(name, most_running=5, pass_rows=25)
    blender, prompts = engine._blender, layouts(9)
    for layout in prompts[:6]:
        cache_chunks(blender, layout)
    expected = [alone(blender, layout) for layout in prompts]
    answers = [ask(engine, layout) for layout in prompts]
    for answer, tokens, layout in zip(answers, expected, prompts, strict=True):
        assert answer.wait().tokens == tokens
        assert answer.last == Ended("length" if len(tokens) == FEW.max_tokens else "stop")
        assert answer.started.rows == layout.rows
    assert answers[0].started.hits == (True,) * len(prompts[0].chunks)
    assert answers[0].started.rows_computed < prompts[0].rows / 2
    engine.close(finish_s=60)
    assert engine.holding()[:2] == (0, 0)


def test_an_answer_goes_on_while_another_prompt_is_prefilled(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(most_running=2, pass_rows=10)
    order: list[str] = []
    short, long = Answer(lambda: order.append("short")), Answer(lambda: order.append("long"))
    engine.submit(Work(layouts(1)[0], Sampling(max_tokens=60)), short)
    while not isinstance(short.seen.get(timeout=60), Token):
        pass
    engine.submit(Work(layouts(2)[1], FEW), long)
    begun = len(order)
    long.wait()
    assert order[begun:].index("long") >= 5, "its rows take more than five passes, each with a token of the other"
    assert short.wait().tokens == alone(engine._blender, layouts(1)[0], Sampling(max_tokens=60))


def test_what_the_store_lacked_is_there_for_the_next(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, layout = make_engine(remember=True), make_layout()
    first = ask(engine, layout).wait()
    assert first.started.hits == (False,) * 4
    assert first.started.rows_computed == layout.rows - len(layout.prefix)
    deadline = threading.Event()
    while engine._blender.library(layout.prefix).missing(layout.chunks) and not deadline.wait(0.01):
        pass
    assert ask(engine, layout).wait().started.hits == (True,) * 4


def test_what_the_store_lacks_is_computed_though_prompts_always_wait(
    make_engine: Callable[..., EmbeddedEngine],
) -> None:
    """Or a busy server would compute it anew in every prompt, and be the busier for it."""
    engine = make_engine(most_running=2, pass_rows=12)
    others = [replace(layout, plain=frozenset(range(len(layout.chunks)))) for layout in layouts(3)]
    wanted = layouts(1)[0]
    library = engine._blender.library(wanted.prefix)
    lacking = library.missing(wanted.chunks[:1])
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
    assert not library.missing(wanted.chunks[:1])


def test_a_prompt_without_chunks_is_prefilled_in_full(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, ids = make_engine(), make_layout().token_ids
    layout = PromptLayout(ids[:1], (), ids[1:])
    answer = ask(engine, layout).wait()
    full = full_prefill(engine._decoder, layout)
    assert answer.tokens == list(generate(engine._decoder, full, ids, max_new_tokens=6).token_ids)
    assert answer.started.rows_computed == layout.rows - 1


def test_who_is_cancelled_leaves_and_the_others_stay(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, prompts = make_engine(), layouts(3)
    answers = [Answer() for _ in prompts]
    handles = [
        engine.submit(Work(layout, Sampling(max_tokens=200)), answer)
        for layout, answer in zip(prompts, answers, strict=True)
    ]
    while not isinstance(answers[1].seen.get(timeout=60), Token):
        pass
    handles[1].cancel()
    handles[1].cancel()
    assert answers[1].wait().last == Ended("cancelled")
    for index in (0, 2):
        expected = alone(engine._blender, prompts[index], Sampling(max_tokens=200))
        assert answers[index].wait().tokens == expected
    assert sum(isinstance(event, Ended) for event in answers[1].events) == 1


def test_no_more_wait_than_may(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, layout = make_engine(most_running=1, most_waiting=2), make_layout()
    answers, refused = [], []
    for _ in range(12):
        try:
            answers.append(ask(engine, layout, Sampling(max_tokens=30)))
        except QueueFullError as error:
            refused.append(error)
    assert refused
    assert all(error.retry_after_s >= 1 for error in refused)
    tokens = {tuple(answer.wait().tokens) for answer in answers}
    assert tokens == {tuple(alone(engine._blender, layout, Sampling(max_tokens=30)))}


def test_memory_for_one_at_a_time_is_enough(make_engine: Callable[..., EmbeddedEngine]) -> None:
    layout = make_layout()
    row_bytes = sum(layer.width for layer in decoder("llama").rotations) * 4
    engine = make_engine(kv_budget=row_bytes * (layout.rows + FEW.max_tokens))
    held: list[int] = []
    answers = [Answer(lambda: held.append(engine.holding().running)) for _ in range(4)]
    for answer in answers:
        engine.submit(Work(layout, FEW), answer)
    assert {tuple(answer.wait().tokens) for answer in answers} == {tuple(alone(engine._blender, layout))}
    assert max(held) == 1
    with pytest.raises(PromptError, match="MiB of KV memory"):
        ask(engine, layout, replace(FEW, max_tokens=7))


def test_priorities_and_deadlines(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, layout = make_engine(most_running=1), make_layout()
    order: list[str] = []
    running = ask(engine, layout, Sampling(max_tokens=100))
    while not isinstance(running.seen.get(timeout=60), Token):
        pass
    answers = {name: Answer(partial(order.append, name)) for name in ("later", "first", "late")}
    for name, priority, deadline in (("later", 1, None), ("first", 0, None), ("late", 2, 0.0)):
        work = Work(layout, FEW, priority=priority, deadline_s=deadline)
        engine.submit(work, answers[name])
    assert answers["late"].wait().last == Ended("deadline")
    for name in ("first", "later"):
        assert answers[name].wait().last == Ended("length")
    assert answers["late"].tokens == []
    assert [name for name in dict.fromkeys(order) if name != "late"] == ["first", "later"]


def test_a_prompt_whose_chunks_cannot_be_read_is_computed_in_full(
    make_engine: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = make_engine(), layouts(2)
    cache_chunks(engine._blender, prompts[0])
    expected, plain = alone(engine._blender, prompts[0]), engine._blender.store.open_many
    broken = engine._blender.encoder(prompts[1].prefix).identity.key(prompts[1].chunks[0])

    def down(keys: Sequence[object]) -> object:
        if broken in keys:
            raise StoreError("the store is down")
        return plain(keys)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._blender.store, "open_many", down)
    full = ask(engine, prompts[1], full=True).wait()
    without, fine = ask(engine, prompts[1]), ask(engine, prompts[0])
    assert without.wait().tokens == full.tokens
    assert (without.started.reason, sum(without.started.hits)) == ("store_unreachable", 0)
    assert without.started.rows_computed == full.started.rows_computed
    assert fine.wait().tokens == expected
    assert fine.started.reason == ""


def test_a_listener_that_fails_harms_only_itself(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, prompts = make_engine(), layouts(2)

    def broken(event: Event) -> None:
        raise ValueError("the connection is gone")

    engine.submit(Work(prompts[0], FEW), broken)
    assert ask(engine, prompts[1]).wait().tokens == alone(engine._blender, prompts[1])


def test_sampling(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, layout = make_engine(), make_layout()
    cache_chunks(engine._blender, layout)  # so that all of them read the same
    greedy = ask(engine, layout).wait().tokens
    drawn = [Sampling(max_tokens=6, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    one, same, other = (ask(engine, layout, sampling).wait().tokens for sampling in drawn)
    assert one == same != other
    assert ask(engine, layout, Sampling(max_tokens=6, temperature=1.5, top_p=0.0)).wait().tokens == greedy
    told = ask(engine, layout, Sampling(max_tokens=1, logprobs=3)).wait().events[1]
    assert isinstance(told, Token)
    assert told.id == greedy[0]
    expected = engine._blender.prefill(layout).logits[0].log_softmax(-1)
    assert torch.allclose(torch.tensor([p for _, p in told.top]), expected.topk(3).values, atol=1e-4)
    assert told.logprob == pytest.approx(float(expected[told.id]), abs=1e-4)


@pytest.mark.parametrize("wrong", [{"temperature": float("nan")}, {"top_p": 1.5}, {"max_tokens": 0}, {"logprobs": 21}])
def test_sampling_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_closing_finishes_what_runs_or_ends_it(make_engine: Callable[..., EmbeddedEngine]) -> None:
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
    assert [answer.last for answer in answers] == [Ended("shutdown")] * 3


def test_freed_memory_goes_back_when_nobody_waits_for_a_token(
    make_engine: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    engine = make_engine()
    monkeypatch.setattr(embedded, "TIDY_IDLE_S", 0.05)
    monkeypatch.setattr(embedded.mapped, "give_back", lambda: running.append(engine.holding().running))
    for _ in range(2):
        answers = [ask(engine, make_layout()) for _ in range(3)]
        before = len(running)
        for answer in answers:
            answer.wait()
        until(lambda before=before: len(running) > before)
    assert set(running) == {0}
    seen = len(running)
    time.sleep(0.3)
    assert len(running) == seen, "once is enough where nothing ran since"


def test_an_answer_goes_on_behind_its_end_where_that_is_wanted(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, layout = make_engine(), make_layout()
    config = decoder("llama").model.generation_config
    before, config.eos_token_id = config.eos_token_id, list(range(97))
    try:
        assert len(ask(engine, layout).wait().tokens) == 1
        assert len(ask(engine, layout, replace(FEW, ignore_eos=True)).wait().tokens) == FEW.max_tokens
    finally:
        config.eos_token_id = before


def test_the_engine_keeps_its_threads_whatever_others_are_told(make_engine: Callable[..., EmbeddedEngine]) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        engine = make_engine()
        torch.set_num_threads(1)  # as the server does for all other threads, before the engine computes anything
        answer = Answer(lambda: seen.append(torch.get_num_threads()))
        engine.submit(Work(make_layout(), FEW), answer)
        answer.wait()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}
