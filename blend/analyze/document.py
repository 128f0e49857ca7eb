"""The analysis as one JSON value (undefined is null) and as a self-contained HTML page that shows it."""

from __future__ import annotations

import html
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from blend.analyze.attention import MASSES, THRESHOLDS
from blend.analyze.numbers import (
    END_BINS,
    HIGH,
    QUANTILES,
    START_BINS,
    TOP,
    Numbers,
    bin_names,
    divide,
    mean_defined,
    mean_numbers,
)
from blend.analyze.readings import readings
from blend.analyze.study import KVDeviation
from blend.analyze.words import KINDS
from blend.config import BlendConfig
from blend.eval.output import write_whole
from blend.eval.report import RunInfo
from blend.select import make_selector
from blend.select.base import scoring_layers
from blend.text import json_text, visible

if TYPE_CHECKING:
    from blend.analyze.study import PromptAnalysis


FORMAT = 1
_DIGITS = 5
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_SCRIPTS = ("charts.js", "text.js", "page.js")


@dataclass(frozen=True)
class Analyzed:
    """One prompt: its id and question, its numbers, and what `prompt_document` made of it, None where that is not kept.

    mapped: whether the blend applied a KV correction.
    """

    identity: Mapping[str, str]
    numbers: Numbers
    mapped: bool
    view: Mapping[str, object] | None


def analysis_document(prompts: Sequence[Analyzed], info: RunInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
    """JSON value of an analysis, without NaN or infinity, numbers rounded to five digits.

    notes: lines that a reader must know, such as records left out.

    `mean` holds the numbers averaged over the prompts (see `Numbers` for shapes), `records` the head figures of each,
    `prompts` the views of those that have one, `readings` a sentence for each picture of `mean`.
    """
    mean = mean_numbers([prompt.numbers for prompt in prompts])
    records = [{**prompt.identity, "mapped": prompt.mapped, **head_figures(prompt.numbers)} for prompt in prompts]
    document = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": info.model,
        "workload": info.workload,
        "command": info.command,
        "config": info.config,
        "notes": list(notes),
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
        "records": records,
        "head": head_figures(mean),
        "prompts": [prompt.view for prompt in prompts if prompt.view is not None],
    }
    return {key: plain(value) for key, value in document.items()}


def head_figures(numbers: Numbers) -> dict[str, float]:
    """The few numbers that sum a prompt, or the mean over prompts, up."""
    cross = numbers.cross
    values = numbers.values
    tokens, chunks, recomputed, computed_share = numbers.size
    return {
        "tokens": tokens,
        "chunks": chunks,
        "recomputed": recomputed,
        "computed_share": computed_share,
        "keys_90": numbers.sparsity.keys[:, :, 0].mean(),
        "below_0.001": numbers.sparsity.below[:, :, 1].mean(),
        "value_deviation_before": values.mean_before.mean(),
        "value_deviation_after": values.mean_after.mean(),
        "top_15_share": mean_defined(values.top[1:, -1]),
        "cross_full": cross.full.mean(),
        "cross_blended": cross.blended.mean(),
        "cross_read_restored": divide(cross.blended_read.sum(), cross.full_read.sum()),
        "variation_reuse": cross.variation_reuse.mean(),
        "variation_blended": cross.variation_blended.mean(),
    }


def plain(value: object) -> Any:
    """Arrays as lists, floats rounded to five significant digits, NaN and infinity as None."""
    if isinstance(value, ndarray):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


_RANKED_BY = {"hkvd": "check", "gradual": "check", "query_guided": "question", "mixed": "both"}


def prompt_document(
    analysis: PromptAnalysis,
    config: BlendConfig,
    identity: Mapping[str, str],
    *,
    pictures: bool,
    layer: int | None = None,
    titles: Sequence[str] = (),
) -> dict[str, object]:
    """JSON value of one prompt.

    Args:
        analysis: the prompt's analysis.
        config: how it was blended.
        identity: its id and question.
        pictures: whether the token-by-token pictures of every layer are part of it.
        layer: the one to show first; None takes the middle layer whose rows give most to other chunks.
        titles: of the chunks, in the prompt's order; none, or one a chunk.
    """
    ranked = _RANKED_BY.get(make_selector(config.selector).name)
    titles = titles or [""] * len(analysis.layout.chunk_spans)
    segments = zip(analysis.segments.names, ["", *titles, ""], analysis.segments.spans, strict=True)
    return {
        **identity,
        "rows": analysis.layout.rows,
        "segments": [
            {"name": name, "title": title, "start": span.start, "stop": span.stop} for name, title, span in segments
        ],
        "tokens": list(analysis.texts),
        "kinds": [KINDS[kind] for kind in analysis.kinds],
        "recomputed": analysis.recomputed.tolist(),
        "ranked_by": ranked,
        "shown": ranked or "before",
        "scores": score_views(analysis),
        "chunk_attention": [layer.by_segment for layer in analysis.attention],
        "chunk_reading": _chunk_reading(analysis),
        "question_attention": analysis.exchange.question,
        "question_reading": _question_reading(analysis, titles),
        "chunk_deviation": _chunk_deviation(analysis),
        "pictures": _pictures(analysis, layer) if pictures else None,
    }


def score_views(analysis: PromptAnalysis) -> list[dict[str, object]]:
    """Everything that the text can be coloured by.

    values: `[rows]`, NaN where undefined. family: views of one family share a colour scale. sqrt: the scale is of square roots.
    """
    scores = analysis.scores
    context = slice(*analysis.layout.context)
    question = np.mean([layer.question[context] for layer in analysis.attention], 0)
    cross = np.mean([layer.cross[context] for layer in analysis.attention], 0)
    views = (
        ("check", f"deviation at check layer {scores.check_layer} (hkvd)", "check", scores.deviation),
        (
            "question",
            f"question's attention over the stored caches, layers: {scores.layers} (query_guided)",
            "question",
            scores.question,
        ),
        ("both", "deviation and question's attention combined (mixed)", "both", scores.combined),
        ("before", "deviation of values, reused cache (before)", "deviation", _relative(analysis.before)),
        ("after", "deviation of values, blended cache (after)", "deviation", _relative(analysis.after)),
        ("asked", "question's attention under full recompute", "asked", question),
        ("cross", "attention given to other chunks under full recompute", "cross", cross),
    )
    documents = []
    for name, label, family, values in views:
        of_rows = np.full(analysis.layout.rows, np.nan)
        of_rows[context] = values
        is_even = family in ("deviation", "cross")
        documents.append({"name": name, "label": label, "values": of_rows, "family": family, "sqrt": not is_even})
    return documents


def _relative(deviation: KVDeviation) -> ndarray:
    """Relative deviation of values, mean over the layers after the first, `[context rows]`."""
    relative: ndarray = deviation.values.relative[1:].mean(0)
    return relative


def _pictures(analysis: PromptAnalysis, layer: int | None) -> dict[str, object]:
    """One head of every layer. layer: see `prompt_document`."""
    cross = [float(layer_attention.cross.sum()) for layer_attention in analysis.attention]
    middle = scoring_layers("middle", range(len(cross)))
    pictures = [layer_attention.picture for layer_attention in analysis.attention]
    return {
        "width": pictures[0].width,
        "cells": len(pictures[0].cells),
        "shown": max(middle, key=cross.__getitem__) if layer is None else layer,
        "layers": [{"layer": view.layer, "head": view.head, "cells": view.encoded()} for view in pictures],
    }


def _chunk_deviation(analysis: PromptAnalysis) -> dict[str, list[float]]:
    """Mean relative deviation of each chunk's values, before and after."""
    ends = np.cumsum([span.length for span in analysis.layout.chunk_spans])[:-1]
    caches = {"before": analysis.before, "after": analysis.after}
    return {
        name: [float(chunk.mean()) for chunk in np.split(_relative(deviation), ends)]
        for name, deviation in caches.items()
    }


def _chunk_reading(analysis: PromptAnalysis) -> str:
    chunks = range(1, len(analysis.segments.spans) - 1)
    mean = np.mean([layer.by_segment for layer in analysis.attention], 0)[chunks]
    to_chunks = mean[:, 1:-1]
    own_chunk = to_chunks.diagonal().mean()
    earlier = max(to_chunks.sum(1).mean() - own_chunk, 0.0)
    return (
        f"Over all layers, a chunk's rows give {mean[:, 0].mean():.0%} of their attention to the prefix, {own_chunk:.0%} to "
        f"their own chunk and {earlier:.0%} to earlier chunks, which is what reuse drops."
    )


def _question_reading(analysis: PromptAnalysis, titles: Sequence[str]) -> str:
    mean = analysis.exchange.question.mean(1)
    full, reuse, blended = mean[:, 1:-1]
    most = int(full.argmax())
    title = f", {titles[most]}," if titles[most] else ""
    reuse_shift = np.abs(reuse - full).sum()
    blend_shift = np.abs(blended - full).sum()
    return (
        f"Under full recompute the question reads chunk {most + 1}{title} most ({full[most]:.1%} of its attention, mean over "
        f"layers); plain reuse gives that chunk {reuse[most]:.1%}, blending {blended[most]:.1%}. "
        f"Added up over the chunks, shares are off by {reuse_shift:.1%} under reuse and {blend_shift:.1%} after blending."
    )


def page_text(document: Mapping[str, Any]) -> str:
    """The HTML page of an analysis document, self-contained.

    A content security policy keeps it from loading anything and from running any script but its own, whatever a prompt, a title
    or a name holds.
    """
    script = "\n".join(map(_asset, _SCRIPTS))
    parts = {
        "TITLE": html.escape(visible(f"{document['workload']} \u00b7 {document['model']}")),
        "STYLE": _asset("page.css"),
        "SCRIPT": script,
        "SCRIPT_HASH": f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
        # No tag and no comment can begin inside: `</script>` in a prompt would end the element.
        "DATA": json_text(document, allow_nan=False).replace("<", "\\u003c"),
    }
    # All at once: what a title or a prompt says is never taken for a placeholder.
    return _PLACEHOLDER.sub(lambda mark: parts[mark[1]], _asset("page.html"))


def write_page(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the page to `path`, whole or not at all; `ConfigError` when it cannot be written."""
    write_whole(Path(path), page_text(document).encode())


def _asset(name: str) -> str:
    return files("blend.analyze").joinpath("assets", name).read_text(encoding="utf-8")
