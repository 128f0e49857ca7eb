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
    assert summarise(measurements()).judgements == ()
    report = summarise(measurements(20), target=Quality(kl=0.5, flips=0.1))
    decisions = [(judged.method, judged.name, judged.figure.decision) for judged in report.judgements]
    assert decisions == [("blend", "kl", "kept"), ("blend", "flips", "broken")]
    assert report.judged_lines[1] == "share of different answers 100% [84%, 100%], within 0.1: broken"
    assert report_document(report)["judged"]["kl"]["decision"] == "kept"
    (few,) = summarise(measurements(3), target=Quality(flips=0.1)).judged_lines
    assert few.endswith("within 0.1: undecided, 16 records would probably decide")


def test_each_way_to_blend_is_judged():
    rows = measurements(20)
    others = [replace(row, method="hkvd", kl=0.9) for row in rows if row.method == "blend"]
    report = summarise([*rows, *others], target=Quality(kl=0.5))
    assert [line.split(":")[0] for line in report.judged_lines] == ["blend", "hkvd"]
    methods = report_document(report)["methods"]
    assert [methods[name]["judged"]["kl"]["decision"] for name in ("blend", "hkvd")] == ["kept", "broken"]
    assert methods["reuse"]["judged"] == {}


def test_the_document_has_every_number_of_the_report_and_how_it_was_made(report, undefined_report):
    told = report_document(report)
    json.dumps(told, allow_nan=False)
    assert told["format"] == 3
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
    return all_cells(text, method)[0]


def all_cells(text, method):
    """Columns of the line of a method in each table."""
    lines = [line for line in text.splitlines() if line.split()[:1] == [method]]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def test_the_text_shows_the_numbers_their_intervals_and_what_they_were_made_with(report):
    blend, text = report.method("blend"), report_text(report)
    overview, gold, *_ = all_cells(text, "blend")
    assert overview == ["blend", f"{blend.ttft_s:#.3g} s", "5.00x", "17.0%", "0.400", "0.960"]
    assert gold == ["blend", f"{blend.mean('f1'):.3f}", "-0.050"]
    assert "F1 minus full's" in text
    assert cells(text, "full")[1:3] == [f"{report.method('full').ttft_s:#.3g} s", "1.00x"]
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
    assert all_cells(report_text(summarise(rows)), "blend")[1][1] == "-"


def test_changed_answers_and_what_they_mean(undefined_report):
    said = {"full": ("yes", True), "reuse": ("no", False), "blend": ("yes indeed", True)}
    rows = [replace(row, answer=said[row.method][0], right=said[row.method][1]) for row in measurements(12)]
    report = summarise(rows)
    worse = "100% [76%, 100%]; of these 0 equal in meaning, 0 better, 12 worse, 0 wrong in both"
    assert f"reuse: answers changed: {worse}" in " ".join(report_text(report).split())
    changes = report_document(report)["methods"]["blend"]["changes"]
    assert (changes["share"]["mean"], changes["share"]["high"], changes["equal"], changes["worse"]) == (1.0, 1.0, 12, 0)
    assert re.search(r"blend: answers changed: 100% \[44%, 100%\] *$", report_text(undefined_report), re.MULTILINE)


def test_stages_and_the_floor_are_medians():
    times = {"load": (0.1, 0.2, 0.9), "first_token": (0.3, 0.3, 0.3)}
    rows = [row("full", str(place), 4.0) for place in range(3)]
    for place in range(3):
        stages = {name: values[place] for name, values in times.items()}
        rows.append(replace(row("blend", str(place), 1.0 + place), stages=stages, floor_s=0.5))
    report = summarise(rows)
    blend = report.method("blend")
    assert blend.stages == {"load": 0.2, "first_token": 0.3}
    assert blend.floor_ratio == 4.0  # of 2, 4 and 6
    text = report_text(report)
    assert all_cells(text, "blend")[1] == ["blend", "200 ms", "300 ms", "2.00 s"]
    assert re.search(r"load +first token +TTFT", text)
    methods = report_document(report)["methods"]
    assert (methods["blend"]["stages"], methods["blend"]["floor_ratio"]) == (blend.stages, 4.0)
    assert methods["full"]["floor_ratio"] is None


def test_figures_by_task_where_there_are_several():
    assert summarise(measurements(4)).tasks == ()
    rows = [
        *(row("full", name, 1.0, f1=0.5, task=task) for name, task in (("a", "qa"), ("b", "summary"), ("c", "qa"))),
        replace(row("blend", "a", 1.0, f1=0.25, kl=0.1, task="qa"), answer="another"),
        row("blend", "b", 1.0, kl=0.3, rouge_l=0.75, task="summary"),
        row("blend", "c", 1.0, f1=0.75, kl=0.5, task="qa"),
    ]
    report = summarise(rows)
    figures = {(each.task, each.method): each for each in report.tasks}
    assert list(figures) == [("qa", "full"), ("qa", "blend"), ("summary", "full"), ("summary", "blend")]
    qa, summary = figures["qa", "blend"], figures["summary", "blend"]
    assert (qa.records, qa.changed, qa.means["f1"], qa.means["kl"]) == (2, 0.5, 0.5, pytest.approx(0.3))
    assert (summary.records, summary.changed, summary.means["f1"], summary.means["rouge_l"]) == (1, 0.0, None, 0.75)
    assert ["summary", "blend", "1", "0%", "-", "0.750", "0.300"] in all_cells(report_text(report), "summary")
    assert report_document(report)["tasks"][1]["means"]["f1"] == 0.5


def changed_rows():
    """Seven records whose answers differ, with ever larger KL; in one only plain reuse's does."""
    rows = []
    for place in range(7):
        asked = {"question": f"What is {place}?", "gold": (f"number {place}",)}
        rows.append(replace(row("full", f"q{place}", 1.0, right=True, **asked), answer=f"It is {place}."))
        rows.append(replace(row("reuse", f"q{place}", 1.0, kl=9.0, right=False, **asked), answer="No idea."))
        said = "It is 0." if place == 0 else f"It is {place + 1}."
        rows.append(replace(row("blend", f"q{place}", 1.0, kl=place / 10, right=place > 3, **asked), answer=said))
    return rows


def test_the_answers_that_changed_are_named_those_with_the_largest_kl_first():
    report = summarise(changed_rows())
    text = report_text(report)
    listed = re.findall(r"^(q\d) \(blend, KL ([0-9.]+), ([a-z ]+)\): (.*?) *$", text, re.MULTILINE)
    assert listed[0] == ("q6", "0.600", "equal in meaning", "What is 6?")
    assert [(name, meaning) for name, _, meaning, _ in listed[3:]] == [("q3", "worse"), ("q2", "worse")]
    assert re.search(r"  full   It is 6\. *\n  blend  It is 7\. *\n  gold   number 6", text)
    assert "Answers that differ from full's, the largest KL first (5 of 6, all with --json or --html)" in text
    assert "No idea" not in text  # that plain reuse answers otherwise is no news
    changed = report_document(report)["changed"]
    assert len(changed) == 13
    assert [each["record_id"] for each in changed if each["method"] == "blend"] == ["q6", "q5", "q4", "q3", "q2", "q1"]
    assert changed[-1] == {
        "record_id": "q1",
        "method": "blend",
        "question": "What is 1?",
        "full": "It is 1.",
        "answer": "It is 2.",
        "gold": ["number 1"],
        "kl": 0.1,
        "meaning": "worse",
    }


def test_of_long_answers_the_part_that_differs_is_shown_and_nothing_is_obeyed():
    shared = "The same words again. " * 40
    rows = [replace(row("full", "q", 1.0), answer=f"{shared}Seven gates."), row("blend", "q", 1.0, kl=0.1)]
    rows[1] = replace(rows[1], answer=f"{shared}[red]Eight\x1b[31m gates.")
    text = report_text(summarise(rows))
    assert re.search(r"full   \.\.\. .*Seven gates\.", text)
    assert "[red]Eight\\x1b[31m gates." in text
    assert text.count("The same words") < 10
