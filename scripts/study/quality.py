"""Estimates against truth: signals and KL of every record at each ratio, and what a policy makes of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from _results import markdown
from blend.errors import PromptError
from blend.eval.dataset import Record
from blend.eval.metrics import word_f1
from blend.intervals import LEAST_SAMPLE, paired_interval
from blend.quality import RATIOS, Estimator, Quality, Signals, Target
from study.measuring import Setting, Workload
from study.rows import append_lines, read_lines

TARGETS = (0.03, 0.05, 0.1)
FLIPS = (0.1, 0.2)
SHARES = (*RATIOS, 1.0)
SPLITS = 20
BAD = 0.1  # nats: a record that an estimate should find


class Measured(NamedTuple):
    """A record. f1: to its answers, at each ratio and last of full recompute; None if it has none."""

    model: str
    set: str
    id: str
    rows: int
    signals: tuple[Signals, ...]
    kl: tuple[float, ...]
    flips: tuple[bool, ...]
    f1: tuple[float, ...] | None


def run_quality(setting: Setting, out: Path, records: int, dtype: str) -> Iterator[str]:
    """Measure the first so many records of each set; a line on each. What the file holds is not measured again."""
    import torch

    from blend.model.decoder import Decoder
    from blend.weights import resolve_model

    torch.set_num_threads(setting.threads)
    measured = {(row.model, row.set, row.id) for row in read(out)}
    decoder = Decoder.load(str(resolve_model(setting.model)), name=setting.model, device="cpu", dtype=dtype)
    workloads = [Workload(path, decoder, setting, setting.codecs[0]) for path in setting.sets]
    for index in range(records):
        for workload in workloads:
            for record in workload.records[index : index + 1]:
                if (setting.model, workload.name, record.id) not in measured:
                    yield from _measure(workload, record, setting.max_new_tokens, out)


def _measure(workload: Workload, record: Record, answer_tokens: int, out: Path) -> Iterator[str]:
    """Measure one record, unless its prompt does not fit the model or leaves nothing to estimate."""
    from blend.eval.estimates import measure

    evaluator = workload.evaluator
    layout = evaluator.template.layout(record.question, record.chunks)
    try:
        evaluator.decoder.check_length(layout.rows + answer_tokens)
        estimates = measure(evaluator.blender, layout)
    except PromptError as error:
        yield f"{record.id} left out: {error}"
        return
    if estimates is None:
        return
    f1 = [word_f1(answer, record.answers) for answer in estimates.answers]
    scored = tuple(score for score in f1 if score is not None) or None
    row = Measured(workload.model, workload.name, record.id, layout.rows, *estimates[:3], scored)
    append_lines(out, [row._asdict()])
    yield f"{row.set} {row.id} ({row.rows} rows): KL {', '.join(f'{kl:.3f}' for kl in row.kl)}"


def read(path: Path) -> list[Measured]:
    """The records of a file."""
    rows = read_lines(path)
    for row in rows:
        row["signals"] = tuple(Signals(*signals) for signals in row["signals"])
        row |= {name: tuple(row[name]) for name in ("kl", "flips", "f1") if row[name] is not None}
    return [Measured(**row) for row in rows]


def lines(rows: list[Measured]) -> Iterator[str]:
    """Tables: how well estimates tell, and what a target costs and keeps, on records that no fit and no limit saw."""
    counts = Counter(row.set for row in rows)
    if not counts or len(rows) - max(counts.values()) < LEAST_SAMPLE:
        yield f"{len(rows)} records: too few; without any one set, {LEAST_SAMPLE} must be left"
        return
    yield f"{len(rows)} records of {len(counts)} sets"
    estimates = held_out(rows)
    truth = np.array([row.kl for row in rows])
    flips = np.array([row.flips for row in rows])
    cells = (_estimate_cells(*columns) for columns in zip(RATIOS, estimates.T, truth.T, flips.T, strict=True))
    yield from markdown("rows | mean KL | KL > .3 | flips | Spearman | AUC, KL > .1", cells)
    ratios = ", ".join(f"{ratio:.0%}" for ratio in SHARES)
    heads = "mean KL | KL > .3 | flips | F1 to answers, less full recompute's | rows"
    by_flips = [Quality(flips=share) for share in FLIPS]
    cells = (_target_cells(rows, truth, target) for target in (*map(Quality, TARGETS), *by_flips))
    yield from markdown(f"target | {heads} | prompts at {ratios} | KL of this ratio for all", cells)
    yield ""
    for target in (Quality(0.05), Quality(0.1), *by_flips):
        halves = splits_kept(rows, target)
        yield f"{target}: kept in {halves} of {SPLITS} random halves, the other half for the fit"


def _estimate_cells(ratio: float, estimates: Any, kl: Any, flips: Any) -> list[str]:
    """How well estimates tell the KL at a ratio."""
    rates = [f"{kl.mean():.3f}", f"{(kl > 0.3).mean():.1%}", f"{flips.mean():.0%}"]
    return [f"{ratio:.0%}", *rates, f"{spearman(estimates, kl):.2f}", f"{auc(estimates, kl > BAD):.2f}"]


def _target_cells(rows: list[Measured], truth: Any, target: Quality) -> list[str]:
    """What a target costs and keeps."""
    kl, flips, places = policy(rows, target)
    share = float(np.array(SHARES)[places].mean())
    stops = ", ".join(f"{(places == place).mean():.0%}" for place in range(len(SHARES)))
    fixed = np.interp(share, SHARES, [*truth.mean(0), 0.0])
    name = f"KL {target.kl}" if target.kl is not None else f"flips {target.flips}"
    rates = [f"{kl.mean():.3f}", f"{(kl > 0.3).mean():.1%}", f"{flips.mean():.1%}", f1_gain(rows, places)]
    return [name, *rates, f"{share:.1%}", stops, f"{fixed:.3f}"]


def _without(rows: list[Measured], name: str) -> Estimator:
    return _estimator([row for row in rows if row.set != name])


def _estimator(rows: list[Measured]) -> Estimator:
    return Estimator(*zip(*((row.signals, row.kl, row.flips) for row in rows), strict=True))


def held_out(rows: list[Measured]) -> Any:
    """Estimates `[records, ratios]`, each by a fit to the other sets."""
    fits = {name: _without(rows, name) for name in {row.set for row in rows}}
    return np.array([list(map(fits[row.set].expected, row.signals)) for row in rows])


def policy(rows: list[Measured], target: Quality) -> tuple[Any, Any, Any]:
    """KL, flip and place of the ratio of each record, held to a target by a fit to the other sets."""
    targets = {name: Target.of(target, _without(rows, name)) for name in {row.set for row in rows}}
    return _chosen(rows, [targets[row.set] for row in rows])


def f1_gain(rows: list[Measured], places: Any) -> str:
    """Mean F1 at these places less full recompute's, with its 95 % interval, on records that have answers."""
    pairs = [(row.f1[place], row.f1[-1]) for row, place in zip(rows, places, strict=True) if row.f1 is not None]
    if not pairs:
        return "-"
    interval = paired_interval(*zip(*pairs, strict=True))
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def splits_kept(rows: list[Measured], target: Quality) -> int:
    """In how many random halves of the records a target is kept that a fit to the other half chose."""
    draw = random.Random(0)
    half = len(rows) // 2
    count = 0
    for _ in range(SPLITS):
        mixed = draw.sample(rows, len(rows))
        fitted = Target.of(target, _estimator(mixed[:half]))
        kl, flips, _ = _chosen(mixed[half:], [fitted] * (len(rows) - half))
        if target.kl is not None:
            count += kl.mean() <= target.kl
        else:
            count += flips.mean() <= (target.flips or 0.0)
    return count


def _chosen(rows: list[Measured], targets: Sequence[Target]) -> tuple[Any, Any, Any]:
    places = [SHARES.index(target.choice(row.signals).ratio) for row, target in zip(rows, targets, strict=True)]
    kl = [(*row.kl, 0.0)[place] for row, place in zip(rows, places, strict=True)]
    flips = [(*row.flips, False)[place] for row, place in zip(rows, places, strict=True)]
    return np.array(kl), np.array(flips), np.array(places)


def spearman(estimates: Any, truth: Any) -> float:
    """Rank correlation."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (estimates, truth)], dtype=float)
    return float(np.corrcoef(ranks)[0, 1])


def auc(estimates: Any, bad: Any) -> float:
    """The chance that a bad record has the larger estimate than a good one."""
    if bad.all() or not bad.any():
        return float("nan")
    differences = estimates[bad][:, None] - estimates[~bad][None]
    return float((differences > 0).mean() + 0.5 * (differences == 0).mean())
