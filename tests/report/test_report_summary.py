"""Measurements -> a report, its JSON and its tables, against numbers worked out by hand."""

import io
import json
import math
import random
import re
from dataclasses import replace

import pytest
from rich.console import Console

from blend.eval.machine import Machine
from blend.eval.report import Measurement, RunInfo, report_document, summarise
from blend.eval.show import WIDTH, render_report
from blend.intervals import Interval, mean_interval
from blend.quality import Quality

MACHINE = Machine("Test CPU", 4, 8 * 2**30, None, "TestOS 1", "3.12.0", 2, {"kvblend": "0.0", "torch": "2.0"})
INFO = RunInfo(
    "tiny-model", "made-up questions", "blend report --limit 12", {"ratio": 0.15}, MACHINE, "float32", "int8"
)
# method -> share of the full time, share of rows, loss of F1, KL
METHODS = {"full": (1.0, 1.0, 0.0, 0.0), "reuse": (0.05, 0.02, 0.3, 1.5), "blend": (0.2, 0.17, 0.05, 0.4)}


def measurements(records=12, **changes):
    rng = random.Random(0)
    rows = []
    for index in range(records):
        seconds, f1 = rng.uniform(4, 8), rng.uniform(0.4, 0.9)
        for name, (time, share, loss, kl) in METHODS.items():
            scores = {"f1": f1 - loss, "kl": kl, "top1": 1 - kl / 10, **changes}
            rows.append(
                Measurement(name, f"q{index}", f"answer of {name}", seconds * time, {}, 2000, 2000 * share, **scores)
            )
    return rows


@pytest.fixture
def report():
    return summarise(measurements(), info=INFO)


@pytest.fixture
def undefined_report():
    """Neither gold answers nor fidelity."""
    return summarise(measurements(3, f1=None, kl=None, top1=None))


def row(method, record, ttft, computed=10.0, **scores):
    return Measurement(method, record, "", ttft, {}, 10, computed, **scores)


def test_speed_by_hand():
    report = summarise(
        [
            *(row("full", name, ttft) for name, ttft in (("a", 4.0), ("b", 6.0), ("c", 20.0))),
            row("fast", "a", 2.0, computed=1.0),
            row("fast", "b", 1.0, computed=2.0),
            row("fast", "c", 5.0, computed=6.0),
        ]
    )
    full, fast = report.methods
    assert (full.ttft_s, full.speedup.mean, full.rows_share) == (6.0, 1.0, 1.0)
    assert fast.ttft_s == 2.0
    assert fast.speedup == Interval(4.0, 2.0, 6.0)  # ratios 2, 6, 4: not the ratio of the medians, which is 3
    assert fast.rows_share == pytest.approx(0.3)


def test_quality_and_paired_differences_by_hand():
    scores = {"a": (0.5, 0.25), "b": (1.0, 1.0), "c": (0.0, 0.5), "d": (None, 0.75), "e": (1.0, None)}
    rows = [row("full", name, 1.0, f1=full) for name, (full, _) in scores.items()]
    rows += [row("fast", name, 1.0, f1=fast, kl=0.2, top1=0.5) for name, (_, fast) in scores.items()]
    fast = summarise(rows).method("fast")
    assert fast.f1_difference == mean_interval([-0.25, 0.0, 0.5])  # of records where both are defined
    assert fast.quality["f1"] == mean_interval([0.25, 1.0, 0.5, 0.75])
    assert fast.mean("kl") == pytest.approx(0.2)


def test_the_reference_comes_first_and_an_infinite_kl_leaves_the_mean_undefined():
    rows = sorted(measurements(), key=lambda m: m.method)
    rows[0] = replace(rows[0], kl=math.inf)  # rather than flattered
    report = summarise(rows)
    assert [summary.method for summary in report.methods] == ["full", "blend", "reuse"]
    assert report.methods[0].f1_difference == Interval(0, 0, 0)
    assert report.method("blend").quality["kl"] is None
    assert report_document(report)["records"][0]["kl"] is None


def test_what_is_asked_of_blended_answers_is_judged():
    assert summarise(measurements()).judged == {}
    report = summarise(measurements(20), target=Quality(kl=0.5, flips=0.1))
    assert report.judged["kl"].decision == "kept"
    assert report.judged_lines["flips"] == "share of different answers 100% [84%, 100%], within 0.1: broken"
    few = summarise(measurements(3), target=Quality(flips=0.1)).judged_lines["flips"]
    assert few.endswith("within 0.1: undecided, 16 records would probably decide")


def test_the_document_has_every_number_of_the_report_and_how_it_was_made(report, undefined_report):
    told = report_document(report)
    json.dumps(told, allow_nan=False)
    assert list(told["methods"]) == ["full", "reuse", "blend"]
    for name, method in told["methods"].items():
        summary = report.method(name)
        assert method["speedup"] == summary.speedup.mean
        assert method["f1"] == summary.mean("f1")
        assert method["f1_diff"]["low"] == summary.f1_difference.low
        assert method["kl_interval"] == {"low": summary.quality["kl"].low, "high": summary.quality["kl"].high}
    assert (told["command"], told["model"]) == ("blend report --limit 12", "tiny-model")
    assert (told["config"], told["dtype"], told["weights"]) == ({"ratio": 0.15}, "float32", "int8")
    assert (told["machine"]["cpu"], told["versions"]) == ("Test CPU", {"kvblend": "0.0", "torch": "2.0"})
    assert (told["reference"], told["record_count"], len(told["records"])) == ("full", 12, 36)
    assert told["records"][1]["answer"] == "answer of reuse"
    reuse = report_document(undefined_report)["methods"]["reuse"]
    assert [reuse[key] for key in ("f1", "kl", "f1_diff", "f1_interval")] == [None] * 4
    odd = replace(report, info=RunInfo(config={"x": math.nan}))
    assert report_document(odd)["config"] == {"x": None}


def report_text(report):
    """All tables, for which no line is longer than `WIDTH`."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    console.print(render_report(report))
    return console.file.getvalue()


def cells(text, method):
    """Columns of the first table's line of a method."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [method])
    return re.split(r"\s{2,}", line.strip())


def test_the_text_shows_the_numbers_their_intervals_and_what_they_were_made_with(report):
    blend, text = report.method("blend"), report_text(report)
    assert cells(text, "blend") == [
        *("blend", f"{blend.ttft_s:.3g} s", "5.00x", "17.0%"),
        *(f"{blend.mean('f1'):.3f}", "-0.050", "0.400", "0.960"),
    ]
    assert cells(text, "full")[1:3] == [f"{report.method('full').ttft_s:.3g} s", "1.00x"]
    difference = report.method("reuse").f1_difference
    assert f"[{difference.low:+.3f}, {difference.high:+.3f}]" in text
    assert "tiny-model · made-up questions · 12 records, with 95% intervals" in text.splitlines()[0]
    assert "float32, int8 weights, Test CPU, 4 cores, 2 threads, 8 GiB, kvblend 0.0, torch 2.0" in text
    assert "command: blend report --limit 12" in text
    assert not re.search("too few|…", text)


def test_undefined_values_are_dashes_and_empty_columns_are_left_out(undefined_report):
    text = report_text(undefined_report)
    assert not re.search(r"nan|None|F1|KL|top-1", text)
    assert cells(text, "blend")[2:] == ["5.00x", "17.0%"]
    assert "too few records" in text
    rows = [m if m.method == "reuse" else replace(m, f1=None) for m in measurements(2)]
    assert cells(report_text(summarise(rows)), "blend")[4] == "-"


def test_changed_answers_and_what_they_mean(undefined_report):
    said = {"full": ("yes", True), "reuse": ("no", False), "blend": ("yes indeed", True)}
    rows = [replace(row, answer=said[row.method][0], right=said[row.method][1]) for row in measurements(12)]
    report = summarise(rows)
    worse = "100% [76%, 100%]; of these 0 equal in meaning, 0 better, 12 worse, 0 wrong in both"
    assert f"reuse: answers changed: {worse}" in " ".join(report_text(report).split())
    changes = report_document(report)["methods"]["blend"]["changes"]
    assert (changes["share"]["mean"], changes["share"]["high"], changes["equal"], changes["worse"]) == (1.0, 1.0, 12, 0)
    assert re.search(r"blend: answers changed: 100% \[44%, 100%\] *$", report_text(undefined_report), re.MULTILINE)
