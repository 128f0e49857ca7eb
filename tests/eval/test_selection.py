"""Rows of results -> statistics and tables, against numbers worked out by hand."""

import itertools
from typing import Any

import pytest

from _results import Row
from blend.errors import ConfigError
from study.tables import BySet, by_method, paired, ratio_interval, tables

USUAL: Row = {
    "model": "m",
    "set": "s",
    "top1": 0.5,
    "f1": 0.5,
    "f1_full": 0.75,
    "answer": None,
    "right": None,
    "ttft_s": 2.0,
    "full_ttft_s": 8.0,
    "select_s": 0.4,
    "rows": 100,
    "share": 0.25,
}


def row(method: str, id_: str, kl: float | None, **more: Any) -> Row:
    """A row of the set s unless told otherwise."""
    return {**USUAL, "method": method, "id": id_, "kl": kl, **more}


FULL = [row("full", str(n), 0.0, top1=1.0, f1=0.6, ttft_s=8.0, select_s=0.0, share=1.0, f1_full=1.0) for n in (1, 2)]
BASE = [row("published", str(n), 0.4, f1=0.3) for n in (1, 2)]
QUERY = [row("query", str(n), 0.1, f1=0.5) for n in (1, 2)]
REUSE = [row("reuse", str(n), 0.8, f1=0.2, select_s=0.0, ttft_s=0.5, share=0.05) for n in (1, 2)]
ROWS = [*REUSE, *BASE, *QUERY, *FULL]


def test_markdown_has_the_methods_asked_for() -> None:
    lines = list(tables([*FULL, *BASE, *QUERY], ["query"]))
    assert lines[:4] == ["", "| KL | s (2) |", "|---|--:|", "| query | 0.100 |"]
    assert lines[4:8] == ["", "| gold, difference to full | s (2) |", "|---|--:|", "| query | -0.100 [-0.10, -0.10] |"]
    full = (
        "| full | 0.000 | 0.00 [0.00,0.00] | 0.000 | 1.00 | 1.00 | 0.60 | +0.000 [+0.00, +0.00] | 100% | 1.0x | 0.0% |"
    )
    query = (
        "| query | 0.100 | 0.25 [0.25,0.25] | 0.100 | 0.50 | 0.75 | 0.50 | -0.100 [-0.10, -0.10] | 25% | 4.0x | 5.0% |"
    )
    assert lines[11:] == [full, query]


def test_a_record_without_answer_tokens_has_no_part_in_kl() -> None:
    """Full recompute ended at once: nothing to compare along, which is no agreement."""
    *_, reuse = tables([*ROWS, row("reuse", "3", None), row("published", "3", None), row("full", "3", 0.0)])
    assert reuse.startswith("| reuse | 0.800 | 2.00 [2.00,2.00] | 0.800 |")


def cells(rows: list[Row], method: str) -> BySet:
    return by_method(rows)[method]


def test_a_ratio_pairs_records() -> None:
    """A method with half the baseline's KL on every record has a ratio of one half, and no spread."""
    rows = [row(name, str(n), kl * (n + 1)) for n in range(10) for name, kl in (("query", 0.05), ("published", 0.1))]
    found = ratio_interval(cells(rows, "query"), cells(rows, "published"))
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_is_of_means_over_sets_on_shared_records() -> None:
    """(0.2 + 0.6) / 2 over (0.4 + 0.4) / 2; the record that the baseline lacks counts nowhere."""
    mine = [row("query", "1", 0.1), row("query", "2", 0.3), row("query", "3", 9.0), row("query", "1", 0.6, set="t")]
    base = [row("published", "1", 0.2), row("published", "2", 0.6), row("published", "1", 0.4, set="t")]
    found = ratio_interval(cells(mine, "query"), cells(base, "published"))
    assert found.mean == pytest.approx(1.0)
    assert ratio_interval(cells(mine, "query"), {}) is None


def test_an_interval_is_that_of_all_resamples() -> None:
    """Three records have 27 resamples; the 2.5 % and 97.5 % points of their means are the smallest and the largest value."""
    values = [0.0, 0.3, 0.9]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values, repeat=3))
    assert means[0] == 0.0
    assert means[-1] == pytest.approx(0.9)  # 1 in 27, more than 2.5 %
    rows = [row("query", str(n), kl) for n, kl in enumerate(values)]
    base = [row("published", str(n), 1.0) for n in range(len(values))]
    found = ratio_interval(cells(rows, "query"), cells(base, "published"))
    assert (found.mean, found.low, found.high) == pytest.approx((0.4, means[0], means[-1]))


def test_paired_rows_are_of_records_that_all_methods_have() -> None:
    """Set after set; of the methods asked for, full recompute and the baseline alone."""
    every = ("full", "published", "query", "random")
    rows = [row(name, "1", 0.1, set="t") for name in every] + [row(name, "1", 0.1) for name in every]
    rows += [row(name, "2", 0.1) for name in ("full", "query")]
    found = [(one["set"], one["id"], one["method"]) for one in paired(rows, ["query"])]
    assert found == [(name, "1", method) for name in ("s", "t") for method in ("full", "published", "query")]
    with pytest.raises(ConfigError, match="no record has full, published and all of query, oracle"):
        paired(rows, ["query", "oracle"])
