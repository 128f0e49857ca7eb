"""Text that several requests in flight bring: what the first of them computes apart, what it leaves, and what it finds."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_layout
from layouts import marked
from models import decoder

from blend.chunks.library import ChunkLibrary
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.layout import Place, PlaceOrigin, PromptLayout, Tokens
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blender
from blend.serve.engine.shared_text import SharedText
from blend.serve.flights import Flight, Flights
from blend.serve.prompt import Prompt
from blend.serve.request import Request
from blend.serve.token_index import LEAST_PIECE
from blend.store import open_store
from blend.types import CacheKey, CacheKind

SIZE = LEAST_PIECE  # tokens of a text
PREFIX = make_layout().prefix
RATIO = 0.1


def text(number: int, size: int = SIZE) -> Tokens:
    return make_layout(chunks=(size,), seed=100 + number).chunks[0]


ONE, TWO, THREE, FOUR = map(text, range(4))


def layout_of(*texts: Tokens) -> PromptLayout:
    """A prompt that brings these, all of them new."""
    return marked(PromptLayout.of_chunks(PREFIX, texts, (5, 6, 7)), new=range(len(texts)))


class Kitchen:
    """A store of a tiny decoder's caches, and requests in flight. learns: which texts may be stored."""

    def __init__(self, folder: Path) -> None:
        self.blender = Blender(decoder("llama"), open_store(folder / "kv", codec="native"), BlendConfig(ratio=RATIO))
        self.flights = Flights(lambda rows: 60.0)
        self.rows = list[int]()
        self.asked_for = list[Collection[Tokens]]()
        self.refused = set[Tokens]()

    def learn(self, library: ChunkLibrary, texts: Collection[Tokens]) -> Collection[Tokens]:
        self.asked_for.append(texts)
        return set(texts) - self.refused

    def prompt(self, *texts: Tokens, layout: PromptLayout | None = None, **more: Any) -> Prompt:
        """A request in flight that brings these."""
        layout = layout or layout_of(*texts)
        flight = self.flights.begin("", {place.whole for place in layout.places if place.is_brought})
        return replace(Prompt(Request(), layout, Request().sampling), flight=flight, **{"learn": self.learn, **more})

    def shared(self, prompt: Prompt, *, ratio: float = RATIO, least_gain: int = 0) -> SharedText:
        return SharedText(prompt, self.blender, BlendConfig(ratio=ratio), least_gain)

    def run(self, shared: SharedText, layout: PromptLayout, start: int = 0) -> PromptLayout:
        """What becomes of a prompt. start: its first row that is not computed yet."""
        return run_steps(shared.steps(layout, start, lambda: 64), self._run)

    def _run(self, request: RowRequest) -> torch.Tensor:
        self.rows.append(int(request.positions.shape[0]))
        return self.blender.decoder.prefill([request])

    def key(self, text: Tokens) -> CacheKey:
        return CacheKey(text, CacheKind.ISOLATED)

    def stored(self, *texts: Tokens) -> list[bool]:
        library = self.blender.library(PREFIX)
        return [not library.missing_of([self.key(text)]) for text in texts]


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    return Kitchen(tmp_path)


def origins(layout: PromptLayout) -> list[PlaceOrigin]:
    return [place.origin for place in layout.places]


NEW, LEARNED, TEXT = PlaceOrigin.NEW, PlaceOrigin.LEARNED, PlaceOrigin.TEXT


def test_the_first_computes_what_both_bring_and_the_second_takes_it(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE, TWO), kitchen.prompt(TWO, THREE)
    owner, other = kitchen.shared(first), kitchen.shared(second)
    assert origins(kitchen.run(owner, first.layout)) == [NEW, LEARNED]
    assert kitchen.stored(ONE, TWO, THREE) == [False, True, False]
    assert (owner.rows_computed, owner.texts) == (SIZE, {TWO})
    assert sum(kitchen.rows) >= SIZE
    kitchen.rows.clear()
    assert origins(kitchen.run(other, second.layout)) == [LEARNED, NEW]
    assert (other.rows_computed, other.texts, kitchen.rows) == (0, {TWO}, [])
    assert not owner.has_news
    assert not other.has_news
    assert kitchen.asked_for == [[TWO]]


def test_alone_nothing_is_computed(kitchen: Kitchen) -> None:
    prompt = kitchen.prompt(ONE)
    shared = kitchen.shared(prompt)
    assert not shared.has_news
    assert kitchen.run(shared, prompt.layout) is prompt.layout
    assert (kitchen.rows, kitchen.asked_for) == ([], [])


def test_a_prompt_without_a_flight_is_left_as_it_is(kitchen: Kitchen) -> None:
    kept = kitchen.prompt(ONE)
    prompt = replace(kitchen.prompt(ONE), flight=None)
    shared = kitchen.shared(prompt)
    assert not shared.has_news
    assert kitchen.run(shared, prompt.layout) is prompt.layout
    assert kept.flight is not None


def test_a_request_that_comes_later_is_news(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE), kitchen.prompt(ONE)
    shared = kitchen.shared(first)
    assert shared.has_news
    kitchen.run(shared, first.layout)
    assert not shared.has_news
    third = kitchen.prompt(ONE)
    assert shared.has_news
    assert second.flight is not third.flight


def test_rows_that_a_prompt_has_computed_stay(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE, TWO), kitchen.prompt(ONE, TWO)
    begin = first.layout.chunk_spans[1].start
    assert origins(kitchen.run(kitchen.shared(first), first.layout, begin)) == [NEW, LEARNED]
    assert kitchen.stored(ONE, TWO) == [False, True]
    assert origins(kitchen.run(kitchen.shared(second), second.layout, begin + 1)) == [NEW, NEW]


@pytest.mark.parametrize(("least_gain", "computes"), [(int(SIZE * 0.8) - 1, True), (int(SIZE * 0.8) + 1, False)])
def test_computing_apart_must_save_rows(kitchen: Kitchen, least_gain: int, computes: bool) -> None:
    """Two prompts that recompute a tenth of a text each save 2 x 0.9 - 1 = 0.8 of it."""
    prompts = [kitchen.prompt(ONE) for _ in range(2)]
    shared = kitchen.shared(prompts[0], least_gain=least_gain)
    kitchen.run(shared, prompts[0].layout)
    assert shared.rows_computed == (SIZE if computes else 0)
    assert bool(kitchen.asked_for) is computes, "nothing is admitted for nothing"


def test_what_is_recomputed_without_a_correction_saves_nothing(tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path)
    kitchen.blender.uncorrected_ratio = 0.6
    prompts = [kitchen.prompt(ONE) for _ in range(2)]
    shared = kitchen.shared(prompts[0])
    kitchen.run(shared, prompts[0].layout)
    assert shared.rows_computed == 0
    more = [kitchen.prompt(ONE) for _ in range(1)]
    kitchen.run(shared, prompts[0].layout)
    assert shared.rows_computed == SIZE, "three prompts do: 3 x 0.4 > 1"
    assert more


def test_only_admitted_text_is_computed(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE, TWO), kitchen.prompt(ONE, TWO)
    kitchen.refused = {ONE}
    assert origins(kitchen.run(kitchen.shared(first), first.layout)) == [NEW, LEARNED]
    assert second.flight is not None


def test_a_prompt_that_may_not_learn_computes_nothing_apart(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE, learn=None), kitchen.prompt(ONE)
    assert origins(kitchen.run(kitchen.shared(first), first.layout)) == [NEW]
    assert kitchen.rows == []
    assert second.flight is not None


def test_text_that_nobody_awaits_any_more_is_not_computed(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE), kitchen.prompt(ONE)
    assert second.flight is not None
    second.flight.end()
    shared = kitchen.shared(first)
    assert origins(kitchen.run(shared, first.layout)) == [NEW]
    assert (shared.rows_computed, kitchen.stored(ONE)) == (0, [False])


def test_what_another_user_has_stored_is_no_hint(kitchen: Kitchen) -> None:
    library = kitchen.blender.library(PREFIX)
    library.compute([kitchen.key(ONE)])
    first, second = kitchen.prompt(ONE), kitchen.prompt(ONE)
    shared = kitchen.shared(first)
    assert origins(kitchen.run(shared, first.layout)) == [LEARNED]
    assert shared.rows_computed == SIZE, "computed though it is stored"
    assert second.flight is not None


def test_learned_text_is_computed_only_where_its_cache_is_gone(kitchen: Kitchen) -> None:
    """It is no text that a request in flight has computed, unless one did."""
    library = kitchen.blender.library(PREFIX)
    library.compute([kitchen.key(ONE)])
    layout = marked(PromptLayout.of_chunks(PREFIX, (ONE, TWO), (5, 6, 7)), learned=range(2))
    prompts = [kitchen.prompt(layout=layout) for _ in range(2)]
    shared = kitchen.shared(prompts[0])
    assert origins(kitchen.run(shared, layout)) == [LEARNED, LEARNED]
    assert (shared.rows_computed, shared.texts) == (SIZE, {TWO})
    assert kitchen.stored(ONE, TWO) == [True, True]


def test_a_store_that_takes_nothing_leaves_the_prompt_as_it_was(
    kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(library: ChunkLibrary, *cache: Any) -> None:
        raise StoreError("no space left")

    monkeypatch.setattr(ChunkLibrary, "keep", full)
    prompts = [kitchen.prompt(ONE) for _ in range(2)]
    shared = kitchen.shared(prompts[0])
    with pytest.raises(StoreError, match="no space left"):
        kitchen.run(shared, prompts[0].layout)
    flight = flight_of(prompts[0])
    assert not flight.is_owner
    assert not flight.computed
    assert shared.texts == frozenset()


def flight_of(prompt: Prompt) -> Flight:
    assert prompt.flight is not None
    return prompt.flight


def test_text_that_another_one_has_computed_meanwhile_is_not_computed_again(kitchen: Kitchen) -> None:
    """While this one waited for its turn or for the store."""
    first, second = kitchen.prompt(ONE, TWO), kitchen.prompt(ONE, TWO)
    shared = kitchen.shared(first)
    learn = kitchen.learn

    def slow(library: ChunkLibrary, texts: Collection[Tokens]) -> Collection[Tokens]:
        kitchen.run(kitchen.shared(second), second.layout)
        return learn(library, texts)

    late = kitchen.shared(replace(first, learn=slow))
    assert origins(kitchen.run(late, first.layout)) == [LEARNED, LEARNED]
    assert (late.rows_computed, shared.rows_computed) == (0, 0)


def test_an_owner_that_the_store_stalls_too_long_leaves_the_rest(
    kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = {"seconds": 60.0}
    kitchen.flights = Flights(lambda rows: patience["seconds"])
    prompts = [kitchen.prompt(ONE, TWO) for _ in range(2)]
    keep = ChunkLibrary.keep

    def put(library: ChunkLibrary, *cache: Any) -> None:
        keep(library, *cache)
        patience["seconds"] = 0.0

    monkeypatch.setattr(ChunkLibrary, "keep", put)
    shared = kitchen.shared(prompts[0])
    assert origins(kitchen.run(shared, prompts[0].layout)) == [LEARNED, NEW]
    assert (shared.rows_computed, shared.texts) == (SIZE, {ONE})


def test_while_another_owner_is_stalled_nothing_is_computed(kitchen: Kitchen) -> None:
    kitchen.flights = Flights(lambda rows: 0.0)
    first, second = kitchen.prompt(ONE), kitchen.prompt(ONE)
    with flight_of(first).owning(), flight_of(first).stalled():
        shared = kitchen.shared(second)
        assert origins(kitchen.run(shared, second.layout)) == [NEW]
    assert (shared.rows_computed, kitchen.asked_for) == (0, [])


def test_a_request_owns_its_text_while_it_is_computed(kitchen: Kitchen) -> None:
    first, second = kitchen.prompt(ONE), kitchen.prompt(ONE)
    flight = flight_of(first)
    steps = kitchen.shared(first).steps(first.layout, 0, lambda: 64)
    assert not flight.is_owner
    next(steps)
    assert flight.is_owner
    steps.close()
    assert not flight.is_owner
    assert second.flight is not None


def test_pieces_are_divided_where_others_have_parts_of_them(kitchen: Kitchen) -> None:
    """What is left is new text, or no text to keep where it is too short."""
    short = text(7, LEAST_PIECE - 1)
    whole, parts = kitchen.prompt((*ONE, *TWO, *short), THREE), kitchen.prompt(TWO, THREE)
    layout = kitchen.run(kitchen.shared(whole), whole.layout)
    places = [(place.tokens, place.origin) for place in layout.places]
    assert places == [(ONE, NEW), (TWO, LEARNED), (short, TEXT), (THREE, LEARNED)]
    assert layout.token_ids == whole.layout.token_ids
    assert set(flight_of(whole).lengths.values()) == {2 * SIZE + len(short), SIZE}
    assert parts.flight is not None


def test_the_longest_part_counts(kitchen: Kitchen) -> None:
    inner = (*ONE[SIZE // 2 :], *TWO[: SIZE // 2])
    whole = kitchen.prompt((*ONE, *TWO, *THREE), FOUR)
    others = [kitchen.prompt(inner), kitchen.prompt((*ONE, *TWO), FOUR), kitchen.prompt(inner)]
    layout = kitchen.run(kitchen.shared(whole), whole.layout)
    assert [place.tokens for place in layout.places] == [(*ONE, *TWO), THREE, FOUR]
    assert others


def test_a_part_of_which_a_piece_has_only_the_beginning_divides_nothing(kitchen: Kitchen) -> None:
    whole, other = kitchen.prompt((*ONE, *TWO[: SIZE // 2]), THREE), kitchen.prompt(TWO, THREE)
    layout = kitchen.run(kitchen.shared(whole), whole.layout)
    assert [place.tokens for place in layout.places] == [(*ONE, *TWO[: SIZE // 2]), THREE]
    assert other.flight is not None


@pytest.mark.parametrize("origin", [LEARNED, TEXT])
def test_only_new_pieces_are_divided(kitchen: Kitchen, origin: PlaceOrigin) -> None:
    joined = (*ONE, *TWO)
    layout = replace(layout_of(), places=(Place(joined, origin), Place(THREE, NEW)))
    whole, other = kitchen.prompt(layout=layout), kitchen.prompt(TWO, THREE)
    places = kitchen.run(kitchen.shared(whole), layout).places
    assert [place.tokens for place in places] == [joined, THREE]
    assert other.flight is not None


def test_a_piece_that_was_computed_is_divided_no_more(kitchen: Kitchen) -> None:
    joined = (*ONE, *TWO)
    prompts = [kitchen.prompt(joined) for _ in range(2)]
    kitchen.run(kitchen.shared(prompts[0]), prompts[0].layout)
    part = kitchen.prompt(TWO)  # its tokens stand in the index now
    layout = kitchen.run(kitchen.shared(prompts[1]), prompts[1].layout)
    assert [(place.tokens, place.origin) for place in layout.places] == [(joined, LEARNED)]
    assert part.flight is not None


def test_a_short_document_stays_a_document(kitchen: Kitchen) -> None:
    short = text(8, LEAST_PIECE // 2)
    prompts = [kitchen.prompt(short, ONE) for _ in range(2)]
    layout = kitchen.run(kitchen.shared(prompts[0]), prompts[0].layout)
    assert [(place.tokens, place.origin) for place in layout.places] == [(short, LEARNED), (ONE, LEARNED)]
