"""Estimates against truth: signals and KL of every record at each ratio, and what a policy makes of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blend.errors import PromptError
from blend.eval.metrics import word_f1
from blend.intervals import LEAST_SAMPLE, paired_interval
from blend.quality import RATIOS, Estimator, Quality, Signals, Target
from study.measuring import Setting, Workload

TARGETS, FLIPS = (0.03, 0.05, 0.1), (0.1, 0.2)
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

    from blend.eval.estimates import measure
    from blend.model.decoder import Decoder
    from blend.weights import resolve_model

    torch.set_num_threads(setting.threads)
    done = {(one.model, one.set, one.id) for one in read(out)}
    decoder = Decoder.load(str(resolve_model(setting.model)), name=setting.model, device="cpu", dtype=dtype)
    workloads = [Workload(path, decoder, setting, setting.codecs[0]) for path in setting.sets]
    for index in range(records):
        for workload in workloads:
            for record in workload.records[index : index + 1]:
                if (setting.model, workload.name, record.id) in done:
                    continue
                evaluator = workload.evaluator
                layout = evaluator.template.layout(record.question, record.chunks)
                try:
                    decoder.check_length(layout.rows + setting.max_new_tokens)
                    found = measure(evaluator.blender, layout)
                except PromptError as error:
                    yield f"{record.id} left out: {error}"
                    continue
                if found is None:
                    continue
                f1 = [word_f1(answer, record.answers) for answer in found.answers]
                scored = tuple(one for one in f1 if one is not None) or None
                row = Measured(setting.model, workload.name, record.id, layout.rows, *found[:3], scored)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
                yield f"{row.set} {row.id} ({row.rows} rows): KL {', '.join(f'{kl:.3f}' for kl in row.kl)}"


def read(path: Path) -> list[Measured]:
    """The records of a file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    for row in rows:
        row |= {"signals": tuple(Signals(*one) for one in row["signals"])}
        row |= {name: tuple(row[name]) for name in ("kl", "flips", "f1") if row[name] is not None}
    return [Measured(**row) for row in rows]


def lines(rows: list[Measured]) -> Iterator[str]:
    """Tables: how well estimates tell, and what a target costs and keeps, on records that no fit and no limit saw."""
    counts = Counter(row.set for row in rows)
    if not counts or len(rows) - max(counts.values()) < LEAST_SAMPLE:
        yield f"{len(rows)} records: too few; without any one set, {LEAST_SAMPLE} must be left"
        return
    estimates = held_out(rows)
    truth = np.array([row.kl for row in rows])
    yield f"{len(rows)} records of {len(counts)} sets"
    yield "| rows | mean KL | KL > .3 | flips | Spearman | AUC, KL > .1 |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for place, ratio in enumerate(RATIOS):
        kl, told = truth[:, place], estimates[:, place]
        flips = np.mean([row.flips[place] for row in rows])
        bad = f"{(kl > 0.3).mean():.1%} | {flips:.0%} | {spearman(told, kl):.2f} | {auc(told, kl > BAD):.2f}"
        yield f"| {ratio:.0%} | {kl.mean():.3f} | {bad} |"
    yield ""
    everywhere = ", ".join(f"{ratio:.0%}" for ratio in (*RATIOS, 1.0))
    head = "mean KL | KL > .3 | flips | F1 to answers, less full recompute's | rows"
    yield f"| target | {head} | prompts at {everywhere} | KL of this ratio for all |"
    yield "|---|--:|--:|--:|--:|--:|---|--:|"
    for target in (*map(Quality, TARGETS), *(Quality(flips=share) for share in FLIPS)):
        kl, flips, places = policy(rows, target)
        share = float(np.array([*RATIOS, 1.0])[places].mean())
        stops = ", ".join(f"{(places == place).mean():.0%}" for place in range(len(RATIOS) + 1))
        fixed = np.interp(share, [*RATIOS, 1.0], [*truth.mean(0), 0.0])
        name = f"KL {target.kl}" if target.kl is not None else f"flips {target.flips}"
        kept = f"{kl.mean():.3f} | {(kl > 0.3).mean():.1%} | {flips.mean():.1%} | {f1_gain(rows, places)}"
        yield f"| {name} | {kept} | {share:.1%} | {stops} | {fixed:.3f} |"
    yield ""
    for target in (Quality(0.05), Quality(0.1), *(Quality(flips=share) for share in FLIPS)):
        yield f"{target}: kept in {splits_kept(rows, target)} of {SPLITS} random halves, the other half for the fit"


def _without(rows: list[Measured], name: str) -> Estimator:
    return _estimator([row for row in rows if row.set != name])


def _estimator(rows: list[Measured]) -> Estimator:
    return Estimator(*zip(*((row.signals, row.kl, row.flips) for row in rows), strict=True))


def held_out(rows: list[Measured]) -> Any:
    """Estimates `[records, ratios]`, each by a fit to the other sets."""
    fits = {name: _without(rows, name) for name in {row.set for row in rows}}
    return np.array([[fits[row.set].expected(one) for one in row.signals] for row in rows])


def policy(rows: list[Measured], target: Quality) -> tuple[Any, Any, Any]:
    """KL, flip and place of the ratio of each record, held to a target by a fit to the other sets."""
    targets = {name: Target.of(target, _without(rows, name)) for name in {row.set for row in rows}}
    return _chosen(rows, [targets[row.set] for row in rows])


def f1_gain(rows: list[Measured], places: Any) -> str:
    """Mean F1 at these places less full recompute's, with its 95 % interval, on records that have answers."""
    pairs = [(row.f1[place], row.f1[-1]) for row, place in zip(rows, places, strict=True) if row.f1 is not None]
    if not pairs:
        return "-"
    found = paired_interval(*zip(*pairs, strict=True))
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def splits_kept(rows: list[Measured], target: Quality) -> int:
    """In how many random halves of the records a target is kept that a fit to the other half chose."""
    draw, kept = random.Random(0), 0
    for _ in range(SPLITS):
        mixed = draw.sample(rows, len(rows))
        half = len(rows) // 2
        mine = Target.of(target, _estimator(mixed[:half]))
        kl, flips, _ = _chosen(mixed[half:], [mine] * (len(rows) - half))
        kept += kl.mean() <= target.kl if target.kl is not None else flips.mean() <= (target.flips or 0.0)
    return kept


def _chosen(rows: list[Measured], targets: Sequence[Target]) -> tuple[Any, Any, Any]:
    places = [(*RATIOS, 1.0).index(target.choice(row.signals).ratio) for row, target in zip(rows, targets, strict=True)]
    kl = [(*row.kl, 0.0)[place] for row, place in zip(rows, places, strict=True)]
    flips = [(*row.flips, False)[place] for row, place in zip(rows, places, strict=True)]
    return np.array(kl), np.array(flips), np.array(places)


def spearman(one: Any, other: Any) -> float:
    """Rank correlation."""
    mine, others = (np.argsort(np.argsort(values)).astype(float) for values in (one, other))
    return float(np.corrcoef(mine, others)[0, 1])


def auc(told: Any, bad: Any) -> float:
    """The chance that a bad record has the larger estimate than a good one."""
    if bad.all() or not bad.any():
        return float("nan")
    return float((told[bad][:, None] > told[~bad][None]).mean() + 0.5 * (told[bad][:, None] == told[~bad][None]).mean())
