"""The part of the document that belongs to one prompt: its text, its rows' scores, its pictures, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blend.analyze.tokens import KINDS
from blend.select import make_selector
from blend.select.base import scoring_layers

if TYPE_CHECKING:
    from blend.analyze.study import PromptAnalysis
    from blend.config import BlendConfig


class ScoreView(NamedTuple):
    """One way to colour the text. values: `[rows]`, NaN where undefined. family: views of one family share a colour scale."""

    name: str
    label: str
    values: np.ndarray
    family: str
    sqrt: bool = False


_RANKED_BY = {"hkvd": "check", "gradual": "check", "query_guided": "question", "mixed": "both"}


def prompt_document(
    analysis: PromptAnalysis,
    config: BlendConfig,
    identity: Mapping[str, str],
    *,
    pictures: bool,
    layer: int | None = None,
) -> dict[str, object]:
    """JSON value of one prompt.

    identity: its id and question. pictures: with the token-by-token pictures of every layer. layer: the one to show first; None
    takes the one of the middle layers whose rows give most to other chunks.
    """
    views = score_views(analysis)
    ranked = _RANKED_BY.get(make_selector(config.selector).name)
    shown = ranked or "before"
    return {
        **identity,
        "rows": analysis.layout.rows,
        "segments": [
            {"name": name, "start": span.start, "stop": span.stop}
            for name, span in zip(analysis.segments.names, analysis.segments.spans, strict=True)
        ],
        "tokens": list(analysis.texts),
        "kinds": [KINDS[kind] for kind in analysis.kinds],
        "recomputed": analysis.recomputed.tolist(),
        "ranked_by": ranked,
        "shown": shown,
        "scores": [_score(view) for view in views],
        "chunk_attention": [layer.by_segment for layer in analysis.attention],
        "chunk_reading": _chunk_reading(analysis),
        "question_attention": analysis.exchange.question,
        "question_reading": _question_reading(analysis),
        "chunk_deviation": _chunk_deviation(analysis),
        "pictures": _pictures(analysis, layer) if pictures else None,
    }


def score_views(analysis: PromptAnalysis) -> tuple[ScoreView, ...]:
    """Everything that the text can be coloured by."""
    scores, prompt = analysis.scores, analysis
    asked = np.stack([layer.question for layer in prompt.attention]).mean(0)
    given = np.stack([layer.cross for layer in prompt.attention]).mean(0)
    asked, given = (np.where(_in_context(analysis), values, np.nan) for values in (asked, given))
    return (
        ScoreView(
            "check",
            f"deviation at check layer {scores.check_layer} (hkvd)",
            _spread(analysis, scores.deviation),
            "check",
            True,
        ),
        ScoreView(
            "question",
            f"question's attention over the stored caches, layers {_runs(scores.layers)} (query_guided)",
            _spread(analysis, scores.question),
            "question",
            True,
        ),
        ScoreView(
            "both", "deviation and question's attention combined (mixed)", _spread(analysis, scores.both), "both", True
        ),
        ScoreView("before", "deviation of values, reused cache (before)", _relative(analysis, "before"), "deviation"),
        ScoreView("after", "deviation of values, blended cache (after)", _relative(analysis, "after"), "deviation"),
        ScoreView("asked", "question's attention under full recompute", asked, "asked", True),
        ScoreView("cross", "attention given to other chunks under full recompute", given, "cross"),
    )


def _runs(layers: tuple[int, ...]) -> str:
    """Sorted numbers, neighbours joined: 3, 7, 12-15."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}\u2013{run[-1]}" for run in runs)


def _relative(analysis: PromptAnalysis, which: str) -> np.ndarray:
    """Relative deviation of values, mean over the layers after the first."""
    deviation = getattr(analysis, which).values.relative
    return _spread(analysis, (deviation[1:] if len(deviation) > 1 else deviation).mean(0))


def _spread(analysis: PromptAnalysis, values: np.ndarray) -> np.ndarray:
    """Values of the context rows at their rows of the prompt, NaN elsewhere."""
    spread = np.full(analysis.layout.rows, np.nan)
    spread[_in_context(analysis)] = values
    return spread


def _in_context(analysis: PromptAnalysis) -> np.ndarray:
    row = np.arange(analysis.layout.rows)
    inside: np.ndarray = (row >= analysis.layout.context.start) & (row < analysis.layout.context.stop)
    return inside


def _score(view: ScoreView) -> dict[str, object]:
    return {"name": view.name, "label": view.label, "family": view.family, "sqrt": view.sqrt, "values": view.values}


def _pictures(analysis: PromptAnalysis, layer: int | None) -> dict[str, object]:
    middle = scoring_layers("middle", len(analysis.attention))
    most = max(middle, key=lambda index: float(analysis.attention[index].cross.sum()))
    return {
        "width": analysis.pictures[0].width,
        "cells": len(analysis.pictures[0].cells),
        "shown": most if layer is None else layer,
        "layers": [{"layer": p.layer, "head": p.head, "cells": p.encoded()} for p in analysis.pictures],
    }


def _chunk_deviation(analysis: PromptAnalysis) -> dict[str, list[float]]:
    """Mean relative deviation of each chunk's values, before and after."""
    found = {}
    for which in ("before", "after"):
        values = _relative(analysis, which)
        found[which] = [float(values[s.start : s.stop].mean()) for s in analysis.segments.spans[1:-1]]
    return found


def _chunk_reading(analysis: PromptAnalysis) -> str:
    chunks = range(1, len(analysis.segments.spans) - 1)
    mean = np.mean([layer.by_segment for layer in analysis.attention], 0)[chunks]
    own = float(np.mean([mean[i, chunk] for i, chunk in enumerate(chunks)]))
    others = max(float(mean[:, 1:-1].sum(1).mean()) - own, 0.0)
    return (
        f"Over all layers, a chunk's rows give {mean[:, 0].mean():.0%} of their attention to the prefix, {own:.0%} to their "
        f"own chunk and {others:.0%} to earlier chunks, which is what reuse drops."
    )


def _question_reading(analysis: PromptAnalysis) -> str:
    full, reuse, blended = analysis.exchange.question.mean(1)[:, 1:-1]
    most = int(full.argmax())
    shift = [f"{np.abs(other - full).sum():.1%}" for other in (reuse, blended)]
    return (
        f"Under full recompute the question reads chunk {most + 1} most ({full[most]:.1%} of its attention, mean over "
        f"layers); plain reuse gives that chunk {reuse[most]:.1%}, blending {blended[most]:.1%}. "
        f"Added up over the chunks, shares are off by {shift[0]} under reuse and {shift[1]} after blending."
    )
