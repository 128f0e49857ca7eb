"""A prefill that is given up: the next prompt goes on where it was, and gets the answer of full prefill."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import cache_chunks, make_layout
from engines import Answer, MakeEngine, alone, ask
from layouts import marked
from rooms import put, serving, settled

from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.model.passes import RowRequest
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import Failed, Figures
from blend.serve.request import Message, Request

PIECE = 12
SMALL_PIECES = {"pass_rows": PIECE + 2, "most_running": 2, "prefix_budget": 1 << 30}
BUSY = {"priority": 1}
"""A prompt that keeps to small pieces, though it is alone."""
IDS = tuple((7 * number * number + 5 * number) % 91 + 3 for number in range(240))


def plain(ids: tuple[int, ...]) -> PromptLayout:
    """A prompt of ordinary text alone."""
    return marked(PromptLayout.of_chunks(ids[:4], (ids[4:-5],), ids[-5:], (1, 2, 3)), plain={0})


class GivenUp(NamedTuple):
    """A prompt that was given up. rows: how many were computed by then; last: the last one's position."""

    answer: Answer
    rows: int
    last: int


def give_up(
    engine: EmbeddedEngine,
    layout: PromptLayout,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[threading.Event], None] = threading.Event.set,
    **more: Any,
) -> GivenUp:
    """Ask, and give the prompt up as soon as this many rows were computed. stop: does so, in the pass behind them."""
    prefill = engine.decoder.prefill
    cancelled = threading.Event()
    computed = last = 0

    def counted(requests: Sequence[RowRequest], **fields: Any) -> torch.Tensor:
        nonlocal computed, last
        if computed >= rows:
            stop(cancelled)
        logits = prefill(requests, **fields)
        computed += sum(request.run.rows for request in requests)
        last = int(requests[-1].positions[-1])
        if computed >= rows and stop is threading.Event.set:
            stop(cancelled)
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "prefill", counted)
        answer = ask(engine, layout, **{**BUSY, **more}, cancelled=cancelled).wait()
    return GivenUp(answer, computed, last)


def again(engine: EmbeddedEngine, layout: PromptLayout, **more: Any) -> Answer:
    return ask(engine, layout, **{**BUSY, **more}).wait()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma3n", "deepseek-v3", "qwen3-next", "lfm2"])
def test_the_same_prompt_goes_on_where_it_was_given_up(name: str, make_engine: MakeEngine, monkeypatch: Any) -> None:
    layout = plain(IDS)
    expected = ask(make_engine(name, prefix_budget=0), layout).wait().tokens
    engine = make_engine(name, **SMALL_PIECES)
    rows = round(0.6 * layout.rows)
    first = give_up(engine, layout, rows, monkeypatch)
    assert first.answer.end_reason == "cancelled"
    assert not first.answer.outputs
    second = again(engine, layout)
    assert rows <= first.rows < rows + PIECE
    assert second.figures.rows_computed <= layout.rows - first.rows
    assert second.figures.rows_reused >= first.rows
    assert second.figures.rows_inexact == 0
    assert second.tokens == expected
    longer = plain((*IDS[:100], *IDS[:80]))
    assert again(engine, longer).figures.rows_reused in (100, 0), "and so does another one that begins alike"


def raise_(cancelled: threading.Event) -> None:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("how", ["deadline", "error"])
def test_so_it_does_behind_a_deadline_and_an_error(how: str, make_engine: MakeEngine, monkeypatch: Any) -> None:
    layout = plain(IDS)
    expected = ask(make_engine(prefix_budget=0), layout).wait().tokens
    engine = make_engine(**SMALL_PIECES)
    if how == "error":
        first = give_up(engine, layout, 100, monkeypatch, raise_)
        assert isinstance(first.answer.last, Failed)
    else:
        now = threading.Event()
        monkeypatch.setattr("blend.serve.engine.sequence.time.monotonic", lambda: 10.0**9 if now.is_set() else 0.0)
        first = give_up(engine, layout, 100, monkeypatch, lambda _: now.set(), deadline_s=60.0, arrived=0.0)
        now.clear()
        assert first.answer.end_reason == "deadline"
    second = again(engine, layout)
    assert second.figures.rows_reused >= 100
    assert second.tokens == expected


def test_given_up_again_and_again_it_ends(make_engine: MakeEngine, monkeypatch: Any) -> None:
    layout = plain(IDS)
    expected = ask(make_engine(prefix_budget=0), layout).wait().tokens
    engine = make_engine(**SMALL_PIECES)
    computed = 0
    for _ in range(10):
        computed += give_up(engine, layout, PIECE, monkeypatch).rows
        assert engine.prefixes.nbytes <= engine.prefixes.budget
    last = again(engine, layout)
    assert computed >= 10 * PIECE
    assert computed + last.figures.rows_computed <= layout.rows + 10 * PIECE
    assert last.tokens == expected


def test_what_is_left_belongs_to_its_tenant_and_keeps_to_the_budget(make_engine: MakeEngine, monkeypatch: Any) -> None:
    layout = plain(IDS)
    engine = make_engine(**SMALL_PIECES)
    for fields in ({"cold": True}, {"session": "s", "session_ended": ended()}):
        give_up(engine, layout, 100, monkeypatch, **fields)
        assert engine.prefixes.nbytes == 0
    give_up(engine, layout, 100, monkeypatch, tenant="ann")
    assert again(engine, layout, tenant="bob").figures.rows_reused == 0
    assert again(engine, layout, tenant="ann").figures.rows_reused >= 100
    before = engine.prefixes.nbytes
    give_up(engine, plain(IDS[::-1]), 100, monkeypatch, tenant="ann", session="s", user="u")
    assert engine.prefixes.nbytes > before
    engine.prefixes.forget("ann", "u/s")
    assert engine.prefixes.nbytes == before
    small = make_engine(**{**SMALL_PIECES, "prefix_budget": engine.prefixes.nbytes // 8})
    for number in range(6):
        give_up(small, plain(IDS[number:]), 50, monkeypatch)
        assert 0 < small.prefixes.nbytes <= small.prefixes.budget


def blended(engine: EmbeddedEngine) -> PromptLayout:
    """A prompt whose chunks are stored, and so large that many rows are chosen."""
    layout = make_layout(chunks=(60, 50, 70), suffix=9)
    cache_chunks(engine.blender, layout)
    return layout


class GivenUpBlended(NamedTuple):
    """A blended prompt that was given up near its end. whole: figures of the same one that is not given up.

    final: its first rows that were final.
    """

    whole: Figures
    final: int


def given_up_blended(engine: EmbeddedEngine, layout: PromptLayout, monkeypatch: Any) -> GivenUpBlended:
    whole = again(engine, layout, cold=True, trace=True)
    assert whole.figures.method == "blend"
    rows = whole.figures.rows_computed + len(layout.suffix) - 2 * PIECE  # the question runs twice
    given_up = give_up(engine, layout, rows, monkeypatch)
    assert given_up.answer.end_reason == "cancelled"
    chosen = [number for number, token in enumerate(whole.started.trace) if token.recomputed]
    return GivenUpBlended(whole.figures, min(number for number in chosen if number > given_up.last))


@pytest.mark.parametrize("instructions", [(), IDS[:30]])
def test_a_blended_prompt_goes_on_where_it_was_given_up(
    instructions: tuple[int, ...], make_engine: MakeEngine, monkeypatch: Any
) -> None:
    engine = make_engine(**SMALL_PIECES)
    layout = blended(engine)
    layout = PromptLayout.of_chunks((*layout.prefix, *instructions), layout.chunks, layout.suffix, layout.prefix)
    expected = alone(engine.blender, layout)
    given_up = given_up_blended(engine, layout, monkeypatch)
    before = engine.prefixes.nbytes
    second = again(engine, layout)
    assert second.figures.rows_inexact > 0
    assert second.figures.rows_reused == given_up.final
    assert second.figures.rows_computed < given_up.whole.rows_computed / 2
    assert second.tokens == expected
    turn = PromptLayout.of_chunks(layout.prefix, (*layout.chunks, (*layout.suffix, *second.tokens)), (9, 8, 7))
    assert again(engine, turn).figures.rows_reused == layout.rows + len(second.tokens) - 1
    row = before // second.figures.rows_reused
    assert engine.prefixes.nbytes < 2.5 * turn.rows * row, "the rows that were given up are not kept twice"


@pytest.mark.parametrize(
    "fields",
    [{"tenant": "bob"}, {"config": BlendConfig(ratio=0.3, quality=0.1)}, {"method": "full"}, {"suffix": (5, 4, 3)}],
)
def test_blended_rows_serve_no_other_prompt(fields: dict[str, Any], make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine(**SMALL_PIECES)
    layout = blended(engine)
    given_up_blended(engine, layout, monkeypatch)
    suffix = fields.pop("suffix", layout.suffix)
    other = PromptLayout.of_chunks(layout.prefix, layout.chunks, suffix)
    figures = again(engine, other, **fields).figures
    assert figures.rows_inexact == 0
    assert figures.rows_reused <= layout.chunk_spans[0].stop


def failed_behind_its_prefill(
    engine: EmbeddedEngine, layout: PromptLayout, monkeypatch: Any, *, factor: float = 1.0, **more: Any
) -> None:
    """Ask, and let the pass of the answer's first row fail. factor: of the logits before."""
    prefill = engine.decoder.prefill

    def failing(requests: Sequence[RowRequest], **fields: Any) -> torch.Tensor:
        if int(requests[0].positions[-1]) >= layout.rows:
            raise_(threading.Event())
        logits = prefill(requests, **fields)
        return logits * factor

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "prefill", failing)
        answer = again(engine, layout, **more)
    assert len(answer.tokens) == 1
    assert isinstance(answer.last, Failed)


def test_a_blended_prompt_whose_answer_fails_goes_on_behind_its_prefill(
    make_engine: MakeEngine, monkeypatch: Any
) -> None:
    engine = make_engine(**SMALL_PIECES)
    layout = blended(engine)
    expected = alone(engine.blender, layout)
    failed_behind_its_prefill(engine, layout, monkeypatch)
    assert again(engine, layout, tenant="bob").figures.rows_inexact == 0
    second = again(engine, layout)
    assert second.figures.rows_inexact > 0
    assert second.figures.rows_reused == layout.rows - 1
    assert second.tokens == expected


@pytest.mark.parametrize("fields", [{"factor": float("nan")}, {"cold": True}, {"verify": True}])
def test_so_does_none_whose_logits_are_no_numbers_or_that_keeps_none(
    fields: dict[str, Any], make_engine: MakeEngine, monkeypatch: Any
) -> None:
    engine = make_engine(**SMALL_PIECES)
    layout = blended(engine)
    failed_behind_its_prefill(engine, layout, monkeypatch, **fields)
    figures = again(engine, layout).figures
    assert (figures.method, figures.rows_inexact) == ("blend", 0)


def test_rows_with_a_correction_that_may_not_fit_are_not_kept(make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine(**SMALL_PIECES)
    layout = blended(engine)
    engine.blender.calibrate(layout.prefix, layout.chunks)
    assert engine.blender.correction(layout.prefix) is not None
    nothing = torch.tensor(0.0, dtype=torch.float64)
    monkeypatch.setattr("blend.prefill.correction_check.CorrectionCheck.score", lambda *_: nothing)
    given_up_blended(engine, layout, monkeypatch)
    assert again(engine, layout).figures.rows_inexact == 0


STORY = "The clerk of the lock counts the boats every day, and writes down who rowed them. "
HISTORY = "".join(f"Day {day}: {STORY}Boat {7 * day} came last.\n" for day in range(6))


@pytest.mark.parametrize("fails", [False, True], ids=["cancelled", "the answer fails"])
@pytest.mark.parametrize("asks", ["ann", "bob"])
def test_moved_rows_serve_their_author_alone(
    asks: str, fails: bool, tmp_path: Path, model: Path, monkeypatch: Any
) -> None:
    """They have read what the edit took out, also in a prompt that was given up or whose answer failed."""

    def turn(hour: str, user: str, cancelled: threading.Event | None = None) -> Answer:
        before = Message("user", "Read the book of the lock."), Message("assistant", "I have read it.")
        header = f"The lock is open. It is {hour} o'clock, says the clerk of the lock.\n"
        said = (Message("system", header + HISTORY), *before, Message("user", "Which boat came last?"))
        fields: dict[str, Any] = {"cancelled": cancelled} if cancelled is not None else {}
        request = Request(said, user=user, edits="fast", priority=1, sampling=Sampling(max_tokens=4), **fields)
        answer = put(service, request)
        settled(service)
        return answer

    with serving(tmp_path / "store", model, corrects_learned=False, **SMALL_PIECES) as service:
        turn("309", "ann")
        prefill = service.engine.decoder.prefill
        cancelled = threading.Event()
        has_moved = False

        def watched(requests: Sequence[RowRequest], **fields: Any) -> torch.Tensor:
            nonlocal has_moved
            chosen = [request.positions for request in requests if request.run.start is None]
            has_moved |= any(int(positions[-1]) > 300 for positions in chosen)  # behind rows that moved
            if has_moved and not fails:
                cancelled.set()
            if has_moved and fails and requests[0].run.rows == 1:
                raise_(cancelled)
            return prefill(requests, **fields)

        with monkeypatch.context() as patch:
            patch.setattr(service.engine.decoder, "prefill", watched)
            given_up = turn("311", "ann", cancelled)
        assert isinstance(given_up.last, Failed) == fails
        figures = turn("311", asks).figures
    assert (figures.rows_inexact > 0) == (asks == "ann")


def ended() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
