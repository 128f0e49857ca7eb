"""Tokens that the host reads while the next pass runs: the same answers, ends and rows in memory as if it read them at once.

A CPU has every token at once. Here it says that it has not, so everything goes the way of a GPU.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from cases import cache_chunks
from changing import until
from engines import Answer, Held, MakeEngine, ask, layouts, passes_of
from host_reads import refused_reads
from models import decoder

from blend.layout import PromptLayout
from blend.sampling import Sampling
from blend.serve.engine.decoding import HostCopy
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import EndReason, Finished, Started
from blend.serve.prompt import Prompt

GREEDY = Sampling(max_tokens=9)
DRAWN = Sampling(max_tokens=9, temperature=1.2, seed=3, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "short": replace(GREEDY, max_tokens=1),
    "two tokens": replace(GREEDY, max_tokens=2),
    "drawn": DRAWN,
    "narrow": replace(DRAWN, top_k=9, top_p=0.9, min_p=0.01, seed=5),
    "penalties": replace(DRAWN, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    "several": replace(DRAWN, n=3, seed=11),
    "log probabilities": replace(DRAWN, logprobs=2),
}
MIX = [*SAMPLINGS.values(), *SAMPLINGS.values()]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From this call on no token is on the host when it is asked for."""
    return lambda: monkeypatch.setattr(HostCopy, "ready", False)


def filled(make_engine: MakeEngine, name: str = "llama", count: int = 1, **options: int) -> tuple[Any, Any]:
    """An engine that remembers, and prompts whose chunks are stored."""
    engine, prompts = make_engine(name, prefix_budget=1 << 24, **options), layouts(count)
    for layout in prompts:
        cache_chunks(engine.blender, layout)
    return engine, prompts


def outcome(answer: Answer) -> tuple[list[Any], dict[int, EndReason]]:
    """Tokens with their log probabilities, of each answer to a prompt, and how it ended."""
    ends = {event.answer: event.reason for event in answer.events if isinstance(event, Finished)}
    outputs = sorted(answer.outputs, key=lambda output: output.answer)
    return [(output.answer, token.id, token.logprob, token.top) for output in outputs for token in output.tokens], ends


def next_turn(engine: EmbeddedEngine, layout: PromptLayout, tokens: list[int]) -> tuple[int, list[int]]:
    """Rows that the next turn of a conversation finds in memory, and its answer."""
    ids = (*layout.token_ids, *tokens, 5, 6, 7)
    answer = ask(engine, PromptLayout.of_chunks(ids[:1], (), ids[1:]), GREEDY).wait()
    return answer.figures.rows_reused, answer.tokens


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_alone(sampling: Sampling, name: str, make_engine: MakeEngine, late: Callable[[], None]) -> None:
    (plain, (layout,)), (engine, _) = filled(make_engine, name), filled(make_engine, name)
    expected = ask(plain, layout, sampling).wait()
    until(lambda: plain.stats().idle)
    turns = [next_turn(plain, layout, expected.tokens_of(index)) for index in range(sampling.n)]
    late()
    answer = ask(engine, layout, sampling).wait()
    assert outcome(answer) == outcome(expected)
    until(lambda: engine.stats().idle)
    assert [next_turn(engine, layout, answer.tokens_of(index)) for index in range(sampling.n)] == turns
    assert engine.prefixes.nbytes == plain.prefixes.nbytes


def test_many_that_join_and_leave(make_engine: MakeEngine, late: Callable[[], None]) -> None:
    engine, prompts = filled(make_engine, count=len(MIX), most_running=6)
    expected = [ask(engine, *pair).wait() for pair in zip(prompts, MIX, strict=True)]
    late()
    engine, prompts = filled(make_engine, count=len(MIX), most_running=6)
    answers = [ask(engine, *pair) for pair in zip(prompts, MIX, strict=True)]
    for answer, other in zip(answers, expected, strict=True):
        assert answer.wait().end_reason == other.end_reason
        assert [answer.tokens_of(index) for index in range(3)] == [other.tokens_of(index) for index in range(3)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_end_token_and_a_listener_end_it_in_time(
    count: int, make_engine: MakeEngine, late: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (layout,) = filled(make_engine)
    whole = ask(engine, layout, DRAWN).wait().tokens
    late()
    stopped = set[int]()
    answer = Answer(lambda: len(answer.tokens) == count - 1 and stopped.add(0))
    engine.submit(replace(Prompt.of(layout, sampling=DRAWN), stopped=stopped), answer)
    assert (answer.wait().tokens, answer.end_reason) == (whole[:count], "stop")
    assert whole[count - 1] not in whole[: count - 1]
    monkeypatch.setattr(decoder("llama").model.generation_config, "eos_token_id", whole[count - 1])
    answer = ask(engine, layout, replace(DRAWN, ignore_eos=False)).wait()
    assert (answer.tokens, answer.end_reason) == (whole[:count], "stop")
    until(lambda: engine.stats().idle)
    # The whole answer, which came before, goes on with the same tokens.
    assert next_turn(engine, layout, whole[:count])[0] == layout.rows + count


def test_a_cancelled_one_leaves_the_rows_of_its_tokens(make_engine: MakeEngine, late: Callable[[], None]) -> None:
    engine, (layout, other) = filled(make_engine, count=2)
    expected = ask(engine, other, replace(DRAWN, max_tokens=60)).wait().tokens
    late()
    cancelled = threading.Event()
    answer = Held(engine, layout, cancelled=cancelled)
    beside = ask(engine, other, replace(DRAWN, max_tokens=60))
    for _ in range(4):
        answer.step()
    cancelled.set()
    answer.let_go()
    tokens = answer.answer.wait().tokens
    assert answer.answer.end_reason == "cancelled"
    assert beside.wait().tokens == expected
    until(lambda: engine.stats().idle)
    assert next_turn(engine, layout, tokens)[0] == layout.rows + len(tokens) - 1


def test_launches_run_ahead(make_engine: MakeEngine, late: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, (layout,) = filled(make_engine)
    passes = passes_of(engine, monkeypatch)

    def passes_of_answer() -> list[int]:
        """Passes of the answer before each of its tokens came."""
        at = list[int]()
        answer = Answer(lambda: at.append(len(passes)))
        engine.submit(Prompt.of(layout, sampling=DRAWN), answer)
        began, *tokens, _ = zip(at, answer.wait().events, strict=True)
        assert isinstance(began[1], Started)
        return [count - began[0] for count, _ in tokens]

    assert passes_of_answer() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    late()
    assert passes_of_answer() == [0, 2, 3, 4, 5, 6, 7, 8, 8]


@pytest.mark.parametrize("sampling", [SAMPLINGS[name] for name in ("greedy", "narrow", "penalties")], ids=str)
def test_decoding_reads_nothing_but_tokens(
    sampling: Sampling, make_engine: MakeEngine, late: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (layout, other) = filled(make_engine, count=2)
    sampling = replace(sampling, max_tokens=40, ignore_eos=True)
    expected = [ask(engine, prompt, sampling).wait().tokens for prompt in (layout, other)]
    late()
    first, refused = Held(engine, layout, sampling), ExitStack()

    def refuse() -> None:
        """In the engine's thread: from this answer's second token to its 30th, while the first answer runs as well."""
        if len(answer.tokens) == 1:
            refused.enter_context(refused_reads(monkeypatch))
        elif len(answer.tokens) == 30:
            refused.close()

    answer = Answer(refuse)
    engine.submit(Prompt.of(other, sampling=sampling), answer)
    first.let_go()
    assert [first.answer.wait().tokens, answer.wait().tokens] == expected
