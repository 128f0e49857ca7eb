"""Prompts of a server: text between chunks, parts of chunks, rows of earlier prompts, prefixes other than the caches'."""

from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import pytest
import torch
from blends import REUSE, assert_kv, empty_blender, filled, prefill_in_steps
from cases import assert_same_blend, cache_of, make_layout
from dense_reference import LayerKV, assert_close, assert_dense, dense_blend, dense_chunk, dense_prefill
from layouts import marked
from models import CORE, decoder, eager_model

from blend.config import BlendConfig
from blend.layout import Place, PlaceOrigin, PromptLayout
from blend.model.passes import run_steps
from blend.prefill.blender import Blend, Blender
from blend.prefill.plan import MOVED_RATIO, SEAM
from blend.prefill.prefill import NothingStoredError
from blend.prefill.resources import MovedRows
from blend.select.base import Evidence, Selector
from blend.types import ChunkCache

FAMILIES = ("llama", "gemma3", "deepseek-v3", "gpt-oss")
BASE = make_layout()
OTHER = (7, 19, 3, 44, 21, 8, 30)
PART = (11, 12, *BASE.chunks[2], 13)
WITH_TEXT = marked(BASE, plain={1})
PLAIN = marked(WITH_TEXT, parts={2: (PART, 2)})
ELSEWHERE = replace(PLAIN, prefix=OTHER, canonical_prefix=BASE.prefix)


@dataclass(frozen=True)
class Modest(Selector):
    """Half of what it may have."""

    def select(self, evidence: Evidence) -> torch.Tensor:
        return evidence.candidates[: evidence.budget // 2]


def known_rows(layers: list[LayerKV], count: int) -> ChunkCache:
    """The first rows of a prompt, as a server keeps them."""
    keys, values = zip(*layers, strict=True)
    return ChunkCache(tuple(k[0, :, :count] for k in keys), tuple(v[0, :, :count] for v in values), 0)


@pytest.mark.parametrize("layout", [PLAIN, ELSEWHERE, BASE.all_plain()])
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_recomputed_is_full_prefill(name, layout):
    dense = dense_prefill(eager_model(name), layout.token_ids)
    blender = filled(decoder(name), layout, BlendConfig(ratio=1.0))
    for pieces in (None, 3):
        blend = prefill_in_steps(blender, layout, most_rows=pieces)
        assert blend.exact_rows == layout.rows
        assert_dense(blend.logits, cache_of(blend), dense)


def test_ordinary_text_is_computed_and_never_stored():
    blend = filled(decoder("llama"), PLAIN, REUSE).prefill(PLAIN)
    assert blend.hits == (True, False, True, True)
    assert blend.missing == ()
    rows = set(blend.selection.rows.tolist())
    assert rows == {*range(*PLAIN.chunk_spans[1]), *range(PLAIN.context.stop, PLAIN.rows)}
    nothing = empty_blender(config=REUSE).prefill(PLAIN)
    assert {one.chunk for one in nothing.missing} == {PLAIN.chunks[0], PART, PLAIN.chunks[3]}


def test_a_prompt_that_needs_a_stored_chunk_is_given_up_where_there_is_none():
    """Before any row runs; with one, it is prefilled as ever."""
    with pytest.raises(NothingStoredError) as caught:
        run_steps(empty_blender(config=REUSE).steps(PLAIN, needs_hit=True), pytest.fail)
    assert {key.chunk for key in caught.value.missing} == {PLAIN.chunks[0], PART, PLAIN.chunks[3]}
    blender = filled(decoder("llama"), PLAIN, REUSE)
    assert_same_blend(prefill_in_steps(blender, PLAIN, needs_hit=True), prefill_in_steps(blender, PLAIN))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_part_of_a_chunk_is_those_rows_of_it(name):
    """Put where the whole would put them, they are the same."""
    chunks = (PLAIN.chunks[0], PART[:2], PLAIN.chunks[2], PART[-1:])
    split = marked(PromptLayout.of_chunks(PLAIN.prefix, chunks, PLAIN.suffix), plain={1, 3}, parts={2: (PART, 2)})
    whole = PromptLayout.of_chunks(PLAIN.prefix, (PLAIN.chunks[0], PART), PLAIN.suffix)
    blender = filled(decoder(name), split, REUSE)
    assert_kv(*(cache_of(blender.prefill(layout)) for layout in (split, whole)), slice(*split.chunk_spans[2]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("known", [0, 3, 7])
def test_a_prefix_of_its_own_is_computed_as_far_as_it_is_not_known(name, known):
    blender = filled(decoder(name), ELSEWHERE, BlendConfig(ratio=0.3))
    dense = dense_prefill(eager_model(name), ELSEWHERE.token_ids)
    held = known_rows(dense.layers, known) if known else None
    blend = prefill_in_steps(blender, ELSEWHERE, known=held, most_rows=4)
    assert blend.hits == (True, False, True, True)
    assert blend.exact_rows == len(OTHER)  # the first chunk was computed behind another prefix
    assert blend.selection.rows[: len(OTHER) - known].tolist() == list(range(known, len(OTHER)))
    assert_kv(cache_of(blend), dense.layers, slice(blend.exact_rows))
    assert_close(blend.logits, blender.prefill(ELSEWHERE).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_rows_are_those_before_the_first_stored_chunk_that_is_not(name):
    blend = filled(decoder(name), WITH_TEXT, BlendConfig(ratio=0.2)).prefill(WITH_TEXT)
    assert blend.exact_rows == WITH_TEXT.chunk_spans[1].stop
    dense = dense_prefill(eager_model(name), WITH_TEXT.token_ids)
    assert_kv(cache_of(blend), dense.layers, slice(blend.exact_rows))


@pytest.mark.parametrize(("codec", "places"), [("float32", 2), ("bfloat16", 0), ("int8", 0), ("int4", 0)])
def test_a_first_chunk_that_its_codec_rounded_is_used_and_not_called_exact(codec, places):
    native, blender = (filled(decoder("llama"), WITH_TEXT, REUSE, codec=name) for name in ("native", codec))
    blend = blender.prefill(WITH_TEXT)
    assert blend.exact_rows == BASE.chunk_spans[places].start
    rows = native.prefill(WITH_TEXT).selection.rows
    assert torch.equal(blend.selection.rows, rows), "it is computed no more than before"
    assert blender.prefill(BASE, config=BlendConfig(ratio=1.0)).exact_rows == BASE.rows


def test_rows_that_a_selector_passes_over_are_not_exact():
    """The budget would do for all of them: those of the first chunk, which needs none, are in it."""
    layout = PromptLayout.of_chunks(BASE.prefix, (BASE.chunks[0] * 4, *BASE.chunks[1:]), BASE.suffix)
    blend = filled(decoder("llama"), layout, BlendConfig(Modest(), ratio=0.9, correction=False)).prefill(layout)
    assert blend.exact_rows == layout.chunk_spans[1].start


@pytest.mark.parametrize("rows", range(len(PLAIN.prefix), PLAIN.rows))
def test_the_same_prompt_behind_more_rows(rows):
    later = PLAIN.behind(rows)
    assert later.token_ids == PLAIN.token_ids
    assert len(later.prefix) == rows
    assert later.kept_behind == PLAIN.prefix
    for place in later.places:
        if place.part_of is not None:
            assert place.part_of[place.first :][: len(place.tokens)] == place.tokens
    left = [span.stop > rows for span in PLAIN.chunk_spans]
    assert [later.stored[i] for i in range(sum(left))] == [*compress(PLAIN.stored, left)]


def test_reuse_of_a_conversation_whose_chunks_were_cut():
    """What stands behind known rows is put together as if nothing were known."""
    blender = filled(decoder("llama"), PLAIN, BlendConfig(ratio=1.0))
    first = blender.prefill(PLAIN)
    cut = PLAIN.chunk_spans[0].start + 5
    later = prefill_in_steps(blender, PLAIN.behind(cut), known=known_rows(cache_of(first), cut))
    assert later.hits == (True, False, True, True)
    assert int(later.selection.rows[0]) == cut
    torch.testing.assert_close(later.logits, first.logits, rtol=1e-4, atol=1e-4)


# Rows of an earlier prompt at new places.

HEADER, QUESTION = BASE.prefix, BASE.suffix
FIRST, SECOND, THIRD = make_layout(chunks=(60, 50, 45)).chunks
EARLIER = (*HEADER, *FIRST, *SECOND, *QUESTION)
EDITED = (*HEADER[:2], 9, 8, 7, 6, *HEADER[2:])
DROPPED = 8  # first rows of the second text that the new prompt leaves out


def moved(tokens: tuple[int, ...], first: int) -> Place:
    return Place(tokens, PlaceOrigin.MOVED, first=first)


def prefilled(blender: Blender, layout: PromptLayout, edited: float = 0.0) -> Blend:
    """With the rows of the earlier prompt."""
    return prefill_in_steps(blender, layout, moved=MovedRows(rows_of_earlier(blender), edited))


def rows_of_earlier(blender: Blender) -> ChunkCache:
    return known_rows(dense_prefill(eager_model(blender.decoder.name), EARLIER).layers, len(EARLIER))


@pytest.mark.parametrize("name", CORE)
def test_moved_rows_are_the_earlier_prompts_at_new_positions(name: str) -> None:
    """Beside a stored chunk, whose rows are chosen as always."""
    first = moved(FIRST, len(HEADER))
    second = moved(SECOND[DROPPED:], len(HEADER) + len(FIRST) + DROPPED)
    layout = PromptLayout(EDITED, (first, second, Place(THIRD)), QUESTION, HEADER)
    blend = prefilled(filled(decoder(name), layout, BlendConfig(ratio=0.2, correction=False)), layout)
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
    dense = dense_blend(model, layout.token_ids, stored, [blend.selection.rows] * len(stored))
    assert_close(blend.logits[0], dense.logits[-1])


def _joined(parts: list[LayerKV]) -> LayerKV:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


def test_moved_rows_that_go_on_behind_no_edit_are_exact() -> None:
    """Two places that follow each other in both prompts have one seam."""
    places = (moved(FIRST, len(HEADER)), moved(SECOND, len(HEADER) + len(FIRST)))
    layout = PromptLayout(HEADER, places, QUESTION)
    blend = prefilled(empty_blender(config=BlendConfig("none")), layout)
    first = layout.context.start
    assert blend.selection.rows.tolist() == [*range(first, first + SEAM), *range(layout.context.stop, layout.rows)]
    assert_close(blend.logits[0], dense_prefill(eager_model("llama"), layout.token_ids).logits[-1])


@pytest.mark.parametrize(("edited", "ratio"), [(0.0, MOVED_RATIO), (0.1, 0.2), (0.9, 0.3)])
def test_the_more_is_edited_the_more_moved_rows_are_computed(edited: float, ratio: float) -> None:
    layout = PromptLayout(EDITED, (moved(FIRST, len(HEADER)),), QUESTION)
    blend = prefilled(empty_blender(config=BlendConfig(ratio=0.3)), layout, edited)
    assert blend.plan.budget == round(ratio * (len(FIRST) - SEAM))


def test_a_part_of_a_moved_place_goes_on_where_it_is() -> None:
    whole = moved(FIRST, 5)
    assert whole.behind(3) == moved(FIRST[3:], 8)
    assert whole.stored is None
    assert not whole.is_brought


def test_rows_of_the_very_beginning_of_an_earlier_prompt_have_a_seam_too() -> None:
    """They may stand behind other text now."""
    layout = PromptLayout(EDITED, (moved(EARLIER[: len(HEADER)], 0), moved(FIRST, len(HEADER))), QUESTION)
    blend = prefilled(empty_blender(config=BlendConfig("none")), layout)
    first = layout.context.start
    assert blend.selection.rows.tolist() == [*range(first, first + SEAM), *range(layout.context.stop, layout.rows)]


def test_unsound_rows_are_computed_wherever_they_were() -> None:
    """Which rows are sound is said by their places in the earlier prompt."""
    layout = PromptLayout(EDITED, (moved(SECOND, len(HEADER) + len(FIRST)),), QUESTION)
    blender = empty_blender(config=BlendConfig(ratio=0.5))
    sound = np.ones(len(EARLIER), bool)
    first_unsound = len(HEADER) + len(FIRST) + SEAM + 3
    sound[first_unsound : first_unsound + 2] = False
    blend = prefill_in_steps(blender, layout, moved=MovedRows(rows_of_earlier(blender), 0.1, sound))
    start = layout.context.start
    expected = [*range(start, start + SEAM), start + SEAM + 3, start + SEAM + 4]
    assert blend.selection.rows.tolist() == [*expected, *range(layout.context.stop, layout.rows)]
