"""Estimates against truth: signals and KL of every record, pass by pass, and what a policy makes of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blend.errors import PromptError
from blend.quality import LEAST_PROMPTS, RATIOS, Calibration, Quality, Signals
from study.measuring import Setting, Workload

TARGETS = (0.03, 0.05, 0.1)
_UNKNOWN = (False,) * len(RATIOS)  # of files without them
BAD = 0.1  # nats: a record that an estimate should find


class Measured(NamedTuple):
    """A record."""

    model: str
    set: str
    id: str
    rows: int
    signals: tuple[Signals, ...]
    kl: tuple[float, ...]
    flips: tuple[bool, ...]


def run_quality(setting: Setting, out: Path, records: int, dtype: str) -> Iterator[str]:
    """Measure the first so many records of each set; a line on each. What the file holds is not measured again."""
    import torch

    from blend.eval.quality import measure
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
                row = Measured(setting.model, workload.name, record.id, layout.rows, *found)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
                yield f"{row.set} {row.id} ({row.rows} rows): KL {', '.join(f'{kl:.3f}' for kl in row.kl)}"


def read(path: Path) -> list[Measured]:
    """The records of a file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return [
        Measured(
            **{
                **row,
                "signals": tuple(Signals(*one) for one in row["signals"]),
                "kl": tuple(row["kl"]),
                "flips": tuple(row.get("flips", _UNKNOWN)),
            }
        )
        for row in rows
    ]


def lines(rows: list[Measured]) -> Iterator[str]:
    """Tables: how well estimates tell, and what a target costs and keeps, on records that no fit and no limit saw."""
    counts = Counter(row.set for row in rows)
    if not counts or len(rows) - max(counts.values()) < LEAST_PROMPTS:
        yield f"{len(rows)} records: too few; without any one set, {LEAST_PROMPTS} must be left"
        return
    estimates = held_out(rows)
    truth = np.array([row.kl for row in rows])
    yield f"{len(rows)} records of {len(counts)} sets"
    yield "| after | mean KL | KL > .3 | Spearman | AUC, KL > .1 |"
    yield "|---|--:|--:|--:|--:|"
    for place, ratio in enumerate(RATIOS):
        kl, told = truth[:, place], estimates[:, place]
        bad = f"{(kl > 0.3).mean():.1%} | {spearman(told, kl):.2f} | {auc(told, kl > BAD):.2f}"
        yield f"| {ratio:.0%} | {kl.mean():.3f} | {bad} |"
    yield ""
    yield "| target | mean KL | KL > .3 | rows | stopped after 5, 15, 30 %, all | fixed ratio of these rows |"
    yield "|--:|--:|--:|--:|---|--:|"
    for target in TARGETS:
        kl, shares, places = policy(rows, target)
        rows_share = float(shares.mean())
        stops = ", ".join(f"{(places == place).mean():.0%}" for place in range(len(RATIOS) + 1))
        fixed = np.interp(min(rows_share, RATIOS[-1]), RATIOS, truth.mean(0))
        yield f"| {target} | {kl.mean():.3f} | {(kl > 0.3).mean():.1%} | {rows_share:.1%} | {stops} | {fixed:.3f} |"


def _without(rows: list[Measured], name: str) -> Calibration:
    others = [row for row in rows if row.set != name]
    return Calibration(*zip(*((row.signals, row.kl, row.flips) for row in others), strict=True))


def held_out(rows: list[Measured]) -> Any:
    """Estimates `[records, ratios]`, each by a calibration on the other sets."""
    fits = {name: _without(rows, name) for name in {row.set for row in rows}}
    return np.array([[fits[row.set].expected(i, one) for i, one in enumerate(row.signals)] for row in rows])


def policy(rows: list[Measured], target: float) -> tuple[Any, Any, Any]:
    """KL, share of rows and last pass of each record, held to a target by a calibration on the other sets."""
    fits = {name: _without(rows, name) for name in {row.set for row in rows}}
    limits = {name: fit.limit(Quality(target)) for name, fit in fits.items()}
    estimates = held_out(rows)
    found = []
    for row, told in zip(rows, estimates, strict=True):
        place = next((i for i in range(len(RATIOS)) if told[i] <= limits[row.set]), len(RATIOS))
        found.append(((*row.kl, 0.0)[place], (*RATIOS, RATIOS[-1] + 1)[place], place))
    kl, shares, places = (np.array(column) for column in zip(*found, strict=True))
    return kl, shares, places


def spearman(one: Any, other: Any) -> float:
    """Rank correlation."""
    mine, others = (np.argsort(np.argsort(values)).astype(float) for values in (one, other))
    return float(np.corrcoef(mine, others)[0, 1])


def auc(told: Any, bad: Any) -> float:
    """The chance that a bad record has the larger estimate than a good one."""
    if bad.all() or not bad.any():
        return float("nan")
    return float((told[bad][:, None] > told[~bad][None]).mean() + 0.5 * (told[bad][:, None] == told[~bad][None]).mean())
