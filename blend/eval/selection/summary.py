"""What the tables say of a method, and how much of the gap between plain reuse and full recompute it closes on each task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from blend.eval.bootstrap import Interval
from blend.eval.selection import stats
from blend.eval.selection.naming import BASELINE, FULL, REUSE
from blend.eval.selection.row import Row

# A gap in agreement with gold that is narrower says nothing of how much of it is closed.
LEAST_GAP = 0.02


@dataclass(frozen=True)
class SetSummary:
    """A method on one set: records, mean KL, agreement with gold less that of full recompute."""

    name: str
    records: int
    kl: float | None
    difference: Interval | None


@dataclass(frozen=True)
class Summary:
    """A method over all sets; None means undefined.

    kl: mean over sets. to_baseline: that, relative to the baseline's. gold: agreement with gold; difference: less that of full
    recompute. share: of rows computed. speedup: full prefill's TTFT over the method's. selecting: its time over that TTFT.
    """

    method: str
    sets: tuple[SetSummary, ...]
    kl: float | None
    median_kl: float | None
    to_baseline: Interval | None
    top1: float | None
    f1_full: float | None
    gold: float | None
    difference: Interval | None
    share: float
    speedup: float
    selecting: float


@dataclass(frozen=True)
class Gap:
    """Agreement with gold on the records of a task that the method, full recompute and plain reuse all have."""

    task: str
    method: str
    records: int
    full: float
    reuse: float
    mine: float

    @property
    def closed(self) -> float | None:
        """Share of the way from plain reuse to full recompute; None where there is no gap to close."""
        gap = self.full - self.reuse
        return (self.mine - self.reuse) / gap if gap > LEAST_GAP else None


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """A summary of every method, in the order in which the methods first appear."""
    cells, sets = stats.by_method(rows), stats.sets_of(rows)
    return [_summary(method, cells, sets) for method in cells]


def _summary(method: str, cells: Mapping[str, stats.BySet], sets: Sequence[str]) -> Summary:
    mine, full = cells[method], cells.get(FULL, {})
    rows = stats.rows_of(mine, sets)
    return Summary(
        method=method,
        sets=tuple(_set_summary(name, mine, full) for name in sets),
        kl=stats.mean_kl_over_sets(mine),
        median_kl=stats.median_kl(rows),
        to_baseline=stats.ratio_interval(mine, cells.get(BASELINE, {})),
        top1=stats.mean_where_defined(row.top1 for row in rows),
        f1_full=stats.mean_where_defined(row.f1_full for row in rows),
        gold=stats.mean_where_defined(row.gold for row in rows),
        difference=stats.gold_interval(rows, full),
        share=mean(row.share for row in rows),
        speedup=median(row.full_ttft_s / row.ttft_s for row in rows),
        selecting=median(row.select_s / row.full_ttft_s for row in rows),
    )


def _set_summary(name: str, mine: stats.BySet, full: stats.BySet) -> SetSummary:
    rows = stats.rows_of(mine, [name])
    return SetSummary(name, len(rows), stats.mean_kl(rows), stats.gold_interval(rows, full))


def gaps(rows: Iterable[Row]) -> Iterator[Gap]:
    """A gap for each task that the sets name and each method between plain reuse and full recompute."""
    by_task: defaultdict[str, defaultdict[str, dict[tuple[str, str], float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.task and row.gold is not None:
            by_task[row.task][row.method][row.set, row.id] = row.gold
    for task, found in sorted(by_task.items()):
        full, reuse = found.pop(FULL, {}), found.pop(REUSE, {})
        for method, mine in found.items():
            shared = [record for record in mine if record in full and record in reuse]
            if shared:
                means = (mean(source[record] for record in shared) for source in (full, reuse, mine))
                yield Gap(task, method, len(shared), *means)
