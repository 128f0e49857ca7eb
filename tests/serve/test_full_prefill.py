"""What full prefill takes: measured, estimated, and learned from passes of full prefill alone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from cases import cache_chunks, make_layout
from engines import FEW, MakeEngine, ask
from models import decoder
from rooms import QUESTION, serving
from rooms import ask as ask_service

from blend.model.forward import RowRequest
from blend.serve import scheduler
from blend.serve import service as services
from blend.serve.scheduler import EmbeddedEngine
from blend.serve.service import PrefillProfile, Service
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


def test_an_estimate_is_called_one_until_full_prefill_of_the_prompt_was_measured(service: Service) -> None:
    before = ask_service(service, QUESTION, top_k=3).figures
    assert before.full_measured_s is None
    assert before.full_estimated_s is not None
    full = ask_service(service, QUESTION, top_k=3, method="full", cold=True).figures
    assert full.full_measured_s == pytest.approx(full.ttft_s - full.waited_s)
    assert full.full_estimated_s is None
    again = ask_service(service, QUESTION, top_k=3).figures
    assert (again.method, again.full_measured_s, again.full_estimated_s) == ("blend", full.full_measured_s, None)
    other = ask_service(service, QUESTION, top_k=2).figures
    assert other.full_measured_s is None
    assert other.full_estimated_s is not None


def test_what_was_measured_for_a_tenant_serves_no_other(service: Service) -> None:
    documents = {"method": "full", "cold": True, "tenant": "one"}
    ask_service(service, QUESTION, **documents)
    assert ask_service(service, QUESTION, tenant="one").figures.full_measured_s is not None
    assert ask_service(service, QUESTION, tenant="two").figures.full_measured_s is None


def test_full_prefill_is_timed_again_while_the_server_is_idle(
    filled: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs had the machine when the server started: the first timing is a hundred times too long."""
    monkeypatch.setattr(services, "TIMED_EVERY_S", 0.05)
    with serving(shutil.copytree(filled[0], tmp_path / "store"), filled[1], timing_s=1000.0) as service:
        time.sleep(0.5)
        first = ask_service(service, QUESTION, top_k=3).figures.full_estimated_s
        assert first is not None
        assert first > 100, "nothing is timed before a question has come"
        until, later = time.monotonic() + 60, first
        while later > 10 and time.monotonic() < until:
            time.sleep(0.2)
            later = ask_service(service, QUESTION, top_k=3).figures.full_estimated_s or 0.0
    assert 0 < later < 10
