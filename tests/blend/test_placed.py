"""Prompts of a server: ordinary text between chunks, parts of chunks, prefixes other than that of the caches."""

from dataclasses import dataclass, replace
from itertools import compress

import pytest
import torch
from cases import cache_of, make_layout
from dense_reference import Dense, assert_close, assert_dense, dense_prefill
from layouts import marked
from models import decoder, eager_model

from blend.config import BlendConfig
from blend.model.passes import run_steps
from blend.prefill.blender import Blend, Blender
from blend.select.base import Evidence, Selector
from blend.store import open_store
from blend.types import ChunkCache, PromptLayout

FAMILIES = ("llama", "gemma3", "deepseek-v3", "gpt-oss")
BASE = make_layout()
OTHER = (7, 19, 3, 44, 21, 8, 30)
PART = (11, 12, *BASE.chunks[2], 13)
PLAIN = marked(BASE, plain={1}, parts={2: (PART, 2)})
ELSEWHERE = replace(PLAIN, prefix=OTHER, canonical_prefix=BASE.prefix)


@dataclass(frozen=True)
class Modest(Selector):
    """Half of what it may have."""

    def select(self, evidence: Evidence) -> torch.Tensor:
        return evidence.candidates[: evidence.budget // 2]


REUSE = BlendConfig(selector="none", correction=False)


def filled(name: str, layout: PromptLayout, codec: str = "native") -> Blender:
    blender = Blender(decoder(name), open_store("memory:", codec=codec))
    library = blender.library(layout.kept_behind)
    library.compute(library.missing([chunk for chunk in layout.stored if chunk is not None]))
    return blender


def run(blender: Blender, layout: PromptLayout, config: BlendConfig, **more: object) -> Blend:
    steps = blender.steps(layout, config=config, **more)  # type: ignore[arg-type]
    return run_steps(steps, lambda request: blender.decoder.prefill([request]))


def _assert_exact(blend: Blend, dense: Dense) -> None:
    for got, expected in zip(cache_of(blend), dense.layers, strict=True):
        for mine, true in zip(got, expected, strict=True):
            assert_close(mine[:, :, : blend.exact_rows], true[:, :, : blend.exact_rows])


@pytest.mark.parametrize("layout", [PLAIN, ELSEWHERE, BASE.all_plain()])
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_recomputed_is_full_prefill(name, layout):
    dense = dense_prefill(eager_model(name), layout.token_ids)
    blender = filled(name, layout)
    for pieces in (None, 3):
        blend = run(blender, layout, BlendConfig(ratio=1.0), most_rows=pieces)
        assert blend.exact_rows == layout.rows
        assert_dense(blend.logits, cache_of(blend), dense)


def test_ordinary_text_is_computed_and_never_stored():
    blender = filled("llama", PLAIN)
    blend = blender.prefill(PLAIN, config=REUSE)
    assert blend.hits == (True, False, True, True)
    assert blend.missing == ()
    rows = set(blend.selection.rows.tolist())
    assert rows == {*range(*PLAIN.chunk_spans[1]), *range(PLAIN.context.stop, PLAIN.rows)}
    nothing = Blender(decoder("llama"), open_store("memory:")).prefill(PLAIN, config=REUSE)
    assert {one.chunk for one in nothing.missing} == {PLAIN.chunks[0], PART, PLAIN.chunks[3]}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_part_of_a_chunk_is_those_rows_of_it(name):
    """Put where the whole would put them, they are the same."""
    chunks = (PLAIN.chunks[0], PART[:2], PLAIN.chunks[2], PART[-1:])
    split = marked(PromptLayout.of_chunks(PLAIN.prefix, chunks, PLAIN.suffix), plain={1, 3}, parts={2: (PART, 2)})
    whole = PromptLayout.of_chunks(PLAIN.prefix, (PLAIN.chunks[0], PART), PLAIN.suffix)
    blender = filled(name, split)
    blends = [blender.prefill(layout, config=REUSE) for layout in (split, whole)]
    span = slice(*split.chunk_spans[2])
    for index in range(len(blender.decoder.layers)):
        one, other = ([kv[:, :, span] for kv in blend.cache.view(index)] for blend in blends)
        assert_close(one[0], other[0])
        assert_close(one[1], other[1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("known", [0, 3, 7])
def test_a_prefix_of_its_own_is_computed_as_far_as_it_is_not_known(name, known):
    blender = filled(name, ELSEWHERE)
    dense = dense_prefill(eager_model(name), ELSEWHERE.token_ids)
    rows = [tuple(kv[0, :, :known] for kv in layer) for layer in dense.layers]
    held = ChunkCache(tuple(k for k, _ in rows), tuple(v for _, v in rows), 0) if known else None
    blend = run(blender, ELSEWHERE, BlendConfig(ratio=0.3), known=held, most_rows=4)
    assert blend.hits == (True, False, True, True)
    assert blend.exact_rows == len(OTHER)  # the first chunk was computed behind another prefix
    assert blend.selection.rows[: len(OTHER) - known].tolist() == list(range(known, len(OTHER)))
    _assert_exact(blend, dense)
    again = run(blender, ELSEWHERE, BlendConfig(ratio=0.3))
    assert_close(blend.logits, again.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_rows_are_those_before_the_first_stored_chunk_that_is_not(name):
    layout = marked(BASE, plain={1})
    blender = filled(name, layout)
    blend = blender.prefill(layout, config=BlendConfig(ratio=0.2))
    assert blend.exact_rows == layout.chunk_spans[1].stop
    dense = dense_prefill(eager_model(name), layout.token_ids)
    _assert_exact(blend, dense)


@pytest.mark.parametrize(("codec", "places"), [("float32", 2), ("bfloat16", 0), ("int8", 0), ("int4", 0)])
def test_a_first_chunk_that_its_codec_rounded_is_used_and_not_called_exact(codec, places):
    blends = []
    for one in ("native", codec):
        blender = filled("llama", marked(BASE, plain={1}), one)
        blends.append(blender.prefill(marked(BASE, plain={1}), config=REUSE))
    native, blend = blends
    assert blend.exact_rows == (BASE.chunk_spans[places].start)
    assert blend.selection.rows.tolist() == native.selection.rows.tolist(), "it is computed no more than before"
    everything = blender.prefill(BASE, config=BlendConfig(ratio=1.0))
    assert everything.exact_rows == BASE.rows


def test_rows_that_a_selector_passes_over_are_not_exact():
    """The budget would do for all of them: those of the first chunk, which needs none, are in it."""
    layout = PromptLayout.of_chunks(BASE.prefix, (BASE.chunks[0] * 4, *BASE.chunks[1:]), BASE.suffix)
    blend = filled("llama", layout).prefill(layout, config=BlendConfig(Modest(), ratio=0.9, correction=False))
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
    blender = filled("llama", PLAIN)
    first = blender.prefill(PLAIN, config=BlendConfig(ratio=1.0))
    cut = PLAIN.chunk_spans[0].start + 5
    rows = [tuple(kv[0, :, :cut].clone() for kv in first.cache.view(i)) for i in range(len(blender.decoder.layers))]
    known = ChunkCache(tuple(k for k, _ in rows), tuple(v for _, v in rows), 0)
    later = run(blender, PLAIN.behind(cut), BlendConfig(ratio=1.0), known=known)
    assert later.hits == (True, False, True, True)
    assert int(later.selection.rows[0]) == cut
    torch.testing.assert_close(later.logits, first.logits, rtol=1e-4, atol=1e-4)
