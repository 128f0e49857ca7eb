"""Every selector does what it says, recomputed here with plain loops; none exceeds its budget."""

from dataclasses import replace

import pytest
import torch
from cases import make_layout

from blend.layout import PromptLayout
from blend.select import SELECTORS
from blend.select.base import Evidence

LAYOUT = make_layout(prefix=5, chunks=(6, 1, 9, 4), suffix=3)
CANDIDATES = torch.arange(*LAYOUT.context)


def _evidence(
    budget: int, *, layout: PromptLayout = LAYOUT, candidates: torch.Tensor | None = None, seed: int = 0
) -> Evidence:
    """Random fresh and stored KV of 2 heads, and query attention of 3 layers."""
    rows = torch.arange(*layout.context) if candidates is None else candidates
    generator = torch.Generator().manual_seed(seed)

    def kv() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, 2, len(rows), 8)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    mass = torch.rand(3, len(rows), generator=generator)
    return Evidence(layout, rows, budget, layer=1, fresh=kv(), stored=kv(), query_attention=mass)


def _select(evidence: Evidence, selector: str, **options: object) -> list[int]:
    chosen = SELECTORS[selector](**options).select(evidence)  # a foreign one is checked in test_own_selectors
    assert chosen.dtype == torch.int64
    rows = chosen.tolist()
    assert rows == sorted(set(rows))
    assert set(rows) <= set(evidence.candidates.tolist())
    return rows


def _deviations(evidence: Evidence, parts: str) -> list[float]:
    pairs = {"k": [0], "v": [1], "kv": [0, 1]}[parts]
    totals = []
    for row in range(len(evidence.candidates)):
        differences = [(evidence.fresh[p][0, :, row] - evidence.stored[p][0, :, row]).double() for p in pairs]
        totals.append(sum(float((d * d).sum()) for d in differences))
    return totals


def test_hkvd_prefers_the_earlier_of_equal_rows():
    evidence = _evidence(4)
    assert _select(replace(evidence, fresh=evidence.stored), "hkvd") == CANDIDATES[:4].tolist()


@pytest.mark.parametrize("budget", [0, 1, 7, 8, 13, 20])
@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("query_guided", {}),
        *((selector, {"of": parts}) for selector in ("hkvd", "mixed") for parts in ("v", "k", "kv")),
    ],
    ids=str,
)
def test_a_budget_goes_to_heads_then_the_best_rows(selector, options, budget):
    """Alike for every selector that scores rows. Heads take half of the budget at most, of four chunks."""
    evidence = _evidence(budget, seed=budget)
    attention = evidence.query_attention.sum(0).double()
    deviation = torch.tensor(_deviations(evidence, options.get("of", "v")), dtype=torch.float64)
    weights = {"query_guided": attention, "mixed": attention * deviation, "hkvd": deviation}[selector]
    score = dict(zip(CANDIDATES.tolist(), weights.tolist(), strict=True))
    for lead in (0, 1, 2, 6):
        depth = min(lead, budget // 2 // 4)
        heads = [span.start + i for span in LAYOUT.chunk_spans for i in range(min(depth, span.length))]
        others = sorted((row for row in score if row not in heads), key=lambda row: (-score[row], row))
        assert _select(evidence, selector, lead=lead, **options) == sorted([*heads, *others][:budget])


def test_heads_are_taken_by_default_where_the_question_alone_chooses():
    """A budget of 16 is enough for eight rows of the one chunk."""
    layout = make_layout(chunks=(40,))

    def chosen(selector: str, **options: int) -> list[list[int]]:
        return [_select(_evidence(16, layout=layout, seed=seed), selector, **options) for seed in range(5)]

    for selector, default_lead, *other_leads in (("query_guided", 6, 0, 5, 7), ("mixed", 0, 1), ("hkvd", 0, 1)):
        assert chosen(selector) == chosen(selector, lead=default_lead)
        for lead in other_leads:
            assert chosen(selector) != chosen(selector, lead=lead)


@pytest.mark.parametrize("budget", [0, 1, 5, 10, 13, 20])
def test_a_question_chooses_the_best_chunks_that_fit_where_rows_cannot_be_computed_alone(budget):
    candidates = CANDIDATES[torch.arange(len(CANDIDATES)) != 11]  # all rows of the third chunk but one
    evidence = replace(_evidence(budget, candidates=candidates, seed=budget), whole_chunks=True)
    score = dict(zip(candidates.tolist(), evidence.query_attention.sum(0).tolist(), strict=True))
    chunks = [[row for row in range(*span) if row in score] for span in LAYOUT.chunk_spans]
    expected: list[int] = []
    for rows in sorted(chunks, key=lambda rows: -sum(score[row] for row in rows)):
        if len(rows) <= budget - len(expected):
            expected += rows
    assert _select(evidence, "query_guided") == sorted(expected)


@pytest.mark.parametrize("budget", [0, 1, 4, 20])
@pytest.mark.parametrize(
    ("chunks", "k"),
    [((), None), ((7,), 2), ((6, 6), None), *(((6, 1, 9, 4), k) for k in (None, 1, 2, 100)), ((1, 1, 1), 100)],
)
def test_first_k_deals_the_first_rows_of_later_chunks_in_turn(chunks, budget, k):
    layout = make_layout(chunks=chunks)
    expected: list[int] = []
    for depth in range(max(chunks, default=0) if k is None else k):
        expected += [span.start + depth for span in layout.chunk_spans[1:] if depth < span.length]
    evidence = Evidence(layout, torch.arange(*layout.context), budget)
    assert _select(evidence, "first_k", k=k) == sorted(expected[:budget])


def test_first_k_counts_from_the_start_of_a_chunk_that_is_partly_gone():
    """Only the candidates of the second chunk are left: its rows, not the third's."""
    span = LAYOUT.chunk_spans[2]
    evidence = Evidence(LAYOUT, torch.arange(*span), 20)
    assert _select(evidence, "first_k", k=2) == [span.start, span.start + 1]


def test_random_repeats_with_its_seed_and_is_uniform():
    evidence = Evidence(LAYOUT, CANDIDATES, 5)
    assert _select(evidence, "random", seed=1) == _select(evidence, "random", seed=1)
    draws = [_select(evidence, "random", seed=seed) for seed in range(400)]
    assert all(len(draw) == 5 for draw in draws)
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=LAYOUT.rows)[CANDIDATES]
    # Each of 20 rows is drawn 100 times on average, with a standard deviation of 8.7.
    assert counts.min() > 60
    assert counts.max() < 140


def test_all_and_none_ignore_the_budget():
    for budget in (0, 3, 20):
        evidence = Evidence(LAYOUT, CANDIDATES, budget)
        assert _select(evidence, "all") == CANDIDATES.tolist()
        assert _select(evidence, "none") == []


@pytest.mark.parametrize("selector", [name for name in SELECTORS if name not in ("all", "none")])
@pytest.mark.parametrize(
    "candidates", [CANDIDATES, CANDIDATES[::3].contiguous(), CANDIDATES[:1], CANDIDATES[:0]], ids=len
)
def test_no_selector_exceeds_its_budget_or_its_candidates(selector, candidates):
    for budget in {min(budget, len(candidates)) for budget in (0, 1, 3, 20)}:
        rows = _select(_evidence(budget, candidates=candidates), selector)
        assert len(rows) <= budget
        if selector != "first_k":
            assert len(rows) == budget
