"""Whether blending a prompt saves rows, and whether a prompt finds more rows once another one is prefilled."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from blend.layout import PlaceOrigin, common_length
from blend.select import make_selector
from blend.select.base import needs_of, scoring_layers
from blend.serve.events import COLD, NOTHING, SHORT
from blend.serve.prompt import Prompt

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.config import BlendConfig
    from blend.layout import PromptLayout, Tokens
    from blend.prefill.blender import Blender

LEAST_GAIN = 32  # rows: saving fewer is not worth an approximation; chosen, not measured


def gains_from(prompt: Prompt, earlier: Prompt) -> bool:
    """Whether a prompt finds more of its rows in memory, or stored, once the `earlier` one is prefilled."""
    if prompt.request.cold or prompt.request.tenant != earlier.request.tenant:
        return False
    if earlier.flight is not None and earlier.flight.is_owner:  # it computes text apart, not yet its prompt
        return prompt.flight is not None and prompt.flight.waits_for(earlier.flight)
    layout = prompt.layout
    rows = common_length(layout.token_ids, earlier.layout.token_ids)
    if len(layout.prefix) < rows <= exact_anyway(layout):
        rows = len(layout.prefix)
    return rows > layout.shared_prefix_rows


def exact_anyway(layout: PromptLayout) -> int:
    """Rows that are exact in a blended prompt because its first chunk stands where it was computed; they cost only loading.

    Taking them from memory instead would change which rows are recomputed, and so the answer, for no gain.
    """
    return layout.chunk_spans[0].stop if layout.chunks and layout.exact_first else len(layout.prefix)


def is_blendable(layout: PromptLayout) -> bool:
    """Whether the prompt has text whose KV may come from a cache."""
    return any(place.origin is not PlaceOrigin.TEXT for place in layout.places)


def reason_against(blender: Blender, layout: PromptLayout, config: BlendConfig, least_gain: int = LEAST_GAIN) -> str:
    """Why this prompt is better computed in full, in a word or two, or "".

    Blending must save `least_gain` rows more than another pass, choosing rows by the question and reading operators cost.
    "cold": the saving is possible, but the store does not hold the caches yet.
    """
    if not is_blendable(layout):
        return NOTHING
    if config.ratio >= 1:
        return "everything is recomputed"
    library = blender.library(layout.kept_behind)
    chunks = {chunk for chunk in layout.stored if chunk is not None}
    readable = _readable(library, chunks)
    stored = (place for place in layout.places if place.stored in readable)
    stored_rows = sum(len(place.tokens) for place in stored)
    stored_rows += sum(len(place.tokens) for place in layout.places if place.origin is PlaceOrigin.MOVED)
    decoder = blender.decoder
    # What was timed differs from one start to the next.
    timed = 0.0 if config.reproducible else decoder.pass_rows + decoder.operator_rows * len(chunks)
    cost = least_gain + timed + _question_rows(blender, layout, config)
    if stored_rows * (1 - config.ratio) > cost:
        return ""
    rows = sum(len(place.tokens) for place in layout.places if place.origin is not PlaceOrigin.TEXT)
    return COLD if rows * (1 - config.ratio) > cost else SHORT


def _readable(library: ChunkLibrary, chunks: Set[Tokens]) -> set[Tokens]:
    """Those of these chunks that have a cache in memory or in the store. Raises `StoreError`."""
    tables = library.tables().values()
    ready = {chunk for chunk in chunks if any(chunk in table for table in tables)}
    keys = {library.key(variant): variant.chunk for variant in library.variants(sorted(chunks - ready))}
    readable = library.store.readable(keys)
    return ready | {keys[key] for key in readable}


def _question_rows(blender: Blender, layout: PromptLayout, config: BlendConfig) -> float:
    """Rows through all layers that cost as much as choosing rows by the question."""
    decoder = blender.decoder
    query = needs_of(make_selector(config.selector), len(decoder.rotations)).query
    last = scoring_layers(query.layers, decoder.attending)[-1] if query else -1
    return len(layout.suffix) * (last + 1) / len(decoder.layers)
