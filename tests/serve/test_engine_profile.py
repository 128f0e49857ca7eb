"""What full prefill takes is learned from full prefill alone."""

from __future__ import annotations

import pytest
import torch
from cases import cache_chunks, make_layout
from engines import FEW, MakeEngine, ask
from models import decoder

from blend.model.forward import RowRequest
from blend.serve import scheduler
from blend.serve.scheduler import EmbeddedEngine
from blend.serve.service import PrefillProfile
from blend.serve.types import Output, Sampling
from blend.types import PromptLayout

Told = list[tuple[int, int, float]]
PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model reads few tokens."""
    monkeypatch.setattr(scheduler, "ROWS_ALONE", PIECE)


def long(rows: int) -> PromptLayout:
    """A prompt of so many rows, in chunks."""
    prefix, suffix = make_layout().prefix, make_layout().suffix
    left = rows - len(prefix) - len(suffix)
    return PromptLayout(prefix, tuple((3 + i,) * (left // 2 + i * (left % 2)) for i in range(2)), suffix)


def test_pieces_of_a_prompt_in_full_and_alone_are_told_and_no_others(
    make_engine: MakeEngine,
) -> None:
    told = Told()
    engine = make_engine(on_pass=lambda *told_of: told.append(told_of), most_running=4, pass_rows=40)
    cache_chunks(engine.blender, long(150))
    ask(engine, long(150)).wait()
    assert told == [], "a blended prompt"
    ask(engine, long(50), method="full").wait()
    assert told == [], "a piece that is too small to be like the others"
    answer = ask(engine, make_layout(), Sampling(max_tokens=200, ignore_eos=True))
    while not isinstance(answer.seen.get(timeout=60), Output):
        pass
    ask(engine, long(150), method="full").wait()
    assert not answer.done.is_set()
    assert told == [], "a prompt beside an answer"
    answer.wait()
    ask(engine, long(150), FEW, method="full", cold=True).wait()
    pairs = [sum(range(first + 1, first + PIECE + 1)) for first in (0, PIECE)]
    assert [told_of[:2] for told_of in told] == [(PIECE, some) for some in pairs]


class Operations:
    """A clock that runs as operations are done, and more slowly than they deserve where rows are few."""

    def __init__(self, profile: PrefillProfile, monkeypatch: pytest.MonkeyPatch, engine: EmbeddedEngine) -> None:
        self.now, self._profile, self._prefill = 0.0, profile, engine.decoder.prefill
        monkeypatch.setattr(engine.decoder, "prefill", self)
        monkeypatch.setattr(scheduler, "Stopwatch", self.watch)

    def __call__(self, requests: list[RowRequest]) -> torch.Tensor:
        positions = torch.cat([request.positions for request in requests])
        rows = positions.shape[0]
        done = self._profile.operations(rows, int(positions.sum()) + rows)
        self.now += done if rows >= PIECE else 3 * done
        return self._prefill(requests)

    def watch(self, device: object) -> Operations:
        self.begun = self.now
        return self

    def total(self) -> float:
        return self.now - self.begun


def test_what_full_prefill_takes_stays_true_under_blended_prompts(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = PrefillProfile(decoder("llama"))
    engine = make_engine(on_pass=profile.saw, most_running=4, pass_rows=40)
    clock, truth = Operations(profile, monkeypatch, engine), profile.operations(128, 128 * 129 // 2)
    ask(engine, long(128), method="full", cold=True).wait()
    assert profile.seconds(128) == pytest.approx(truth)
    cache_chunks(engine.blender, long(200))
    answer = ask(engine, make_layout(), Sampling(max_tokens=300, ignore_eos=True))
    for _ in range(8):
        ask(engine, long(200)).wait()
    answer.wait()
    assert clock.now > truth
    assert profile.seconds(128) == pytest.approx(truth)
