"""Show a report: tables of 100 columns for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from blend.eval.report import FULL, REUSE, ChangedAnswer, MethodSummary, Report, TaskFigures
from blend.intervals import LEVEL, Interval
from blend.text import visible

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text


WIDTH = 100
UNDEFINED = "-"
TEXT_COLUMNS = ("task", "method")
SHOWN_CHANGES = 5
_STAGES = ("load", "reposition", "select", "recompute", "first_token")  # in the order in which they begin
_FEW_RECORDS = 10  # below this an interval of resampled records says little
_SHOWN_ANSWER = 240  # characters of an answer that differs
_BEFORE_DIFFERENCE = 60  # of which so many may be what both answers share
LABELS = {"f1": "F1", "em": "EM", "rouge_l": "ROUGE-L", "right": "right", "kl": "KL", "top1": "top-1"}
_GOLD_LEGEND = (
    "right: share of answers that name a gold answer; EM: share that are one, but for case, punctuation and articles"
)
Table = tuple[list[str], list[list[str]]]  # columns and rows


def render_report(report: Report) -> Group:
    """All tables as one rich renderable, for a console of any width from about 90 columns."""
    from rich.console import Group
    from rich.text import Text

    tables = [table(title, *content) for title, content in report_tables(report).items()]
    changes = [Text(visible(f"{summary.method}: {summary.changes}")) for summary in report.methods[1:]]
    footnotes = [Text(visible(line), style="dim") for line in footnotes_of(report)]
    return Group(*tables, *changes, *_changed_answers(report), *footnotes)


def report_tables(report: Report) -> dict[str, Table]:
    """Every table by its title: speed and KL, agreement with gold answers, stages, tasks; only those with something in it."""
    tables = {
        f"{report.title}, with {LEVEL:.0%} intervals": _overview(report),
        "Answers against gold answers": _against_gold(report),
        "Time to first token by stage, medians": _stages(report),
        "By task, means": _tasks(report.tasks),
    }
    return {title: content for title, content in tables.items() if len(content[0]) > 1}


def _overview(report: Report) -> Table:
    """Speed, and distance to full recompute."""
    rows = [
        {
            "method": summary.method,
            "TTFT": seconds(summary.ttft_s),
            "speed-up": with_ends(summary.speedup, ".2f", "x"),
            "x floor": number(summary.floor_ratio, ".2f"),
            "rows": f"{summary.rows_share:.1%}",
            "KL": with_ends(summary.quality["kl"], ".3f"),
            "top-1": number(summary.mean("top1"), ".3f"),
        }
        for summary in report.methods
    ]
    return _measured_columns(rows)


def _against_gold(report: Report) -> Table:
    """Agreement with gold answers."""
    rows = [
        {
            "method": summary.method,
            "F1": number(summary.mean("f1"), ".3f"),
            f"F1 minus {FULL}'s": with_ends(summary.f1_difference, "+.3f"),
            "right": number(summary.mean("right"), ".1%"),
            "EM": number(summary.mean("em"), ".1%"),
            "ROUGE-L": number(summary.mean("rouge_l"), ".3f"),
        }
        for summary in report.methods
    ]
    return _measured_columns(rows)


def _stages(report: Report) -> Table:
    """Where the time to first token goes."""
    measured = dict.fromkeys(name for summary in report.methods for name in summary.stages)
    names = [*(name for name in _STAGES if name in measured), *(name for name in measured if name not in _STAGES)]
    rows = [
        [summary.method, *(_stage(summary, name) for name in names), seconds(summary.ttft_s)]
        for summary in report.methods
        if summary.stages
    ]
    columns = ["method", *(name.replace("_", " ") for name in names), "TTFT"]
    return (columns, rows) if rows else ([], [])


def _stage(summary: MethodSummary, name: str) -> str:
    return seconds(summary.stages[name]) if name in summary.stages else UNDEFINED


def _tasks(tasks: Sequence[TaskFigures]) -> Table:
    """Figures of each method on each task."""
    rows = [
        {
            "task": figures.task,
            "method": figures.method,
            "records": str(figures.records),
            "changed": f"{figures.changed:.0%}",
            **{LABELS[metric]: number(mean, ".3f") for metric, mean in figures.means.items()},
        }
        for figures in tasks
    ]
    return _measured_columns(rows)


def _measured_columns(rows: Sequence[dict[str, str]]) -> Table:
    """Columns and rows, without the columns that no method but the first was measured in."""
    names = list(rows[0]) if rows else []
    columns = [name for name in names if any(row[name] != UNDEFINED for row in rows[1:])]
    return columns, [[row[name] for name in columns] for row in rows]


def seconds(value: float) -> str:
    """A time, short."""
    if value < 0.9995:
        return f"{value * 1000:.{0 if value >= 0.01 else 1}f} ms"
    return f"{value:#.3g} s" if value < 99.95 else f"{value:.0f} s"


def number(value: float | None, form: str) -> str:
    """A number, or a dash where it is undefined."""
    return UNDEFINED if value is None else format(value, form)


def kl_words(kl: float | None) -> str:
    """A KL of an answer in words; empty where it was not measured."""
    return "" if kl is None else f"KL {kl:.3f}"


def with_ends(interval: Interval | None, form: str, unit: str = "") -> str:
    """A mean above the ends of its interval."""
    if interval is None:
        return UNDEFINED
    return f"{interval.mean:{form}}{unit}\n[{interval.low:{form}}, {interval.high:{form}}]"


def _changed_answers(report: Report) -> list[Text]:
    """The changed answers of blended prefill with the largest KL, each with full recompute's."""
    from rich.text import Text

    changed = [change for change in report.changed if change.other.method != REUSE]
    if not changed:
        return []
    shown = changed[:SHOWN_CHANGES]
    order = ", the largest KL first" if changed[0].distance else ""
    of_all = f"{len(shown)} of {len(changed)}, all with --json or --html" if len(shown) < len(changed) else "all"
    lines = [Text(f"\nAnswers that differ from {FULL}'s{order} ({of_all})", style="bold")]
    for change in shown:
        lines += [Text(visible(line)) for line in _lines_of(change)]
    return [*lines, Text()]


def _lines_of(change: ChangedAnswer) -> list[str]:
    """One changed answer: where, by how much, and both texts."""
    name = change.other.method
    figures = [name, kl_words(change.other.kl), change.meaning]
    heading = f"{change.other.record_id} ({', '.join(filter(None, figures))}): {change.other.question}"
    full, answer = differing_parts(change.full.answer, change.other.answer)
    texts = {FULL: full, name: answer}
    if change.other.gold:
        texts["gold"] = " | ".join(change.other.gold)
    width = max(map(len, texts))
    return [heading, *(f"  {label:<{width}}  {_one_line(text)}" for label, text in texts.items())]


def _one_line(text: str) -> str:
    line = " ".join(text.split()) or "(empty)"
    return line if len(line) <= _SHOWN_ANSWER else f"{line[:_SHOWN_ANSWER]} ..."


def differing_parts(full: str, other: str) -> tuple[str, str]:
    """Two texts, both without the most of a long beginning that they share."""
    pairs = zip(full, other, strict=False)
    shared = next(
        (place for place, (one_sign, other_sign) in enumerate(pairs) if one_sign != other_sign),
        min(len(full), len(other)),
    )
    start = shared - _BEFORE_DIFFERENCE
    if start <= 0 or max(len(full), len(other)) <= _SHOWN_ANSWER:
        return full, other
    return f"... {full[start:]}", f"... {other[start:]}"


def footnotes_of(report: Report) -> list[str]:
    """What the figures are to be read with: judgements, what columns mean, the machine and the command."""
    few = "too few records for the intervals to mean much" if report.records < _FEW_RECORDS else ""
    gold = _GOLD_LEGEND if any(summary.quality["right"] for summary in report.methods) else ""
    floored = any(summary.floor_ratio for summary in report.methods)
    floor = (
        "x floor: TTFT over the least possible time, its share of full prefill and the loading that this cannot hide"
        if floored
        else ""
    )
    command = f"command: {report.info.command}" if report.info.command else ""
    return list(filter(None, (*report.judged_lines, few, floor, gold, report.info.setting, command)))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Group:
    """A title and a table; the first column and `TEXT_COLUMNS` are text, the others are numbers."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        is_text = index == 0 or column in TEXT_COLUMNS
        grid.add_column(Text(visible(column)), justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        cells = [visible(cell, keep="\n") for cell in row]
        grid.add_row(*map(Text, cells))
    # A title of the table itself would be folded to the width of the table.
    return Group(Text(visible(title), style="bold"), grid)
