import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from blend.eval.report import report_document, summarise
from blend.eval.show import WIDTH, render_report

MANY = {
    "full": (1.0, 1.0, 0.0, None),
    **{f"{name} {ratio}%": (ratio / 100, ratio / 100, 0.1, 0.5) for name in ("hkvd", "random") for ratio in (5, 15)},
}


def report_text(report):
    """All tables as plain text without escape codes, for which no line is longer than `WIDTH`."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    console.print(render_report(report))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def cells(text, method):
    """Columns of the first table's line of a method."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [method])
    return re.split(r"\s{2,}", line.strip())


def test_the_text_shows_the_numbers_their_intervals_and_what_they_were_made_with(report):
    blend, text = report.method("blend"), report_text(report)
    assert cells(text, "blend") == [
        *("blend", f"{blend.ttft_s:.2f} s", "5.00x", "1.10", f"{blend.floor_share:.3f}", "17.0%"),
        *(f"{blend.mean('f1'):.3f}", "0.000", f"{blend.mean('rouge_l'):.3f}", "0.400", "0.960"),
    ]
    assert cells(text, "full")[1:3] == [f"{report.method('full').ttft_s:.2f} s", "1.00x"]
    difference = report.method("reuse").differences["rouge_l"]
    assert f"{difference.mean:+.3f}" in text
    assert f"[{difference.low:+.3f}, {difference.high:+.3f}]" in text
    assert "95% paired bootstrap interval" in text
    above = summarise(report.measurements, reference="reuse")
    assert f"+{above.method('full').differences['rouge_l'].mean:.3f}" in report_text(above)
    assert text.startswith("tiny-model · made-up questions · 12 records\n")
    assert "float32, int8 weights, Test CPU, 4 cores, 2 threads, 8 GiB, kvblend 0.0, torch 2.0" in text
    assert "command: blend report --limit 12" in text


@pytest.mark.parametrize("methods", [None, MANY])
def test_plain_text_of_100_columns(methods, measurements, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = measurements(
        tasks=("needle-single", "needle-split"), recall=0.5, **({"methods": methods} if methods else {})
    )
    text = report_text(summarise(rows))
    assert "\x1b" not in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "recall" in text


def test_undefined_values_are_dashes_and_empty_columns_are_left_out(undefined_report, measurements):
    text = report_text(undefined_report)
    assert not re.search(r"nan|None|F1|KL|top-1|by stage", text)
    assert cells(text, "blend")[2:] == ["5.00x", "-", "-", "17.0%"]
    rows = [m for m in measurements(2) if m.method == "full"] + [
        m for m in measurements(2, f1=None) if m.method != "full"
    ]
    assert cells(report_text(summarise(rows)), "blend")[6] == "-"


def test_few_and_missing_records_are_told(measurements, report):
    text = report_text(summarise(measurements(3)[:-1]))
    assert "2 records: too few" in text
    assert "1 record left out" in text
    assert "too few" not in report_text(report)


def test_stages_and_tasks(measurements):
    text = report_text(summarise(measurements(tasks=("needle-single", "needle-split"))))
    assert re.search(r"F1 by task", text)
    assert re.search(r"^ needle-split +6 +0\.\d{3}", text, re.MULTILINE)
    assert re.search(r"^ recompute +\d+\.\d\d s", text, re.MULTILINE)


def test_markup_in_names_is_text(measurements):
    rows = measurements(methods={"full": (1, 1, 0, None), "[bold]x[/]": (0.5, 0.5, 0, 0.1)}, tasks=("[red]", "b"))
    text = report_text(summarise(rows))
    assert "[bold]x[/]" in text
    assert "[red]" in text


def test_a_terminal_gets_the_same_words(report):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    console.print(render_report(report))
    plain = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == report_text(report).splitlines()


def test_changed_answers_and_what_they_mean(measurements, undefined_report):
    said = {"full": ("yes", True), "reuse": ("no", False), "blend": ("yes indeed", True)}
    rows = [replace(row, answer=said[row.method][0], right=said[row.method][1]) for row in measurements(12)]
    report = summarise(rows)
    changed = report_text(report).split("answers that differ from full's, with 95% interval")[1]
    assert re.split(r"\s{2,}", changed.splitlines()[2].strip()) == [
        *("method", "changed", "equal in meaning", "better", "worse", "wrong in both")
    ]
    assert cells(changed, "reuse") == ["reuse", "100% [76%, 100%]", "0", "0", "12", "0"]
    assert cells(changed, "blend") == ["blend", "100% [76%, 100%]", "12", "0", "0", "0"]
    assert report_document(report)["methods"]["blend"]["changes"] == {
        "share": {"mean": 1.0, "low": pytest.approx(0.7575, abs=1e-3), "high": 1.0},
        "equal": 12,
        "better": 0,
        "worse": 0,
        "wrong": 0,
    }
    without_gold = report_text(undefined_report).split("answers that differ")[1]
    assert cells(without_gold, "blend") == ["blend", "100% [44%, 100%]"]
    assert "better" not in without_gold
