"""Rows of an earlier prompt at new places: by the dense definition of blending, and exact where nothing was edited."""

import pytest
import torch
from cases import cache_chunks, make_layout
from dense_reference import LayerKV, assert_close, dense_blend, dense_chunk, dense_prefill
from models import CORE, decoder, eager_model

from blend.config import BlendConfig
from blend.model.passes import run_steps
from blend.prefill.blender import Blend, Blender
from blend.prefill.inputs import MovedRows
from blend.prefill.plan import MOVED_RATIO, SEAM
from blend.store import open_store
from blend.types import ChunkCache, Place, PlaceOrigin, PromptLayout

LAYOUT = make_layout(prefix=5, chunks=(60, 50, 45), suffix=7)
HEADER, (FIRST, SECOND, THIRD), QUESTION = LAYOUT.prefix, LAYOUT.chunks, LAYOUT.suffix
EARLIER = (*HEADER, *FIRST, *SECOND, *QUESTION)
EDITED = (*HEADER[:2], 9, 8, 7, 6, *HEADER[2:])
DROPPED = 8  # first rows of the second text that the new prompt leaves out


def moved(tokens: tuple[int, ...], first: int) -> Place:
    return Place(tokens, PlaceOrigin.MOVED, first=first)


def rows_of(name: str, ids: tuple[int, ...]) -> ChunkCache:
    layers = dense_prefill(eager_model(name), ids).layers
    return ChunkCache(tuple(keys[0] for keys, _ in layers), tuple(values[0] for _, values in layers), 0)


def prefilled(blender: Blender, layout: PromptLayout, rows: ChunkCache, edited: float = 0.0) -> Blend:
    steps = blender.steps(layout, moved=MovedRows(rows, edited))
    return run_steps(steps, lambda request: blender.decoder.prefill([request]))


@pytest.mark.parametrize("name", CORE)
def test_moved_rows_are_the_earlier_prompts_at_new_positions(name: str) -> None:
    """Beside a stored chunk, whose rows are chosen as always."""
    first = moved(FIRST, len(HEADER))
    second = moved(SECOND[DROPPED:], len(HEADER) + len(FIRST) + DROPPED)
    layout = PromptLayout(EDITED, (first, second, Place(THIRD)), QUESTION, HEADER)
    blender = Blender(decoder(name), open_store("memory:"), BlendConfig(ratio=0.2, correction=False))
    cache_chunks(blender, PromptLayout.of_chunks(HEADER, (THIRD,), QUESTION))
    blend = prefilled(blender, layout, rows_of(name, EARLIER))
    assert blend.hits == (True, True, True)
    assert blend.missing == ()

    spans = layout.chunk_spans
    computed = set(blend.selection.rows.tolist())
    for span in spans[:2]:
        assert computed >= set(range(span.start, span.start + SEAM))
    moved_rows = sum(span.length - SEAM for span in spans[:2])
    assert blend.plan.budget == round(0.2 * len(THIRD) + MOVED_RATIO * moved_rows)

    model = eager_model(name)
    sources = [EARLIER[: place.first] for place in (first, second)] + [HEADER]
    parts = [dense_prefill(model, EDITED).layers]
    parts += [
        dense_chunk(model, source, place.tokens, span.start)
        for source, place, span in zip(sources, layout.places, spans, strict=True)
    ]
    parts.append(dense_prefill(model, QUESTION).layers)  # all of these are computed
    stored = [_joined([part[layer] for part in parts]) for layer in range(len(parts[0]))]
    rows = blend.selection.rows
    dense = dense_blend(model, layout.token_ids, stored, [rows] * len(stored))
    assert_close(blend.logits[0], dense.logits[-1])


def _joined(parts: list[LayerKV]) -> LayerKV:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


def test_what_goes_on_behind_no_edit_is_exact() -> None:
    """Two places that follow each other in both prompts have one seam."""
    places = (moved(FIRST, len(HEADER)), moved(SECOND, len(HEADER) + len(FIRST)))
    layout = PromptLayout(HEADER, places, QUESTION)
    blender = Blender(decoder("llama"), open_store("memory:"), BlendConfig(selector="none"))
    blend = prefilled(blender, layout, rows_of("llama", EARLIER))
    first = layout.context.start
    expected = [*range(first, first + SEAM), *range(layout.context.stop, layout.rows)]
    assert blend.selection.rows.tolist() == expected
    dense = dense_prefill(eager_model("llama"), layout.token_ids)
    assert_close(blend.logits[0], dense.logits[-1])


@pytest.mark.parametrize(("edited", "ratio"), [(0.0, MOVED_RATIO), (0.1, 0.2), (0.9, 0.3)])
def test_the_more_is_edited_the_more_is_computed(edited: float, ratio: float) -> None:
    layout = PromptLayout(EDITED, (moved(FIRST, len(HEADER)),), QUESTION)
    blender = Blender(decoder("llama"), open_store("memory:"), BlendConfig(ratio=0.3))
    blend = prefilled(blender, layout, rows_of("llama", EARLIER), edited)
    assert blend.plan.budget == round(ratio * (len(FIRST) - SEAM))


def test_a_part_of_a_moved_place_goes_on_where_it_is() -> None:
    whole = moved(FIRST, 5)
    assert whole.behind(3) == moved(FIRST[3:], 8)
    assert whole.stored is None
    assert not whole.is_brought
