"""Rows of results -> statistics and tables, against numbers worked out by hand."""

import itertools
from typing import Any

import pytest

from _results import Row
from blend.errors import ConfigError
from study.tables import paired, ratio_interval, tables


def row(method: str, id_: str, kl: float | None, **more: Any) -> Row:
    """A row of the set s unless told otherwise."""
    quality = {"kl": kl, "top1": 0.5, "f1": 0.5, "f1_full": 0.75, "answer": None, "right": None}
    work = {"ttft_s": 2.0, "full_ttft_s": 8.0, "select_s": 0.4, "rows": 100, "share": 0.25}
    return {"model": "m", "set": "s", "method": method, "id": id_, **quality, **work, **more}


def rows(method: str, kl: float, **more: Any) -> list[Row]:
    """Of two records."""
    return [row(method, id_, kl, **more) for id_ in ("1", "2")]


FULL = rows("full", 0.0, top1=1.0, f1=0.6, ttft_s=8.0, select_s=0.0, share=1.0, f1_full=1.0)
BASE = rows("published", 0.4, f1=0.3)
QUERY = rows("query", 0.1)
REUSE = rows("reuse", 0.8, f1=0.2, select_s=0.0, ttft_s=0.5, share=0.05)


def test_markdown_has_the_methods_asked_for():
    lines = list(tables([*FULL, *BASE, *QUERY], ["query"]))
    assert lines[:4] == ["", "| KL | s (2) |", "|---|--:|", "| query | 0.100 |"]
    assert lines[4:8] == ["", "| gold, difference to full | s (2) |", "|---|--:|", "| query | -0.100 [-0.10, -0.10] |"]
    full = "0.000 | 0.00 [0.00,0.00] | 0.000 | 1.00 | 1.00 | 0.60 | +0.000 [+0.00, +0.00] | 100% | 1.0x | 0.0%"
    query = "0.100 | 0.25 [0.25,0.25] | 0.100 | 0.50 | 0.75 | 0.50 | -0.100 [-0.10, -0.10] | 25% | 4.0x | 5.0%"
    assert lines[-2:] == [f"| full | {full} |", f"| query | {query} |"]


def test_a_record_without_answer_tokens_has_no_part_in_kl():
    """Full recompute ended at once: nothing to compare along, which is no agreement."""
    *_, reuse = tables(
        [*REUSE, *BASE, *FULL, row("reuse", "3", None), row("published", "3", None), row("full", "3", 0.0)]
    )
    assert reuse.startswith("| reuse | 0.800 | 2.00 [2.00,2.00] | 0.800 |")


def ratio(compared: list[Row], baseline: list[Row]) -> tuple[float, float, float]:
    """Of the KL of the method query to that of the published one: the mean and the ends of its interval."""
    found = ratio_interval(compared, baseline)
    return found.mean, found.low, found.high


def test_a_ratio_pairs_records():
    """A method with half the baseline's KL on every record has a ratio of one half, and no spread."""
    mine = [row("query", str(n), 0.05 * n) for n in range(1, 11)]
    base = [row("published", str(n), 0.1 * n) for n in range(1, 11)]
    assert ratio(mine, base) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_is_of_means_over_sets_on_shared_records():
    """(0.2 + 0.6) / 2 over (0.4 + 0.4) / 2; the record that the baseline lacks counts nowhere."""
    mine = [row("query", "1", 0.1), row("query", "2", 0.3), row("query", "3", 9.0), row("query", "1", 0.6, set="t")]
    base = [row("published", "1", 0.2), row("published", "2", 0.6), row("published", "1", 0.4, set="t")]
    assert ratio(mine, base)[0] == pytest.approx(1.0)
    assert ratio_interval(mine, []) is None


def test_an_interval_is_that_of_all_resamples():
    """Three records have 27 resamples; the 2.5 % and 97.5 % points of their means are the smallest and the largest value."""
    values = [0.0, 0.3, 0.9]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values, repeat=3))
    assert means[0] == 0.0
    assert means[-1] == pytest.approx(0.9)  # 1 in 27, more than 2.5 %
    mine = [row("query", str(n), kl) for n, kl in enumerate(values)]
    base = [row("published", str(n), 1.0) for n in range(len(values))]
    assert ratio(mine, base) == pytest.approx((0.4, means[0], means[-1]))


def test_paired_rows_are_of_records_that_all_methods_have():
    """Of the methods asked for, full recompute and the baseline alone."""
    every = ("full", "published", "query", "random")
    given = [row(name, "1", 0.1, set=set_) for set_ in ("t", "s") for name in every]
    given += [row(name, "2", 0.1) for name in ("full", "query")]
    found = [(one["set"], one["id"], one["method"]) for one in paired(given, ["query"])]
    assert found == [(name, "1", method) for name in ("t", "s") for method in ("full", "published", "query")]
    with pytest.raises(ConfigError, match="no record has full, published and all of query, oracle"):
        paired(given, ["query", "oracle"])
