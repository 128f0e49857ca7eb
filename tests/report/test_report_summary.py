import math
import statistics
from dataclasses import replace

import pytest

from blend.errors import ConfigError
from blend.eval.report import Measurement, summarise
from blend.intervals import mean_interval, share_interval
from blend.quality import Quality


def row(method, record, ttft, **fields):
    return Measurement(method, record, "", ttft, **{"stages": {}, "rows_total": 10, "rows_computed": 10.0, **fields})


def test_speed_by_hand():
    report = summarise(
        [
            *(row("full", name, ttft, floor_s=ttft) for name, ttft in (("a", 4.0), ("b", 6.0), ("c", 20.0))),
            row("fast", "a", 2.0, floor_s=1.0, rows_computed=1.0),
            row("fast", "b", 1.0, floor_s=0.8, rows_computed=2.0),
            row("fast", "c", 5.0, floor_s=4.0, rows_computed=6.0),
        ]
    )
    full, fast = report.methods
    assert (full.ttft_s, full.speedup, full.floor_ratio, full.floor_share, full.rows_share) == (6.0, 1.0, 1.0, 1.0, 1.0)
    assert fast.ttft_s == 2.0
    assert fast.speedup == 4.0  # ratios 2, 6, 4: not the ratio of the medians, which is 3
    assert (fast.speedup_bounds.low, fast.speedup_bounds.high) == (2.0, 6.0)
    assert fast.floor_ratio == 1.25  # 2, 1.25, 1.25
    assert fast.floor_share == pytest.approx(0.2)  # 0.25, 0.133, 0.2
    assert fast.rows_share == pytest.approx(0.3)
    assert fast.differences["ttft"].mean == pytest.approx((-2 - 5 - 15) / 3)


def test_quality_and_paired_differences_by_hand():
    scores = {"a": (0.5, 0.25), "b": (1.0, 1.0), "c": (0.0, 0.5)}
    rows = [row("full", name, 1.0, f1=full) for name, (full, _) in scores.items()]
    rows += [row("fast", name, 1.0, f1=fast, kl=0.2, top1=0.5) for name, (_, fast) in scores.items()]
    fast = summarise(rows).method("fast")
    assert fast.mean("f1") == pytest.approx(1.75 / 3)
    assert fast.differences["f1"] == mean_interval([-0.25, 0.0, 0.5])
    assert fast.quality["f1"] == mean_interval([0.25, 1.0, 0.5])
    assert fast.differences["kl"].mean == pytest.approx(0.2)
    assert fast.differences["top1"].mean == pytest.approx(-0.5)
    assert fast.mean("em") is None
    assert fast.differences["em"] is None


def test_the_reference_comes_first_and_differs_from_itself_by_nothing(measurements):
    rows = sorted(measurements(), key=lambda m: m.method)
    report = summarise(rows)
    assert [summary.method for summary in report.methods] == ["full", "blend", "reuse"]
    full = report.methods[0]
    assert full.speedup == 1
    assert full.mean("kl") == 0
    assert full.mean("top1") == 1
    assert all((d.mean, d.low, d.high) == (0, 0, 0) for d in full.differences.values() if d is not None)
    assert summarise(rows, reference="reuse").methods[0].method == "reuse"


def test_undefined_values_are_left_out_of_means_and_pairs():
    rows = [
        *(row("full", name, 1.0, f1=f1) for name, f1 in (("a", 0.5), ("b", None), ("c", 1.0))),
        *(row("fast", name, 1.0, f1=f1) for name, f1 in (("a", 0.25), ("b", 0.75), ("c", None))),
    ]
    fast = summarise(rows).method("fast")
    assert fast.mean("f1") == 0.5
    assert fast.differences["f1"].mean == -0.25


def test_an_infinite_kl_leaves_the_mean_undefined_rather_than_flattered(measurements):
    rows = measurements()
    rows[1] = replace(rows[1], kl=math.inf)
    reuse = summarise(rows).method("reuse")
    assert reuse.quality["kl"] is None
    assert reuse.differences["kl"] is None


def test_records_that_a_method_lacks_are_left_out_everywhere(measurements):
    rows = measurements(6)
    report = summarise(rows[:-1])
    assert report.records == 5
    assert report.incomplete == ("q5",)
    assert report.methods == summarise(rows[:15]).methods
    assert {m.record_id for m in report.measurements} == {f"q{i}" for i in range(5)}


def test_summaries_by_task(measurements):
    rows = measurements(12, tasks=("one", "two", "three"))
    report = summarise(rows)
    assert list(report.tasks) == ["one", "two", "three"]
    two = [m for m in rows if m.task == "two"]
    assert report.tasks["two"] == summarise(two).methods
    assert summarise(two).tasks == {}


def test_stage_medians(measurements):
    rows = [m for m in measurements(5) if m.method != "reuse"]
    rows[1] = replace(rows[1], stages={"extra": 1.0})
    report = summarise(rows)
    times = [m.ttft_s for m in rows if m.method == "full"]
    assert report.method("full").stages == pytest.approx(
        {"load": 0.1 * statistics.median(times), "recompute": 0.9 * statistics.median(times)}
    )
    assert report.method("blend").stages["extra"] == 0
    assert report.method("blend").stages["load"] > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no record was answered by 'full'"),
        ([row("fast", "a", 1.0)], "no record was answered by 'full'"),
        ([row("full", "a", 1.0), row("fast", "b", 1.0)], "no record was answered by every method"),
    ],
)
def test_nothing_to_compare(rows, message):
    with pytest.raises(ConfigError, match=message):
        summarise(rows)


def test_two_measurements_of_one_record_are_refused():
    with pytest.raises(ValueError, match="twice on record a"):
        summarise([row("full", "a", 1.0), row("full", "a", 2.0)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttft_s": 0.0}, "ttft_s must be positive"),
        ({"ttft_s": math.nan}, "ttft_s must be positive"),
        ({"floor_s": math.inf}, "floor_s must be positive"),
        ({"f1": 1.2}, "f1 must be between 0 and 1"),
        ({"em": math.nan}, "em must be between 0 and 1"),
        ({"kl": -0.1}, "kl must be 0 or more"),
        ({"kl": math.nan}, "kl must be 0 or more"),
        ({"rows_computed": 10.5}, "rows_computed must be between"),
    ],
)
def test_impossible_measurements_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"fast on record a: {message}"):
        replace(row("fast", "a", 1.0), **fields)


def test_shares_of_a_measurement():
    assert row("fast", "a", 3.0, floor_s=2.0, rows_computed=2.5).floor_ratio == 1.5
    assert row("fast", "a", 3.0, rows_computed=2.5).rows_share == 0.25
    assert row("fast", "a", 3.0, rows_total=0, rows_computed=0.0).rows_share is None
    assert row("fast", "a", 3.0).floor_ratio is None


def test_what_is_asked_of_blended_answers_is_judged(measurements):
    rows = measurements(20)
    assert summarise(rows).judged == {}
    report = summarise(rows, target=Quality(kl=0.5, flips=0.1))
    assert {name: figure.decision for name, figure in report.judged.items()} == {"kl": "kept", "flips": "broken"}
    share = share_interval(20, 20)
    assert report.judged["flips"] == (share.mean, share.low, share.high, 0.1, 20)
    assert report.judged_lines["flips"] == "share of different answers 100% [84%, 100%], within 0.1: broken"
    few = summarise(measurements(3), target=Quality(flips=0.1)).judged_lines["flips"]
    assert few.endswith("within 0.1: undecided, 16 records would probably decide")
