"""Tables of a study's rows, against full recompute and a baseline; intervals are of 95 %, over resampled records."""

from __future__ import annotations

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
GRADUAL = "published, gradual"  # the same, filtered gradually
BASELINE_RATIO = 0.15  # of the rows that both recompute; at other ratios their names end in the ratio
RESAMPLES = 2000
COLUMNS = "median KL | top-1 | F1 to full's answer | agreement with gold | difference to full | rows | TTFT | selecting"


def show(results: Results, methods: Sequence[str], baseline: str) -> Iterator[str]:
    """The lines to print, a model at a time. methods: these, on the records that have all of them; none means all."""
    by_model = grouped(results.rows("rows"), "model")
    if not by_model:
        raise DatasetError(f"{results.file}: holds no results; name a file that bench_selection wrote")
    for (model,), rows in by_model.items():
        compared = paired(rows, methods, baseline) if methods else rows
        yield from ("", model, *tables(compared, methods, baseline))


def paired(rows: Iterable[Row], methods: Sequence[str], baseline: str = BASELINE) -> list[Row]:
    """Rows of these methods, of full recompute and of the baseline on the records that all of them have."""
    names = {FULL, baseline, *methods}
    complete = [same for same in grouped(rows, "set", "id").values() if names <= {row["method"] for row in same}]
    if not complete:
        raise ConfigError(f"no record has {FULL}, {baseline} and all of {', '.join(methods)}; measure what is missing")
    return [row for same in complete for row in same if row["method"] in names]


def tables(rows: Iterable[Row], methods: Sequence[str] = (), baseline: str = BASELINE) -> Iterator[str]:
    """Markdown, of these methods or of all: KL a set, gold a set, kinds, changed answers, and everything over the sets."""
    in_order = sorted(rows, key=lambda row: str(row["set"]))
    measured = {name: of_method for (name,), of_method in grouped(in_order, "method").items()}
    full = measured[FULL]
    chosen = methods or sorted(measured.keys() - {FULL}, key=lambda name: kl_over_sets(measured[name]) or 0.0)
    sets = grouped(full, "set")
    by_set = {name: grouped(measured[name], "set") for name in chosen}
    heads = " | ".join(f"{name} ({len(records)})" for (name,), records in sets.items())
    cells = [[name, *(number(kl_over_sets(by_set[name].get(key, []))) for key in sets)] for name in chosen]
    yield from markdown(f"KL | {heads}", cells)
    cells = [[name, *(signed(gold_interval(by_set[name].get(key, []), full)) for key in sets)] for name in chosen]
    yield from markdown(f"gold, difference to full | {heads}", cells)
    yield from kinds_table(measured, (FULL, *chosen))
    yield from markdown(
        "answers | changed, and what the changes mean", ([name, changes(measured[name], full)] for name in chosen)
    )
    cells = [[name, *over_sets(measured[name], full, measured.get(baseline, []))] for name in (FULL, *chosen)]
    yield from markdown(f"method | KL, mean over sets | to {baseline} | {COLUMNS}", cells)


def kinds_table(measured: Mapping[str, Sequence[Row]], names: Sequence[str]) -> Iterator[str]:
    """How many answers name a gold answer, by the records' kind; nothing where all are of one kind."""
    kinds = grouped(measured[FULL], "kind") if all("kind" in row for row in measured[FULL]) else {}
    if len(kinds) < 2:
        return
    heads = " | ".join(f"{kind or 'no kind'} ({len(records)})" for (kind,), records in kinds.items())
    cells = []
    for name in names:
        of_kind = grouped(measured[name], "kind")
        cells.append([name, *(sum(bool(row["right"]) for row in of_kind.get(kind, [])) for kind in kinds)])
    yield from markdown(f"right answers | {heads}", cells)


def changes(rows: Sequence[Row], full: Sequence[Row]) -> str | None:
    """How many answers differ from full recompute's on the same records, and what that means."""
    answered = [
        ComparedAnswer(row["answer"] != of_full["answer"], row["kl"], row["right"], of_full["right"])
        for row, of_full in with_record(rows, full)
        if None not in (row["answer"], of_full["answer"])
    ]
    return compare(answered).flips_in_words if answered else None


def over_sets(rows: Sequence[Row], full: Sequence[Row], base: Sequence[Row]) -> list[str | None]:
    """Everything about a method over all sets."""
    kl = [row["kl"] for row in rows if row["kl"] is not None]
    ratio = ratio_interval(rows, base)
    timed = [row for row in rows if row["ttft_s"] is not None]
    return [
        number(kl_over_sets(rows)),
        None if ratio is None else f"{ratio.mean:.2f} [{ratio.low:.2f},{ratio.high:.2f}]",
        number(median(kl) if kl else None),
        *(number(defined_mean(row[name] for row in rows), 2) for name in ("top1", "f1_full")),
        number(defined_mean(map(agreement, rows)), 2),
        signed(gold_interval(rows, full)),
        f"{mean(row['share'] for row in rows):.0%}",
        f"{median(row['full_ttft_s'] / row['ttft_s'] for row in timed):.1f}x" if timed else None,
        f"{median(row['select_s'] / row['full_ttft_s'] for row in timed):.1%}" if timed else None,
    ]


def number(value: float | None, digits: int = 3) -> str | None:
    """A number, if there is one."""
    return None if value is None else f"{value:.{digits}f}"


def signed(interval: Interval | None) -> str | None:
    """A difference with its interval, if there is one."""
    return None if interval is None else f"{interval.mean:+.3f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def defined_mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is not None; None where nothing is."""
    defined = [value for value in values if value is not None]
    return mean(defined) if defined else None


def kl_over_sets(rows: Iterable[Row]) -> float | None:
    """Mean of the sets' mean KL."""
    return defined_mean(defined_mean(row["kl"] for row in records) for records in grouped(rows, "set").values())


def agreement(row: Row) -> float | None:
    """Agreement with gold answers: ROUGE-L where it was measured, which is where they are long, else word F1."""
    rouge_l: float | None = row.get("rouge_l")
    return row["f1"] if rouge_l is None else rouge_l


def gold_interval(rows: Iterable[Row], full: Iterable[Row]) -> Interval | None:
    """Agreement with gold of these rows less that of full recompute on the same records; None where they share none."""
    pairs = [(agreement(row), agreement(of_full)) for row, of_full in with_record(rows, full)]
    defined = [pair for pair in pairs if None not in pair]
    return paired_interval(*map(list, zip(*defined, strict=True)), resamples=RESAMPLES) if defined else None


def kl_interval(rows: Iterable[Row]) -> Interval:
    """Mean of the sets' mean KL, with its interval over resampled records."""
    samples = []
    for records in grouped(rows, "set").values():
        if defined := [row["kl"] for row in records if row["kl"] is not None]:
            samples.append(np.array(defined, dtype=np.float64))
    generator = np.random.default_rng(0)
    draws = np.zeros(RESAMPLES)
    for sample in samples:
        draws += sample[generator.integers(0, len(sample), (RESAMPLES, len(sample)))].mean(1) / len(samples)
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(float(np.mean([sample.mean() for sample in samples])), float(low), float(high))


def ratio_interval(rows: Iterable[Row], base: Sequence[Row]) -> Interval | None:
    """Mean KL over sets relative to the baseline's on the same records; None where they share no record."""
    samples = []
    for records in grouped(rows, "set").values():
        pairs = [(row["kl"], of_base["kl"]) for row, of_base in with_record(records, base)]
        if defined := [pair for pair in pairs if None not in pair]:
            samples.append(np.array(defined, dtype=np.float64))
    if not samples:
        return None
    generator = np.random.default_rng(0)

    def ratio_of_means(drawn: Sequence[NDArray[np.float64]]) -> float:
        kl, of_base = np.mean([pairs.mean(0) for pairs in drawn], axis=0)
        return float(kl / of_base)

    def draw(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        return pairs[generator.integers(0, len(pairs), len(pairs))]

    draws = [ratio_of_means(list(map(draw, samples))) for _ in range(RESAMPLES)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(ratio_of_means(samples), float(low), float(high))


def with_record(rows: Iterable[Row], others: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Rows with the other of the same record."""
    by_record = {(row["set"], row["id"]): row for row in others}
    pairs = [(row, by_record.get((row["set"], row["id"]))) for row in rows]
    return [(row, other) for row, other in pairs if other is not None]
