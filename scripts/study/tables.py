"""Tables of a study's rows: means over sets with bootstrap intervals, against full recompute and against a baseline.

Intervals are 95 % percentiles over resampled records. A mean over sets is the mean of the sets' means, so that a large set
does not drown a small one. The draws depend on the order of sets and records alone: the same rows give the same intervals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from _results import Results, Row, grouped, markdown
from blend.compare import ComparedAnswer, compare
from blend.errors import ConfigError, DatasetError
from blend.intervals import Interval, paired_interval

FULL = "full"  # what every method is judged by, under the evaluator's name of it
BASELINE = "published"  # HKVD on V, squared L2, layer 1, bottom-right mask, whole question recomputed
BySet = Mapping[str, Mapping[str, Row]]  # set -> id of a record -> row
RESAMPLES = 2000
COLUMNS = "median KL | top-1 | F1 to full's answer | agreement with gold | difference to full | rows | TTFT | selecting"


def show(results: Results, methods: Sequence[str], baseline: str) -> Iterator[str]:
    """The lines to print, a model at a time.

    methods: these, on the records that have all of them; none means all. Raises `DatasetError` without results, `ConfigError`
    where no record has all methods.
    """
    by_model = grouped(results.rows("rows"), "model")
    if not by_model:
        raise DatasetError(f"{results.file}: holds no results; name a file that bench_selection wrote")
    for (model,), rows in by_model.items():
        compared = paired(rows, methods, baseline) if methods else rows
        yield from ("", model, *tables(compared, methods, baseline))


def tables(rows: Sequence[Row], methods: Sequence[str] = (), baseline: str = BASELINE) -> Iterator[str]:
    """Markdown: KL a set, gold a set, changed answers, and everything over the sets, after full recompute.

    methods: these, whose rows must be paired; none means all, from the lowest KL.
    """
    measured = by_method(rows)
    full = measured[FULL]
    sets = sorted({row["set"] for row in rows})
    chosen = methods or sorted(measured.keys() - {FULL}, key=lambda name: kl_over_sets(measured[name]) or 0.0)
    heads = " | ".join(f"{name} ({len(full.get(name, {}))})" for name in sets)
    cells = ([name, *(number(kl_over_sets({s: measured[name].get(s, {})})) for s in sets)] for name in chosen)
    yield from markdown(f"KL | {heads}", cells)
    cells = (
        [name, *(signed(gold_interval(measured[name].get(s, {}).values(), full)) for s in sets)] for name in chosen
    )
    yield from markdown(f"gold, difference to full | {heads}", cells)
    changed = [[name, *_changes(measured[name], full)] for name in chosen]
    if any(shares != "-" for _, shares, _ in changed):
        yield from markdown("answers | changed | what the changes mean", changed)
    cells = ([name, *_cells(measured[name], full, measured.get(baseline, {}))] for name in (FULL, *chosen))
    yield from markdown(f"method | KL, mean over sets | to {baseline} | {COLUMNS}", cells)


def _changes(by_set: BySet, full: BySet) -> tuple[str, str]:
    """How many answers differ from full recompute's on the same records, and what that means."""
    answered = [
        ComparedAnswer(row["answer"] != of_full["answer"], row["kl"], row["right"], of_full["right"])
        for row, of_full in _with_full(_rows(by_set), full)
        if None not in (row["answer"], of_full["answer"])
    ]
    if not answered:
        return "-", "-"
    share, _, meanings = compare(answered).flips_in_words.partition("; of these ")
    return share, meanings or "-"


def _cells(by_set: BySet, full: BySet, base: BySet) -> list[str]:
    """Everything about a method over all sets."""
    rows = _rows(by_set)
    kl = [row["kl"] for row in rows if row["kl"] is not None]
    to_baseline = ratio_interval(by_set, base)
    ratio = f"{to_baseline.mean:.2f} [{to_baseline.low:.2f},{to_baseline.high:.2f}]" if to_baseline else "-"
    return [
        *(number(kl_over_sets(by_set)), ratio, number(median(kl) if kl else None)),
        *(number(defined_mean(row[name] for row in rows), 2) for name in ("top1", "f1_full", "f1")),
        signed(gold_interval(rows, full)),
        *(
            f"{mean(row['share'] for row in rows):.0%}",
            f"{median(row['full_ttft_s'] / row['ttft_s'] for row in rows):.1f}x",
        ),
        f"{median(row['select_s'] / row['full_ttft_s'] for row in rows):.1%}",
    ]


def number(value: float | None, digits: int = 3) -> str:
    """A number or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def signed(interval: Interval | None) -> str:
    """A difference with its interval, or a dash."""
    return f"{interval.mean:+.3f} [{interval.low:+.2f}, {interval.high:+.2f}]" if interval else "-"


def by_method(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, Row]]]:
    """Method -> set -> id of a record -> row, each in the order in which it first appears."""
    cells: defaultdict[str, defaultdict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        cells[row["method"]][row["set"]][row["id"]] = row
    return {method: dict(sets) for method, sets in cells.items()}


def paired(rows: Iterable[Row], methods: Sequence[str], baseline: str = BASELINE) -> list[Row]:
    """Rows of these methods, of full recompute and of the baseline on the records that all of them have, sets in order.

    Raises `ConfigError` where no record has all of them.
    """
    names = {FULL, baseline, *methods}
    records = sorted(grouped(rows, "set", "id").items(), key=lambda record: record[0][0])
    complete = [same for _, same in records if names <= {row["method"] for row in same}]
    if not complete:
        raise ConfigError(f"no record has {FULL}, {baseline} and all of {', '.join(methods)}; measure what is missing")
    return [row for same in complete for row in same if row["method"] in names]


def defined_mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is not None; None where nothing is."""
    defined = [value for value in values if value is not None]
    return mean(defined) if defined else None


def kl_over_sets(by_set: BySet) -> float | None:
    """Mean of the sets' mean KL."""
    return defined_mean(defined_mean(row["kl"] for row in records.values()) for records in by_set.values())


def gold_interval(rows: Iterable[Row], full: BySet) -> Interval | None:
    """Word F1 to gold answers of these rows less that of full recompute on the same records; None where they share none."""
    pairs = [(row["f1"], full_row["f1"]) for row, full_row in _with_full(rows, full)]
    defined = [(score, full_score) for score, full_score in pairs if score is not None and full_score is not None]
    if not defined:
        return None
    return paired_interval(*map(list, zip(*defined, strict=True)), resamples=RESAMPLES)


def ratio_interval(by_set: BySet, base: BySet) -> Interval | None:
    """Mean KL over sets relative to the baseline's on the same records; None where they share no record."""
    every = [_kl_pairs(records, base.get(name, {})) for name, records in by_set.items()]
    samples = [pairs for pairs in every if len(pairs)]
    if not samples:
        return None
    generator = np.random.default_rng(0)

    def drawn() -> float:
        return _ratio_of_means([pairs[generator.integers(0, len(pairs), len(pairs))] for pairs in samples])

    low, high = np.percentile([drawn() for _ in range(RESAMPLES)], [2.5, 97.5])
    return Interval(_ratio_of_means(samples), float(low), float(high))


def _kl_pairs(records: Mapping[str, Row], base: Mapping[str, Row]) -> NDArray[np.float64]:
    """KL of the method and of the baseline, `[records, 2]`."""
    pairs = [(row["kl"], base[i]["kl"]) for i, row in records.items() if i in base]
    return np.array([pair for pair in pairs if None not in pair], dtype=np.float64)


def _ratio_of_means(samples: Sequence[NDArray[np.float64]]) -> float:
    kl, base = np.mean([sample.mean(0) for sample in samples], axis=0)
    return float(kl / base)


def _rows(by_set: BySet) -> list[Row]:
    return [row for name in sorted(by_set) for row in by_set[name].values()]


def _with_full(rows: Iterable[Row], full: BySet) -> Iterator[tuple[Row, Row]]:
    """Rows with those of full recompute of the same record."""
    for row in rows:
        if row["id"] in full.get(row["set"], {}):
            yield row, full[row["set"]][row["id"]]
