import itertools
import statistics

import numpy as np
import pytest

from blend import intervals
from blend.intervals import LEAST_SAMPLE, Judged, mean_interval, median_interval, paired_interval


def exact_quantile(values: list[float], share: float, statistic) -> float:
    """Quantile of the statistic over every possible resample, each equally likely."""
    ordered = sorted(statistic(sample) for sample in itertools.product(values, repeat=len(values)))
    return ordered[round(share * (len(ordered) - 1))]


@pytest.mark.parametrize(
    ("interval", "statistic"), [(mean_interval, statistics.fmean), (median_interval, statistics.median)]
)
def test_ends_agree_with_all_resamples_counted_out(interval, statistic):
    values = [0.0, 0.13, 0.31, 0.57, 0.9, 1.4]
    found = interval(values, resamples=40_000)
    near = [exact_quantile(values, share, statistic) for share in (0.02, 0.03, 0.97, 0.98)]
    assert near[0] - 1e-9 <= found.low <= near[1] + 1e-9
    assert near[2] - 1e-9 <= found.high <= near[3] + 1e-9


def test_pairing_removes_what_items_have_in_common():
    rng = np.random.default_rng(2)
    reference = rng.normal(0, 10, 50)
    values = reference + rng.normal(0.5, 0.1, 50)
    paired, alone = paired_interval(values.tolist(), reference.tolist()), mean_interval(values.tolist())
    assert paired.mean == pytest.approx((values - reference).mean())
    assert 0.4 < paired.low < paired.mean < paired.high < 0.6
    assert alone.high - alone.low > 1


def test_one_value_and_equal_values_give_a_point():
    for found in (paired_interval([0.3], [0.1]), mean_interval([0.2] * 7), median_interval([0.2, 0.2])):
        assert found.low == found.mean == found.high == pytest.approx(0.2)


def test_the_same_values_give_the_same_interval_in_blocks_of_any_size(monkeypatch):
    values = [0.1, 0.7, 0.3]
    whole = mean_interval(values, resamples=1000)
    monkeypatch.setattr(intervals, "RESAMPLED_AT_ONCE", 30)
    assert mean_interval(values, resamples=1000) == whole


def test_how_many_would_decide():
    assert Judged(0.0, 0.0, 0.0, 0.05, answers=2).enough == LEAST_SAMPLE
    # half the reach takes four times as many, and a fifth more
    assert Judged(0.03, 0.0, 0.07, 0.05, answers=20).enough == 96
    assert Judged(0.05, 0.0, 0.1, 0.05, answers=20).enough == 2400
