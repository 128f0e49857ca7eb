"""Show a file of results: tables for a terminal or a document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from _results import markdown
from blend.errors import DatasetError
from blend.intervals import Interval
from study.methods import BASELINE, FULL
from study.rows import Row, read_rows
from study.stats import Summary, paired, summaries

_COLUMNS = (
    "median KL | top-1 | F1 to full's answer | agreement with gold | difference to full | rows | TTFT | selecting"
)


def tables(rows: Sequence[Row], methods: Sequence[str] = (), baseline: str = BASELINE) -> Iterator[str]:
    """Markdown: KL a set, gold a set, changed answers, and everything over the sets, after full recompute.

    methods: these, whose rows must be paired (`stats.paired`); none means all, from the lowest KL.
    """
    by_method = {summary.method: summary for summary in summaries(rows, baseline)}
    full = by_method.pop(FULL)
    chosen = [by_method[name] for name in methods]
    if not methods:
        chosen = sorted(by_method.values(), key=lambda summary: summary.kl or 0.0)
    heads = " | ".join(f"{records.name} ({records.records})" for records in full.sets)
    yield from markdown(f"KL | {heads}", ([s.method, *(number(records.kl) for records in s.sets)] for s in chosen))
    cells = ([s.method, *(_difference(records.difference) for records in s.sets)] for s in chosen)
    yield from markdown(f"gold, difference to full | {heads}", cells)
    if any(summary.comparison for summary in chosen):
        yield from markdown("answers | changed | what the changes mean", map(_changes, chosen))
    yield from markdown(f"method | KL, mean over sets | to {baseline} | {_COLUMNS}", map(_cells, [full, *chosen]))


def _changes(summary: Summary) -> list[str]:
    comparison = summary.comparison
    if comparison is None:
        return [summary.method, "-", "-"]
    meanings = ", ".join(f"{count} {meaning}" for meaning, count in comparison.meanings.in_words.items())
    return [summary.method, comparison.share_in_words, meanings or "-"]


def number(value: float | None, digits: int = 3) -> str:
    """A number or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(summary: Summary) -> list[str]:
    return [
        *(summary.method, number(summary.kl), _ratio(summary.to_baseline), number(summary.median_kl)),
        *(number(summary.top1, 2), number(summary.f1_full, 2), number(summary.gold, 2)),
        *(_difference(summary.difference), f"{summary.share:.0%}", f"{summary.speedup:.1f}x"),
        f"{summary.selecting:.1%}",
    ]


def _ratio(interval: Interval | None) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f},{interval.high:.2f}]" if interval else "-"


def _difference(interval: Interval | None) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.2f}, {interval.high:+.2f}]" if interval else "-"


def show(path: Path, methods: Sequence[str], baseline: str) -> Iterator[str]:
    """The lines to print, a model at a time.

    methods: these, on the records that have all of them; none means all. Raises `DatasetError` for a file without results,
    `ConfigError` where no record has all methods, and as `read_rows` does.
    """
    by_model: defaultdict[str, list[Row]] = defaultdict(list)
    for row in read_rows(path):
        by_model[row.model].append(row)
    if not by_model:
        raise DatasetError(f"{path}: holds no results; name a file that bench_selection wrote")
    for model, rows in by_model.items():
        compared = paired(rows, methods, baseline) if methods else rows
        yield from ("", model, *tables(compared, methods, baseline))
