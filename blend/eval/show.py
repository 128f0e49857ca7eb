"""Show a report: tables of 100 columns for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from blend.eval.report import FULL, Report
from blend.intervals import LEVEL, Interval
from blend.limits import visible

if TYPE_CHECKING:
    from rich.console import Group


WIDTH = 100
UNDEFINED = "-"
_FEW_RECORDS = 10  # below this an interval of resampled records says little


def render_report(report: Report) -> Group:
    """All tables as one rich renderable, for a console of any width from about 90 columns."""
    from rich.console import Group
    from rich.text import Text

    changes = [Text(visible(f"{summary.method}: {summary.changes}")) for summary in report.methods[1:]]
    footnotes = [Text(visible(line), style="dim") for line in _footnotes(report)]
    return Group(_overview(report), *changes, *footnotes)


def _overview(report: Report) -> Group:
    """The numbers of each method; a column that was not measured is left out."""
    rows = []
    for summary in report.methods:
        row = {
            "method": summary.method,
            "TTFT": f"{summary.ttft_s:.3g} s",
            "speed-up": _with_ends(summary.speedup, ".2f", "x"),
            "rows": f"{summary.rows_share:.1%}",
            "F1": _mean(summary.quality["f1"]),
            f"less {FULL}'s": _with_ends(summary.f1_difference, "+.3f"),
            "KL": _with_ends(summary.quality["kl"], ".3f"),
            "top-1": _mean(summary.quality["top1"]),
        }
        rows.append(row)
    columns = [name for name in rows[0] if any(row[name] != UNDEFINED for row in rows[1:])]
    title = f"{report.title}, with {LEVEL:.0%} intervals"
    return table(title, columns, [[row[name] for name in columns] for row in rows])


def _mean(interval: Interval | None) -> str:
    return UNDEFINED if interval is None else f"{interval.mean:.3f}"


def _with_ends(interval: Interval | None, form: str, unit: str = "") -> str:
    if interval is None:
        return UNDEFINED
    return f"{interval.mean:{form}}{unit}\n[{interval.low:{form}}, {interval.high:{form}}]"


def _footnotes(report: Report) -> list[str]:
    few = "too few records for the intervals to mean much" if report.records < _FEW_RECORDS else ""
    command = f"command: {report.info.command}" if report.info.command else ""
    return list(filter(None, (*report.judged_lines.values(), few, report.info.setting, command)))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Group:
    """A title and a table; the first column is text, the others are numbers."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        grid.add_column(Text(visible(column)), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        cells = [visible(cell, keep="\n") for cell in row]
        grid.add_row(*map(Text, cells))
    # A title of the table itself would be folded to the width of the table.
    return Group(Text(visible(title), style="bold"), grid)
