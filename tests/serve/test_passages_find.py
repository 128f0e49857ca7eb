"""Every run of tokens that stands in a known text is found, at any offset, within bounds of memory and work."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend.serve.token_index import GRAM, LEAST_RUN, MOST_PLACES, Ids, TextRun, TokenIndex, longest_first, stretches
from tests.store.reading import in_threads

Span = tuple[int, int, str, int]  # start, stop, name, first


def drawn(seed: int, count: int, vocabulary: int = 30_000) -> Ids:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def index_of(texts: Mapping[str, Ids]) -> TokenIndex[str]:
    index: TokenIndex[str] = TokenIndex()
    index.update((), texts)
    return index


def spans(runs: Sequence[TextRun[str]]) -> list[Span]:
    return sorted((run.start, run.stop, run.name, run.first) for run in runs)


def maximal_runs(texts: Mapping[str, Ids], ids: Ids) -> list[Span]:
    """Along every diagonal of every text, compared token by token."""
    found = []
    for name, text in texts.items():
        for shift in range(-len(text), len(ids)):  # the text's first token would stand there
            low, high = max(0, shift), min(len(ids), shift + len(text))
            for start, stop in stretches(ids[low:high] == text[low - shift : high - shift]) if high > low else ():
                if stop - start >= LEAST_RUN:
                    found.append((low + start, low + stop, name, low + start - shift))
    return sorted(found)


def grams(text: Ids) -> list[bytes]:
    return [text[at : at + GRAM].tobytes() for at in range(len(text) - GRAM + 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 50, 30_000]), st.integers(1, 4))
def test_every_maximal_run_is_found_and_no_other(seed: int, vocabulary: int, updates: int) -> None:
    """Texts are made of fresh tokens and of passages of each other, of all lengths about the shortest run."""
    rng = np.random.default_rng(seed)
    passages = [drawn(seed + n, int(rng.integers(LEAST_RUN - 2, 90)), vocabulary) for n in range(3)]

    def made() -> Ids:
        parts = []
        for _ in range(rng.integers(1, 5)):
            passage = passages[rng.integers(len(passages))]
            cut = int(rng.integers(0, len(passage) - LEAST_RUN + 3))
            parts += [passage[cut:], rng.integers(0, vocabulary, rng.integers(0, 40)).astype(np.int32)]
        return np.concatenate(parts)

    texts = {f"text {n}": made() for n in range(6)} | {"short": drawn(seed, 5, vocabulary), "empty": drawn(0, 0)}
    index: TokenIndex[str] = TokenIndex()
    for part in np.array_split(np.array(list(texts)), updates):
        index.update((), {str(name): texts[str(name)] for name in part})
    asked = made()
    places = Counter(gram for text in texts.values() for gram in grams(text))
    expected, found = maximal_runs(texts, asked), index.runs(asked)
    assert len(spans(found)) == len(set(spans(found)))
    assert set(spans(found)) <= set(expected)
    rare = [one for one in expected if all(places[gram] <= MOST_PLACES for gram in grams(asked[one[0] : one[1]]))]
    rare = [one for one in rare if not any(gram[:4] * GRAM == gram for gram in grams(asked[one[0] : one[1]]))]
    assert set(rare) <= set(spans(found))
    assert all(np.array_equal(run.text, texts[run.name]) for run in found)


def test_of_a_text_in_many_texts_the_latest_are_returned() -> None:
    passage = drawn(1, 100)
    index: TokenIndex[int] = TokenIndex()
    for n in range(10):
        index.update((), {n: np.concatenate((drawn(100 + n, 400), passage))})
    assert {9, 8, 7} <= {run.name for run in index.runs(passage)}
    assert all((run.start, run.stop, run.first) == (0, 100, 400) for run in index.runs(passage))


def test_updates_forget_and_replace() -> None:
    texts = {str(n): drawn(n, 300) for n in range(20)}
    index, everything = index_of(texts), np.concatenate([*texts.values()])
    gone = [str(n) for n in range(5)]
    index.update([*gone, "unknown"], {"5": drawn(50, 300), "new": texts["0"]})
    assert {run.name for run in index.runs(everything)} == {"new", *map(str, range(6, 20))}
    assert [run.name for run in index.runs(drawn(50, 300))] == ["5"]
    assert (len(index), set(index.names)) == (16, {"new", *map(str, range(5, 20))})
    before = index.nbytes
    index.update(map(str, range(5, 18)), {})  # most of it is dead: what lives is written anew
    index.update((), {"last": drawn(60, 300)})
    assert index.nbytes < before / 2
    assert {run.name for run in index.runs(np.concatenate((everything, drawn(60, 300))))} == {"new", "18", "19", "last"}
    assert np.array_equal(index.tokens("19"), texts["19"])
    with pytest.raises(KeyError):
        index.tokens("5")
    index.update(list(index.names), {})
    assert (len(index), index.runs(everything)) == (0, [])


def test_a_text_stays_findable_whatever_is_replaced() -> None:
    """Copies that are gone do not take the places of those that remain."""
    passage = drawn(1, 100)
    index = index_of({"stays": passage, "rest": drawn(2, 2000)})
    for n in range(3 * MOST_PLACES):
        index.update((), {"changes": np.concatenate((passage, drawn(100 + n, 40)))})
    index.update(["changes"], {})
    assert spans(index.runs(passage)) == [(0, 100, "stays", 0)]


def test_searches_while_texts_change() -> None:
    """What stays is always found, and whatever else is found is true; texts are added, replaced, forgotten and compacted."""
    stays, changing = drawn(0, 300), [drawn(1 + n, 40 + 7 * n) for n in range(40)]
    asked, index = np.concatenate([stays, *changing]), index_of({"stays": stays})
    known = {f"{n}": text for n, text in enumerate(changing)} | {"stays": stays}
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            found = index.runs(asked)
            assert (0, 300, "stays", 0) in spans(found)
            for run in found:
                assert np.array_equal(run.text, known[run.name])
                assert np.array_equal(asked[run.start : run.stop], run.text[run.first :][: run.stop - run.start])

    def change() -> None:
        rng = np.random.default_rng(0)
        try:
            for _ in range(400):
                gone, new = ({str(n) for n in rng.choice(40, rng.integers(1, 30), replace=False)} for _ in range(2))
                index.update(gone, {name: known[name] for name in new})
        finally:
            done.set()

    in_threads(4, lambda thread: search() if thread else change())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 250), st.integers(LEAST_RUN, 120)), max_size=12), st.sets(st.integers(0, 299)))
def test_the_longest_first_and_what_is_left_of_the_others(lengths: list[tuple[int, int]], taken: set[int]) -> None:
    nothing = np.empty(0, np.int32)
    runs = [TextRun(start, min(start + size, 300), n, 7 * n, nothing) for n, (start, size) in enumerate(lengths)]
    free = np.ones(300, np.bool_)
    free[list(taken)] = False
    before, covered = free.copy(), np.zeros(300, np.int64)
    chosen = longest_first(runs, free)
    for one in chosen:
        covered[one.start : one.stop] += 1
        assert one.stop - one.start >= LEAST_RUN
        whole = runs[one.name]
        assert whole.start <= one.start < one.stop <= whole.stop
        assert one.first - one.start == whole.first - whole.start
    assert covered.max(initial=0) <= 1
    assert np.array_equal(free, before & (covered == 0))
    assert chosen == sorted(chosen, key=lambda run: run.start)
    for run in runs:  # nothing that is long enough is left
        assert all(stop - start < LEAST_RUN for start, stop in stretches(free[run.start : run.stop]))
    if runs and all(before[run.start : run.stop].all() for run in runs):
        assert max(run.stop - run.start for run in runs) in [one.stop - one.start for one in chosen]


def test_a_million_tokens_take_few_bytes() -> None:
    index: TokenIndex[int] = TokenIndex()
    for batch in range(10):
        index.update((), {500 * batch + n: drawn(500 * batch + n, 200) for n in range(500)})
    assert index.nbytes <= 20 * 1_000_000
    index.update(range(2000), {})
    assert index.nbytes <= 20 * 600_000


MADE = {
    "one token": lambda count: np.zeros(count, np.int32),
    "a period of seven": lambda count: np.resize(drawn(1, 7), count),
    "a period of a run": lambda count: np.resize(drawn(1, LEAST_RUN), count),
    "one passage in hundreds of texts": lambda count: np.resize(drawn(1, 150), count),
}


@pytest.mark.parametrize("case", MADE)
def test_made_texts_ask_for_no_more_than_linear_work(case: str) -> None:
    index: TokenIndex[int] = TokenIndex()
    for batch in range(4):
        index.update((), {100 * batch + n: np.append(MADE[case](300), drawn(n, 20)) for n in range(100)})
    for count in (2_000, 20_000):
        assert len(index.runs(MADE[case](count))) <= count / 16 + 256
    lone = index_of({"made": MADE[case](200), "prose": drawn(5, 200)})
    found = lone.runs(np.concatenate((MADE[case](200), drawn(5, 200))))
    assert {"made", "prose"} <= {run.name for run in found}
