"""Statistics over rows, against numbers worked out by hand."""

import itertools

import pytest
from selection_rows import row

from blend.errors import ConfigError
from study import stats
from study.rows import Row


def cells(rows: list[Row], method: str) -> stats.BySet:
    return stats.by_method(rows)[method]


def test_a_large_set_does_not_drown_a_small_one() -> None:
    rows = [row("query", str(n), 0.1) for n in range(9)] + [row("query", "x", 0.5, set="small")]
    assert stats.mean_kl_over_sets(cells(rows, "query")) == pytest.approx(0.3)


def test_a_ratio_pairs_records() -> None:
    """A method with half the baseline's KL on every record has a ratio of one half, and no spread."""
    rows = [row(name, str(n), kl * (n + 1)) for n in range(10) for name, kl in (("query", 0.05), ("published", 0.1))]
    found = stats.ratio_interval(cells(rows, "query"), cells(rows, "published"))
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_is_of_means_over_sets_on_shared_records() -> None:
    """(0.2 + 0.6) / 2 over (0.4 + 0.4) / 2; the record that the baseline lacks counts nowhere."""
    mine = [row("query", "1", 0.1), row("query", "2", 0.3), row("query", "3", 9.0), row("query", "1", 0.6, set="t")]
    base = [row("published", "1", 0.2), row("published", "2", 0.6), row("published", "1", 0.4, set="t")]
    found = stats.ratio_interval(cells(mine, "query"), cells(base, "published"))
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert stats.ratio_interval(cells(mine, "query"), {}) is None


def test_an_interval_is_that_of_all_resamples() -> None:
    """Three records have 27 resamples; the 2.5 % and 97.5 % points of their means are the smallest and the largest value."""
    values = [0.0, 0.3, 0.9]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values, repeat=3))
    assert means[0] == 0.0
    assert means[-1] == pytest.approx(0.9)  # 1 in 27, more than 2.5 %
    found = stats.kl_interval([row("query", str(n), kl) for n, kl in enumerate(values)], ["s"])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.4, means[0], means[-1]))


def test_gold_is_compared_on_the_same_records() -> None:
    rows = [row("query", "1", 0.1, f1=0.5), row("query", "2", 0.1, f1=0.25), row("query", "3", 0.1, f1=None)]
    full = stats.by_method([row("full", str(n), 0.0, f1=f1) for n, f1 in ((1, 0.6), (2, 0.35), (3, 1.0))])["full"]
    found = stats.gold_interval(rows, full)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert stats.gold_interval(rows[2:], full) is None


def test_paired_rows_are_of_records_that_all_methods_have() -> None:
    """Set after set; of the methods asked for, full recompute and the baseline alone."""
    every = ("full", "published", "query", "random")
    rows = [row(name, "1", 0.1, set="t") for name in every] + [row(name, "1", 0.1) for name in every]
    rows += [row(name, "2", 0.1) for name in ("full", "query")]
    found = [(one.set, one.id, one.method) for one in stats.paired(rows, ["query"])]
    assert found == [(name, "1", method) for name in ("s", "t") for method in ("full", "published", "query")]
    with pytest.raises(ConfigError, match="no record has full, published and all of query, oracle"):
        stats.paired(rows, ["query", "oracle"])
