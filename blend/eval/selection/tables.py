"""The tables, line by line: fixed columns for a terminal, Markdown for a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from blend.eval.bootstrap import Interval
from blend.eval.selection.naming import BASELINE, FULL
from blend.eval.selection.row import Row
from blend.eval.selection.summary import Gap, Summary, gaps, summaries

_COLUMNS = (
    f"{'mean KL':>9}{'median':>8}{f'to {BASELINE}':>20}{'top-1':>6}{'F1=full':>8}{'gold - full':>22}"
    f"{'rows':>7}{'TTFT x':>7}{'select':>7}"
)
_MARKDOWN_COLUMNS = (
    *("method", "KL, mean over sets", f"to {BASELINE}", "median KL", "top-1", "F1 to full's answer"),
    *("agreement with gold", "difference to full", "rows", "TTFT", "selecting"),
)


def text_table(rows: Sequence[Row]) -> Iterator[str]:
    """A line a method, from the lowest KL: its KL a set, then everything over the sets."""
    ranked = sorted(summaries(rows), key=lambda summary: summary.kl or 0.0)
    heads = "".join(f"{one.name[:12]:>13}" for one in ranked[0].sets) if ranked else ""
    yield f"{'method':<18}{heads}{_COLUMNS}"
    yield from map(_text_line, ranked)


def gap_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A line a task and method: agreement with gold, and how much of the gap from plain reuse to full is closed."""
    for gap in gaps(rows):
        yield (
            f"{gap.task:<18} {gap.method:<22} n={gap.records:<4} full {gap.full:.2f}  reuse {gap.reuse:.2f}  "
            f"it {gap.mine:.2f}  {_closed(gap)}"
        )


def markdown_tables(rows: Sequence[Row], methods: Sequence[str]) -> Iterator[str]:
    """KL a set, gold a set, and everything over the sets, of these methods; their rows must be paired (`stats.paired`)."""
    found = {summary.method: summary for summary in summaries(rows)}
    chosen = [found[name] for name in methods]
    heads = [f"{one.name} ({one.records})" for one in found[FULL].sets]
    yield from _markdown(["KL", *heads], ([s.method, *(number(one.kl) for one in s.sets)] for s in chosen))
    cells = ([s.method, *(_difference(one.difference) for one in s.sets)] for s in chosen)
    yield from _markdown(["gold, difference to full", *heads], cells)
    yield from _markdown(_MARKDOWN_COLUMNS, map(_markdown_cells, [found[FULL], *chosen]))


def number(value: float | None, digits: int = 3) -> str:
    """A number or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _text_line(summary: Summary) -> str:
    return (
        f"{summary.method:<18}"
        + "".join(f"{number(one.kl):>8} n={one.records:<3}" for one in summary.sets)
        + f"{number(summary.kl):>9}{number(summary.median_kl):>8}{_ratio(summary.to_baseline):>20}"
        + f"{number(summary.top1, 2):>6}{number(summary.f1_full, 2):>8}{_difference(summary.difference):>22}"
        + f"{summary.share:>7.1%}{summary.speedup:>7.1f}{summary.selecting:>7.1%}"
    )


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table after an empty line, its first column to the left."""
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'--:|' * (len(heads) - 1)}"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def _markdown_cells(summary: Summary) -> list[str]:
    return [
        *(summary.method, number(summary.kl), _ratio(summary.to_baseline), number(summary.median_kl)),
        *(number(summary.top1, 2), number(summary.f1_full, 2), number(summary.gold, 2)),
        *(_difference(summary.difference), f"{summary.share:.0%}", f"{summary.speedup:.1f}x"),
        f"{summary.selecting:.1%}",
    ]


def _closed(gap: Gap) -> str:
    return "no gap to close" if gap.closed is None else f"{gap.closed:>6.0%} of the gap"


def _ratio(interval: Interval | None) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f},{interval.high:.2f}]" if interval else "-"


def _difference(interval: Interval | None) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.2f}, {interval.high:+.2f}]" if interval else "-"
