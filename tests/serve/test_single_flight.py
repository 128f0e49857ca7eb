"""Requests that come together and bring the same text: it is computed once, and nobody waits for long or for others' text."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer
from rooms import FEW, serving, settled

from blend.chunks.library import ChunkLibrary
from blend.errors import StoreError
from blend.model.passes import RowRequest
from blend.serve.engine.profile import PrefillProfile
from blend.serve.events import Failed, Figures, Finished
from blend.serve.prompt import Prompt
from blend.serve.request import Message, Request
from blend.serve.service import Service
from tests.towns import documents

WORDS = sorted({word for text in documents().values() for word in text.split() if word.isalpha()})


def text(seed: int, words: int = 160) -> str:
    """Paragraphs of random words, which stand in no document."""
    draw = random.Random(seed)
    return "\n\n".join(" ".join(draw.choices(WORDS, k=40)) + "." for _ in range(words // 40))


FILES = [text(seed, 480) for seed in range(3)]


def agent(number: int, files: Sequence[str] = FILES, **more: Any) -> Request:
    """A request with these files in an order of its own, and a task of its own."""
    order = list(files)
    random.Random(number).shuffle(order)
    said = "\n\n".join((f"Task {number}.", *order, f"Now do task {number}: {text(100 + number, 40)[:60]}"))
    return Request((Message("user", said),), **{"sampling": FEW, **more})


class Passes:
    """Counts the rows of an engine's passes. at_pass: called before each, with the rows of all before."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        self.is_broken = False
        self.at_pass: Callable[[int], object] = lambda rows: None
        decoder = service.engine.decoder
        prefill = decoder.prefill

        def counted(requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
            self.at_pass(self.rows)
            self.rows += sum(int(request.positions.shape[0]) for request in requests)
            return prefill(requests, **more)

        monkeypatch.setattr(decoder, "prefill", counted)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The seconds that computing takes: a tiny model computes in milliseconds what no store takes as fast."""
    patience = {"seconds": 60.0}
    monkeypatch.setattr(PrefillProfile, "seconds", lambda profile, rows: patience["seconds"])
    return patience


@pytest.fixture
def service(store: Path, model: Path) -> Iterator[Service]:
    with serving(store, model, least_gain=32) as running:
        yield running


def prepared(service: Service, requests: Sequence[Request]) -> list[Prompt]:
    """The prompts of requests that all came before the engine has looked at one."""
    return [service.prepare(request) for request in requests]


def taken(service: Service, prompts: Sequence[Prompt]) -> list[Answer]:
    answers = [Answer() for _ in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        service.take(prompt, answer)
    return answers


def together(service: Service, requests: Sequence[Request]) -> list[Figures]:
    """What requests cost that come together."""
    return [answer.wait().figures for answer in taken(service, prepared(service, requests))]


def test_text_in_any_order_is_computed_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(service, monkeypatch)
    prompts = prepared(service, [agent(number) for number in range(5)])
    whole = sum(prompt.layout.rows for prompt in prompts)
    figures = [answer.wait().figures for answer in taken(service, prompts)]
    assert passes.rows < 0.65 * whole
    assert figures[0].rows_ahead > 0.7 * figures[0].rows
    assert sum(later.rows_ahead for later in figures[1:]) < 0.2 * figures[0].rows
    assert all(each.rows_shared > 0.7 * each.rows and each.method == "blend" for each in figures)
    assert all(each.cached_tokens == max(0, each.rows - each.rows_computed - each.rows_ahead) for each in figures)


def test_the_caches_are_functions_of_the_text_alone(service: Service) -> None:
    """They are those that a server would learn by itself: no request's other words are in them."""
    prompts = prepared(service, [agent(number) for number in range(3)])
    for answer in taken(service, prompts):
        answer.wait()
    settled(service)
    again = service.prepare(agent(7))
    library = service.rag(again).blender.library(again.layout.kept_behind)
    texts = [place.stored for place in again.layout.places if place.stored is not None]
    assert sum(map(len, texts)) > 0.7 * again.layout.rows
    for key, computed in library.computed(library.variants(texts)):
        [reader] = library.store.open_many([library.key(key)])
        assert not isinstance(reader, Exception)
        assert reader is not None, key
        with reader:
            keys = [reader.layer(index)[0] for index in range(computed.layers)]
        for stored, of_text in zip(keys, computed.keys, strict=True):
            torch.testing.assert_close(stored, of_text, rtol=1e-3, atol=1e-4)


def test_a_request_that_comes_while_the_first_one_is_computed_shares_the_rest(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(service, monkeypatch)
    first, second = agent(1), agent(2)
    late = list[Answer]()

    def join(rows: int) -> None:
        if rows and not late:
            late.append(Answer())
            service.submit(second, late[0])

    passes.at_pass = join
    answer = Answer()
    service.submit(first, answer)
    figures = answer.wait().figures
    assert 0 < figures.rows_ahead < figures.rows, "the rows that were computed stay"
    assert figures.rows_computed + figures.rows_ahead < 1.4 * figures.rows
    assert late[0].wait().figures.rows_shared > 0.4 * figures.rows


@pytest.mark.parametrize("fault", ["cancelled", "pass", "store", "never taken"])
def test_where_the_first_one_fails_another_one_computes(
    service: Service, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    prompts = prepared(service, [agent(number) for number in range(4)])
    passes = Passes(service, monkeypatch)
    keep = ChunkLibrary.keep
    puts = list[object]()

    def put(library: ChunkLibrary, *cache: Any) -> None:
        puts.append(cache[0])
        if fault == "store" and len(puts) == 2:
            raise StoreError("no space left")
        keep(library, *cache)
        if fault == "cancelled" and len(puts) == 2:
            prompts[0].request.cancelled.set()

    def run(rows: int) -> None:
        if fault == "pass" and len(puts) == 2 and not passes.is_broken:
            passes.is_broken = True
            raise RuntimeError("no memory")

    monkeypatch.setattr(ChunkLibrary, "keep", put)
    passes.at_pass = run
    answers = taken(service, prompts[1:] if fault == "never taken" else prompts)
    ends = [answer.wait().last for answer in answers]
    if fault == "cancelled":
        assert ends[0] == Finished("cancelled")
    elif fault == "pass":
        assert isinstance(ends[0], Failed)
    first = 0 if fault in ("never taken", "store") else 1
    figures = [answer.figures for answer in answers[first:]]
    assert all(isinstance(end, Finished) and end.reason != "cancelled" for end in ends[first:])
    ahead = sum(each.rows_ahead for each in figures)
    assert ahead < 1.2 * figures[0].rows
    assert all(each.rows_shared > 0.6 * each.rows for each in figures[-2:])


@pytest.mark.parametrize("names", [{"user": "ada"}, {"tenant": "mill"}])
def test_users_and_tenants_do_not_share(service: Service, names: dict[str, str]) -> None:
    mine, other, again = together(service, [agent(1, user="bob"), agent(2, **names), agent(3, user="bob")])
    assert (other.rows_shared, other.rows_ahead) == (0, 0)
    assert mine.rows_ahead > 0
    assert again.rows_shared > 0
    settled(service)


def test_what_another_user_has_stored_is_no_hint(service: Service) -> None:
    together(service, [agent(number, user="bob") for number in (1, 2)])
    settled(service)
    first, second = together(service, [agent(number, user="ada") for number in (3, 4)])
    assert first.rows_ahead > 0.7 * first.rows, "computed though it is stored"
    assert second.rows_ahead < 0.2 * second.rows


def test_a_store_that_hangs_holds_nobody_back_for_long(
    service: Service, patience: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those who share nothing, and the others no longer than computing the text takes."""
    together(service, [agent(8, [text(50, 480)]), agent(9, [text(50, 480)])])  # the surrogate context is chosen
    settled(service)
    prompts = prepared(service, [agent(1), agent(2), agent(3, [text(60)])])
    hangs, goes_on = threading.Event(), threading.Event()
    keep = ChunkLibrary.keep

    def put(library: ChunkLibrary, *cache: Any) -> None:
        hangs.set()
        assert goes_on.wait(6)
        keep(library, *cache)

    monkeypatch.setattr(ChunkLibrary, "keep", put)
    [owner] = taken(service, prompts[:1])
    assert hangs.wait(60)
    unrelated = taken(service, prompts[2:])
    assert unrelated[0].wait().end_reason == "length"
    patience["seconds"] = 0.1
    [sharing] = taken(service, prompts[1:2])
    assert sharing.wait().end_reason == "length"
    assert not owner.events
    goes_on.set()
    assert owner.wait().end_reason == "length"
