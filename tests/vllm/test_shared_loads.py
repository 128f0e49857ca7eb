"""Loads that share text, in a worker's queue: who computes it, who waits and for how long, and who shares with whom."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from host_worker import BLOCK, ROW_S, Clock, HostWorker
from layouts import marked
from models import VOCABULARY

from blend.chunks.library import ChunkLibrary
from blend.errors import StoreError
from blend.integrations.vllm import shared as shared_module
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.scheduler import Load
from blend.integrations.vllm.shared import OWNERS_PATIENCE
from blend.layout import PromptLayout, Tokens
from blend.serve import flights as flights_module
from blend.types import CacheKey

SIZE = 60  # tokens of a text
PREFIX = (3, 4, 5)


def text(seed: int, size: int = SIZE) -> Tokens:
    draw = random.Random(seed)
    return tuple(draw.randrange(6, VOCABULARY) for _ in range(size))


ONE, TWO, THREE, FOUR, FIVE, SIX = map(text, range(1, 7))
ALL = 3 * SIZE


def load(
    name: str, *texts: Tokens, task: int = 4, prefix: Tokens = PREFIX, learned: bool = False, **ticket: Any
) -> Load:
    """A prompt that brings these texts. task: tokens behind them; the shortest prompt comes first."""
    layout = PromptLayout.of_chunks((*prefix, 7), texts, text(sum(name.encode()), task), prefix)
    count = len(texts)
    layout = marked(layout, learned=range(count)) if learned else marked(layout, new=range(count))
    return Load(name, LayoutTicket(layout, **ticket), tuple(range(-(-layout.rows // BLOCK))), 0, 100.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (flights_module, shared_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def begin(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., HostWorker]]:
    with ExitStack() as stack:

        def begun(**more: Any) -> HostWorker:
            worker = HostWorker(tmp_path, clock, **more)
            stack.callback(worker.close)
            return worker

        yield begun


@pytest.fixture
def worker(begin: Callable[..., HostWorker]) -> HostWorker:
    return begin()


class HangingStore:
    """A store that takes nothing until it goes on. begun: whether a cache was to be put."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._goes_on = threading.Event(), threading.Event()
        keep = ChunkLibrary.keep

        def put(library: ChunkLibrary, *cache: Any) -> None:
            self.begun.set()
            assert self._goes_on.wait(60)
            keep(library, *cache)

        monkeypatch.setattr(ChunkLibrary, "keep", put)

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.fixture
def store_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStore]:
    store = HangingStore(monkeypatch)
    yield store
    store.go_on()


def together(worker: HostWorker, *loads: Load) -> list[dict[str, Any]]:
    """The figures of loads that come together."""
    worker.until(len(worker.outcomes) + len(loads), *loads)
    return worker.figures(*(each.request for each in loads))


def ahead(figures: list[dict[str, Any]]) -> list[Any]:
    return [each.get("rows_ahead", each.get("reason")) for each in figures]


def is_stored(worker: HostWorker, tokens: Tokens) -> bool:
    library = worker.blender.blender().library(PREFIX)
    return not library.missing_of([library.best(tokens, contextual=worker.blender.config.surrogate)])


def agents(**ticket: Any) -> tuple[Load, Load, Load]:
    """Three that bring the same text in other orders. The first one is the shortest, and comes first."""
    return (
        load("a", ONE, TWO, THREE, **ticket),
        load("b", THREE, ONE, TWO, task=9, **ticket),
        load("c", TWO, THREE, ONE, task=14, **ticket),
    )


def test_the_first_load_computes_what_all_bring_in_any_order(worker: HostWorker) -> None:
    figures = together(worker, *agents())
    assert list(worker.outcomes) == ["a", "b", "c"]
    assert ahead(figures) == [ALL, 0, 0]
    assert [each["rows_shared"] for each in figures] == [ALL] * 3
    assert sum(worker.decoder.rows) < 0.75 * sum(each["rows"] for each in figures)
    assert all(each["rows_computed"] < 0.5 * each["rows"] for each in figures)
    counts = worker.outcomes["a"].counts
    assert (counts["rows_ahead"], counts["rows_shared"]) == (ALL, ALL)


def test_their_rows_are_those_of_text_that_was_learned_before(
    worker: HostWorker, begin: Callable[..., HostWorker]
) -> None:
    together(worker, *agents())
    later = begin()
    for name, texts in (("a", (ONE, TWO, THREE)), ("b", (THREE, ONE, TWO)), ("c", (TWO, THREE, ONE))):
        figures = together(later, load(name, *texts, task={"a": 4, "b": 9, "c": 14}[name], learned=True))
        assert ahead(figures) == [None]
    for served, learned in zip(worker.decoder.settled, later.decoder.settled, strict=True):
        assert served.get_seq_length() == learned.get_seq_length() > ALL
        for layer, other in zip(served.layers, learned.layers, strict=True):
            assert all(torch.equal(*pair) for pair in zip(layer.view(), other.view(), strict=True))


def test_alone_a_prompt_computes_nothing_apart(worker: HostWorker) -> None:
    alone = load("alone", ONE, TWO, THREE, awaited=(0, 0, 0))
    assert ahead(together(worker, alone)) == ["cold"]
    assert worker.decoder.rows == []
    assert worker.failed_blocks == set(alone.blocks)


def test_a_ticket_says_what_others_bring_that_have_not_come(worker: HostWorker) -> None:
    [figures] = together(worker, load("early", ONE, TWO, THREE, awaited=(0, 1, 1)))
    assert figures["rows_ahead"] == figures["rows_shared"] == 2 * SIZE
    assert SIZE < figures["rows_computed"] < 2 * SIZE, "the other text is its own"


def test_little_is_not_computed_apart(worker: HostWorker) -> None:
    assert ahead(together(worker, load("a", ONE), load("b", ONE))) == ["cold"] * 2
    assert worker.decoder.rows == []
    assert ahead(together(worker, load("c", TWO), load("d", TWO, task=6), load("e", TWO, task=8))) == [SIZE, 0, 0]


@pytest.mark.parametrize(
    ("other", "computed"), [({"user": "ada"}, ALL), ({"prefix": (3, 4, 5, 6)}, ALL), ({"corpus": "towns"}, 0)]
)
def test_users_prefixes_and_corpora_are_never_compared(
    worker: HostWorker, other: dict[str, Any], computed: int
) -> None:
    """computed: by the others, though it is stored; text of one user is learned for all corpora."""
    assert ahead(together(worker, load("a", ONE, TWO, THREE), load("b", TWO, THREE, ONE, **other))) == ["cold"] * 2
    assert worker.decoder.rows == []
    each_two = [load(name, FOUR, FIVE, SIX) for name in "cd"] + [load(name, FIVE, SIX, FOUR, **other) for name in "ef"]
    figures = together(worker, *each_two)
    assert sorted(ahead(figures)) == sorted([ALL, 0, computed, 0])
    assert [each["rows_shared"] for each in figures] == [ALL] * 4


def test_what_is_computed_for_a_user_is_learned_for_that_user_alone(worker: HostWorker) -> None:
    assert ahead(together(worker, *agents(user="ada"))) == [ALL, 0, 0]
    [figures] = together(worker, load("later", TWO, ONE, THREE, user="ada"))
    assert figures["rows_shared"] == ALL
    assert ahead(together(worker, load("another", TWO, ONE, THREE))) == ["cold"]


def test_with_learning_off_nothing_is_shared(begin: Callable[..., HostWorker]) -> None:
    worker = begin(budget=0)
    assert ahead(together(worker, *agents(awaited=(2, 2, 2)))) == ["cold"] * 3
    assert worker.decoder.rows == []


@pytest.mark.parametrize("steps", [0, 1, None])
def test_where_the_first_one_is_cancelled_the_next_one_goes_on(worker: HostWorker, steps: int | None) -> None:
    """steps: before that; None until the first text is stored and the second one is computed."""
    worker.step(*agents())
    for _ in range(steps or 0):
        worker.step()
    while steps is None and sum(worker.decoder.rows) < 2 * SIZE:
        worker.step()
    worker.step(cancelled=["a"])
    worker.until(3)
    assert list(worker.outcomes) == ["a", "b", "c"]
    assert not worker.outcomes["a"].figures
    figures = worker.figures("b", "c")
    assert ahead(figures) == [2 * SIZE if steps is None else ALL, 0]
    assert [each["rows_shared"] for each in figures] == [ALL] * 2


def test_loads_that_have_ended_share_nothing(worker: HostWorker) -> None:
    assert ahead(together(worker, load("ended", ONE, TWO, THREE))) == ["cold"]
    worker.step(load("cancelled", ONE, TWO, THREE), cancelled=["cancelled"])
    assert ahead(together(worker, load("late", TWO, ONE, THREE))) == ["cold"]
    assert worker.decoder.rows == []


def test_a_ticket_may_be_older_than_what_others_have_had_learned(worker: HostWorker) -> None:
    together(worker, *agents())
    [figures] = together(worker, load("late", THREE, TWO, ONE))
    assert (figures["rows_shared"], figures["rows_ahead"]) == (ALL, 0)
    assert ahead(together(worker, load("hers", THREE, TWO, ONE, user="ada"))) == ["cold"], "for their user alone"
    library = worker.blender.blender().library(PREFIX)
    worker.blender.store.delete(library.key(library.best(TWO, contextual=worker.blender.config.surrogate)))
    [figures] = together(worker, load("later", THREE, TWO, ONE))
    assert figures["rows_shared"] == 2 * SIZE, "it lost one"


@pytest.mark.parametrize("fault", ["pass", "store"])
def test_a_text_that_fails_harms_no_prompt(
    worker: HostWorker, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [fault]
    keep = ChunkLibrary.keep

    def put(library: ChunkLibrary, *cache: Any) -> None:
        if sum(worker.decoder.rows) > 2 * SIZE and "store" in faults:
            faults.remove("store")
            raise StoreError("no space left")
        keep(library, *cache)

    def at_pass() -> None:
        if sum(worker.decoder.rows) > SIZE and "pass" in faults:
            faults.remove("pass")
            raise RuntimeError("no space left")

    monkeypatch.setattr(ChunkLibrary, "keep", put)
    worker.decoder.at_pass = at_pass
    figures = together(worker, *agents())
    assert not faults
    assert [each["rows_shared"] for each in figures] == [SIZE, ALL, ALL], "what is stored serves"
    assert figures[1]["rows_ahead"] == 2 * SIZE, "the next one goes on"
    assert caplog.text.count("text that prompts share could not be stored: no space left") == 1


def test_where_the_store_takes_nothing_vllm_prefills(
    worker: HostWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(library: ChunkLibrary, *cache: Any) -> None:
        raise StoreError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkLibrary, "keep", full)
        assert ahead(together(worker, *agents())) == ["cold"] * 3
    assert caplog.text.count("no space left") == 1, "one line an outage"
    assert ahead(together(worker, *(each._replace(request=f"{each.request}2") for each in agents()))) == [ALL, 0, 0]


def test_a_store_that_hangs_is_waited_for_as_long_as_computing_takes(
    worker: HostWorker, clock: Clock, store_hangs: HangingStore, caplog: pytest.LogCaptureFixture
) -> None:
    owner, sharing, _ = agents()
    worker.step(owner, sharing, load("unrelated", FOUR, FOUR[::-1], task=20))
    while not store_hangs.begun.is_set():
        worker.step()
    rows = sum(worker.decoder.rows)
    for seconds in (0.0, ALL * ROW_S - 0.1):
        clock.seconds += seconds
        for _ in range(5):
            worker.step()
        assert list(worker.outcomes) == ["unrelated"]
        assert sum(worker.decoder.rows) == rows, "who shares the text waits"
    clock.seconds += 0.2
    for _ in range(20):
        worker.step()
    assert list(worker.outcomes) == ["unrelated", "b"], "the owner has computed the text, and waits longer"
    clock.seconds += (OWNERS_PATIENCE - 1) * ALL * ROW_S
    worker.until(3)
    assert ahead(worker.figures("a", "b")) == ["cold"] * 2
    assert sum(worker.decoder.rows) == rows, "no more is computed for a store like this"
    assert caplog.text.count("takes text that prompts share too slowly") == 1
    store_hangs.go_on()
    while not is_stored(worker, ONE):
        time.sleep(0.01)
    again = [each._replace(request=f"{each.request}2") for each in agents()]
    assert ahead(together(worker, *again)) == [2 * SIZE, 0, 0]


def test_a_load_waits_for_each_owner_that_the_store_stalls(worker: HostWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    hung = set[Tokens]()
    missing_of = ChunkLibrary.missing_of

    def asked(library: ChunkLibrary, keys: Iterable[CacheKey]) -> list[CacheKey]:
        keys = list(keys)
        for tokens in {key.chunk for key in keys} & {ONE, THREE} - hung:
            hung.add(tokens)
            assert goes_on.wait(60)
        return missing_of(library, keys)

    monkeypatch.setattr(ChunkLibrary, "missing_of", asked)
    each_two = [load(name, ONE, TWO, task=task, awaited=(2, 2)) for name, task in (("a", 1), ("b", 2))]
    each_two += [load(name, THREE, FOUR, task=task, awaited=(2, 2)) for name, task in (("c", 3), ("d", 4))]
    worker.step(*each_two)
    while len(hung) < 2:
        worker.step()
    for _ in range(20):
        worker.step()
    assert not worker.decoder.rows, "one of each two waits for the other"
    goes_on.set()
    worker.until(4)
    assert ahead(worker.figures("a", "b")) == [2 * SIZE, 0]


def test_where_an_owner_is_cancelled_while_its_store_hangs_others_go_on(
    worker: HostWorker, clock: Clock, store_hangs: HangingStore
) -> None:
    worker.step(*agents())
    while not store_hangs.begun.is_set():
        worker.step()
    rows = sum(worker.decoder.rows)
    worker.step(cancelled=["a"])
    for _ in range(10 * (OWNERS_PATIENCE + 1)):
        worker.step()
        clock.seconds += ALL * ROW_S / 10
    assert list(worker.outcomes) == ["a", "c", "b"], "b begins to own the text, and waits longer"
    assert ahead(worker.figures("b", "c")) == ["cold"] * 2
    assert sum(worker.decoder.rows) == rows


def test_for_an_owner_that_is_cancelled_nothing_is_computed(worker: HostWorker, store_hangs: HangingStore) -> None:
    """Also while its store hangs: the only other one computes its text in its prompt, at once."""
    worker.step(*agents()[:2])
    while not store_hangs.begun.is_set():
        worker.step()
    worker.step(cancelled=["a"])
    worker.until(2)
    assert ahead(worker.figures("b")) == ["cold"]


def test_all_workers_of_a_model_do_the_same(worker: HostWorker, begin: Callable[..., HostWorker]) -> None:
    """Also where the first one alone knows that a load's text is a part of another one's."""
    longer = load("longer", (*FOUR, *FIVE), SIX)
    others = (load("part", FOUR, task=140), load("d", SIX, task=142), load("e", SIX, task=144))
    fillers = [load(f"filler {number}", text(99, 61 - number), task=130 + number) for number in range(1, 21)]
    worker.step(longer, *others, *fillers)
    while not worker.decoder.rows:  # fillers run while the longer one is divided
        time.sleep(0.05)
        worker.step()
    worker.until(24)
    assert ahead(worker.figures("longer", "part")) == [2 * SIZE, 0]
    assert worker.figures("part")[0]["rows_shared"] == SIZE
    rows = sum(worker.decoder.rows)
    worker.step(*agents())
    while sum(worker.decoder.rows) < rows + 2 * SIZE:
        worker.step()
    worker.step(cancelled=["a"])
    worker.until(27)
    assert ahead(worker.figures("b", "c")) == [2 * SIZE, 0]
    second = begin(said=worker.said)
    for news in worker.history:
        second.take(news)
    assert second.decoder.rows == worker.decoder.rows
    assert {name: outcome.figures for name, outcome in second.outcomes.items()} == {
        name: outcome.figures for name, outcome in worker.outcomes.items()
    }
    assert not worker.said
