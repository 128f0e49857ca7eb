"""Whether blending a prompt gains anything over computing it, or taking it from memory, and why not."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from blend.select import make_selector
from blend.select.base import needs_of, scoring_layers
from blend.serve.engine import BLENDED_BEFORE, IN_MEMORY

if TYPE_CHECKING:
    from blend.blender import Blender
    from blend.config import BlendConfig
    from blend.types import PromptLayout

LEAST = 32  # rows: less is not worth another error than rounding; chosen, not measured


def why_nothing_is_left(whole: PromptLayout, left: PromptLayout, reused: int, inexact: int) -> str:
    """Why nothing is left to blend of a prompt that begins in memory, or "".

    left: the prompt behind its `reused` first rows, which are in memory; `inexact` of them an earlier turn blended.
    """
    if _blendable(left):
        return ""
    if inexact:
        return BLENDED_BEFORE
    return IN_MEMORY if _blendable(whole) or reused == whole.rows - 1 else ""


def _blendable(layout: PromptLayout) -> bool:
    """Whether any of it may be in a store."""
    return any(chunk is not None for chunk in layout.stored)


def reason_against(blender: Blender, layout: PromptLayout, config: BlendConfig, least_gain: int = LEAST) -> str:
    """One word or two for why this prompt is better computed in full, or "".

    Rows that need not be computed are held against those that the question's own pass computes to choose rows, which run
    through part of the layers; `least_gain` rows must be left. "cold" where what could be saved is not in the store yet.
    """
    stored = [(chunk, len(mine)) for chunk, mine in zip(layout.stored, layout.chunks, strict=True) if chunk is not None]
    if not stored:
        return "nothing to reuse"
    if config.ratio >= 1:
        return "everything is recomputed"
    library = blender.library(layout.kept_behind)
    keys = {chunk: [library.key(one) for one in library.variants([chunk], isolated=True)] for chunk, _ in stored}
    readable = blender.store.readable(chain.from_iterable(keys.values()))
    held = sum(rows for chunk, rows in stored if not readable.isdisjoint(keys[chunk]))
    cost = least_gain + _question_rows(blender, layout, config)
    if held * (1 - config.ratio) > cost:
        return ""
    return "cold" if sum(rows for _, rows in stored) * (1 - config.ratio) > cost else "short"


def _question_rows(blender: Blender, layout: PromptLayout, config: BlendConfig) -> float:
    """Rows through all layers that cost as much as choosing rows by the question."""
    depth = len(blender.decoder.layers)
    query = needs_of(make_selector(config.selector), depth).query
    return len(layout.suffix) * (scoring_layers(query.layers, depth)[-1] + 1) / depth if query else 0.0
