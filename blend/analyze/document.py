"""The whole analysis as one JSON value; the page shows this and nothing else. What is undefined is null."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from blend.analyze.deviation import QUANTILES, TOP
from blend.analyze.numbers import Numbers, mean_numbers
from blend.analyze.places import END_BINS, HIGH, START_BINS, bin_names
from blend.analyze.readings import readings
from blend.analyze.sparsity import MASSES, THRESHOLDS
from blend.analyze.tokens import KINDS
from blend.config import BlendConfig
from blend.eval.report.output import write_whole
from blend.visible import json_text

FORMAT = 1
_DIGITS = 5


@dataclass(frozen=True)
class Analyzed:
    """One prompt: its numbers, and what `prompt_document` made of it (None where only the numbers are kept).

    mapped: whether the blend applied a KV correction.
    """

    id: str
    question: str
    numbers: Numbers
    mapped: bool
    view: Mapping[str, object] | None


@dataclass(frozen=True)
class RunFacts:
    """What was run. notes: lines that a reader must know, such as records left out."""

    model: str
    workload: str
    command: str
    config: BlendConfig
    notes: tuple[str, ...] = ()


def analysis_document(prompts: Sequence[Analyzed], facts: RunFacts) -> dict[str, Any]:
    """JSON value of an analysis, without NaN or infinity, numbers rounded to five digits.

    `mean` holds the numbers averaged over the prompts (see `Numbers` for shapes), `records` the head figures of each,
    `prompts` the views of those that have one, `readings` a sentence for each picture of `mean`.
    """
    mean = mean_numbers([prompt.numbers for prompt in prompts])
    document = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": facts.model,
        "workload": facts.workload,
        "command": facts.command,
        "config": facts.config.plain(),
        "notes": list(facts.notes),
        "axes": {
            "thresholds": THRESHOLDS,
            "masses": MASSES,
            "quantiles": QUANTILES,
            "top": TOP,
            "high": HIGH,
            "starts": bin_names(START_BINS),
            "ends": bin_names(END_BINS),
            "kinds": KINDS,
        },
        "mean": asdict(mean),
        "readings": readings(mean),
        "records": [
            {"id": p.id, "question": p.question, "mapped": p.mapped, **head_figures(p.numbers)} for p in prompts
        ],
        "head": head_figures(mean),
        "prompts": [prompt.view for prompt in prompts if prompt.view is not None],
    }
    return {key: plain(value) for key, value in document.items()}


def head_figures(numbers: Numbers) -> dict[str, float]:
    """The few numbers that sum a prompt, or the mean over prompts, up."""
    cross, values = numbers.cross, numbers.values
    later = values.top[1:, -1]
    full_read = float(cross.full_read.sum())
    return {
        "tokens": float(numbers.size[0]),
        "chunks": float(numbers.size[1]),
        "recomputed": float(numbers.size[2]),
        "computed_share": float(numbers.size[3]),
        "keys_90": float(numbers.sparsity.keys[:, :, 0].mean()),
        "below_0.001": float(numbers.sparsity.below[:, :, 1].mean()),
        "value_deviation_before": float(values.mean_before.mean()),
        "value_deviation_after": float(values.mean_after.mean()),
        "top_15_share": float(later[~np.isnan(later)].mean()) if (~np.isnan(later)).any() else math.nan,
        "cross_full": float(cross.full.mean()),
        "cross_blended": float(cross.blended.mean()),
        "cross_read_restored": float(cross.blended_read.sum()) / full_read if full_read > 0 else math.nan,
        "variation_reuse": float(cross.variation_reuse.mean()),
        "variation_blended": float(cross.variation_blended.mean()),
    }


def plain(value: object) -> Any:
    """Arrays as lists, floats rounded to five significant digits, NaN and infinity as None."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def write_json(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the document to `path`, whole or not at all; `ConfigError` when it cannot be written."""
    text = json_text(document, allow_nan=False)
    write_whole(Path(path), f"{text}\n".encode())
