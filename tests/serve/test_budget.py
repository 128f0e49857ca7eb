"""Names within a budget of bytes: what recurs stays, and what is new gets a chance."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend.serve.prompts.budget import Budget

USES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40) | st.just(200), st.booleans()), max_size=120)


@settings(max_examples=300, deadline=None)
@given(USES, st.integers(0, 150))
def test_the_budget_holds_after_any_sequence(uses: list[tuple[int, int, bool]], most: int) -> None:
    budget: Budget[int] = Budget(most)
    sizes = dict[int, int]()
    for name, size, forget in uses:
        if forget:
            budget.forget(name)
            sizes.pop(name, None)
        else:
            gone = budget.use(name, size)
            sizes[name] = size
            assert set(gone) <= set(sizes)
            assert len(gone) == len(set(gone))
            for evicted in gone:
                del sizes[evicted]
        assert budget.nbytes == sum(sizes.values()) <= most
        assert set(sizes) == {number for number in range(13) if number in budget}
        assert len(budget) == len(sizes)


@pytest.mark.parametrize("pages", [10, 40])
def test_what_recurs_stays_while_novel_text_passes(pages: int) -> None:
    """500 requests, half of them for a page, half with ten novel pieces: 20 times the budget, half of which holds 40 pages."""
    rng, budget, hits, seen = random.Random(0), Budget[str](60_000), [], set[str]()
    for request in range(500):
        page = f"page {rng.randrange(pages)}"
        if request % 2:
            hits += [page in budget] if page in seen else []
            seen.add(page)
            budget.use(page, 700)
        else:
            for n in range(10):
                budget.use(f"novel {request} {n}", rng.randint(300, 700))
    assert sum(page in budget for page in seen) >= 0.9 * len(seen)
    assert sum(hits) >= 0.8 * len(hits)


def test_a_new_name_is_there_for_the_second_request() -> None:
    """Also when all that is held was used often."""
    rng = random.Random(1)
    budget: Budget[str] = Budget(10_000)
    for _ in range(20):
        for n in range(30):
            budget.use(f"often {n}", 300)
    for n in range(500):
        assert f"new {n}" not in budget.use(f"new {n}", rng.randint(1, 1900))
        assert f"new {n}" in budget


def test_new_names_in_use_displace_old_ones_in_time() -> None:
    """A topic that was once asked for often makes room for the next."""
    budget: Budget[str] = Budget(10_000)
    for topic in range(3):
        for _ in range(40):
            for n in range(30):
                budget.use(f"{topic} {n}", 300)
        assert sum(f"{topic} {n}" in budget for n in range(30)) >= 24


def test_what_is_larger_than_the_budget_evicts_nothing_else() -> None:
    budget: Budget[str] = Budget(1000)
    for n in range(5):
        budget.use(f"small {n}", 150)
    for _ in range(20):
        assert budget.use("large", 1001) == ["large"]
    assert len(budget) == 5
