"""A corpus in one copy: contextual caches alone, in a prompt's first place too, with a KV correction of their own there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import make_layout
from corrections import by_formula
from dense_reference import assert_close, dense_prefill
from models import decoder, eager_model

from blend.analyze.study import analyze_prompt
from blend.blender import Blender
from blend.chunks.assemble import place
from blend.chunks.correction import position_features, rows_of
from blend.chunks.fit import fit_first
from blend.chunks.library import ChunkLibrary, Tokens, Variant
from blend.chunks.surrogate import in_copies, remove_spare, with_given_surrogate, with_surrogate
from blend.config import BlendConfig
from blend.corpus import OtherCorpora
from blend.eval.evaluator import PLAIN_REUSE, Evaluator, Method, standard_methods
from blend.prompt import PromptTemplate
from blend.recompute import make_plan
from blend.select import make_selector
from blend.store import open_store
from blend.store.admin import pin_cache
from blend.types import ChunkCache, PromptLayout

FAMILIES = ("llama", "gemma3", "deepseek-v3")
LAYOUT = make_layout()
REUSE = BlendConfig(selector="none")
UNCORRECTED = BlendConfig(selector="none", correction=False)
AT = LAYOUT.chunk_spans[0]


def corpus(count: int = 60, length: int = 14) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(3, 60, (length,), generator=draw).tolist()) for _ in range(count)]


def filled(name: str = "llama", location: str | Path = "memory:", *, one: bool = True) -> Blender:
    """A blender whose store holds every cache of the prompt's chunks."""
    blender = Blender(decoder(name), open_store(location, codec="native"))
    library = in_copies(with_surrogate(blender.library(LAYOUT.prefix), corpus(), 30), one=one)
    library.compute(library.missing(LAYOUT.chunks))
    return blender


def calibrated(name: str = "llama", location: str | Path = "memory:") -> Blender:
    blender = filled(name, location)
    assert blender.calibrate(LAYOUT.prefix, corpus())
    return blender


@cache
def with_maps(name: str) -> Blender:
    """One for all tests of a family: they may add caches, and take nothing away."""
    return calibrated(name)


def first_chunk(blender: Blender, config: BlendConfig) -> list[tuple[torch.Tensor, ...]]:
    """KV of the first chunk's rows after a prefill, layer by layer."""
    kv = blender.prefill(LAYOUT, config=config).cache
    return [tuple(part[:, :, AT.start : AT.stop].clone() for part in kv.view(i)) for i in range(len(kv.layers))]


def test_half_the_caches_and_bytes_and_every_place_hits() -> None:
    one, two = filled(), filled(one=False)
    held, twice = one.store.stats(), two.store.stats()
    assert (2 * held.entries, 2 * held.nbytes) == (twice.entries, twice.nbytes)
    for layout in (LAYOUT, PromptLayout(LAYOUT.prefix, LAYOUT.chunks[::-1], LAYOUT.suffix)):
        blend = one.prefill(layout)
        assert blend.hits == (True,) * 4
        assert blend.missing == blend.problems == ()
    assert [v.contextual for v in one.library(LAYOUT.prefix).open(LAYOUT.chunks).used] == [True] * 4


def test_running_processes_and_later_ones_need_no_option(tmp_path: Path) -> None:
    running = filled(location=tmp_path, one=False)
    other = in_copies(ChunkLibrary(decoder("llama"), open_store(tmp_path), LAYOUT.prefix), one=True)
    assert ChunkLibrary(decoder("llama"), open_store(tmp_path), LAYOUT.prefix).one_copy
    assert running.library(LAYOUT.prefix).one_copy
    assert in_copies(other, one=True).generation == other.generation
    assert with_surrogate(other, corpus(), 30).one_copy  # what there is stays
    assert with_given_surrogate(other, (9, 8, 7)).one_copy


def test_it_is_not_known_where_there_is_no_surrogate_context() -> None:
    library = in_copies(ChunkLibrary(decoder("llama"), open_store("memory:"), LAYOUT.prefix), one=True)
    assert not library.one_copy
    assert library.variants(LAYOUT.chunks) == [Variant(chunk, contextual=False) for chunk in LAYOUT.chunks]


def test_an_artifact_of_before_means_two_copies_and_nonsense_is_reported() -> None:
    library = filled(one=False).library(LAYOUT.prefix)
    name, store = library.isolated.identity.surrogate_name, library.store
    assert b"one_copy" not in store.read_artifact(name)
    assert not library.one_copy
    store.write_artifact(name, b'{"chunks": [[4, 5]], "one_copy": "yes"}')
    assert len(library.renewed().problems) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_full_recompute_is_full_recompute(name: str) -> None:
    dense = dense_prefill(eager_model(name), LAYOUT.token_ids)
    for blender in (filled(name), with_maps(name)):
        assert_close(blender.prefill(LAYOUT, config=BlendConfig(ratio=1.0)).logits[0], dense.logits[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_in_a_first_place_behind_its_own_surrogate_it_is_exact_as_stored(name: str) -> None:
    """Moved, not computed where it stands: only with what it was computed behind, as a prefix, is it the truth."""
    blender = filled(name)
    library = blender.library(LAYOUT.prefix)
    ids = (*library.contextual.prefix_tokens, *LAYOUT.chunks[0])
    dense = dense_prefill(eager_model(name), ids)
    start, there = len(library.contextual.prefix_tokens), torch.arange(*AT)
    found = first_chunk(blender, UNCORRECTED)
    before = torch.arange(start, len(ids))
    for index, turn in enumerate(blender.decoder.rotations):
        keys, values = (part[:, :, start:] for part in dense.layers[index])
        assert_close(rows_of(*found[index], turn, there), rows_of(keys, values, turn, before))


def test_the_first_chunks_rows_are_candidates_as_the_others_are() -> None:
    one, two = filled(), filled(one=False)
    for blender, start in ((one, AT.start), (two, AT.stop)):
        opened = blender.library(LAYOUT.prefix).open(LAYOUT.chunks)
        assert opened.first_exact == (blender is two)
        selector, device = make_selector(BlendConfig().selector), torch.device("cpu")
        plan = make_plan(LAYOUT, opened.hits, selector, 0.15, device, first_exact=opened.first_exact)
        assert plan.candidates.tolist() == plan.stale.tolist() == list(range(start, LAYOUT.context.stop))
    most = BlendConfig(selector="random", ratio=0.9)
    rows = [set(blender.prefill(LAYOUT, config=most).selection.rows.tolist()) for blender in (one, two)]
    assert rows[0] & set(range(*AT))
    assert not rows[1] & set(range(*AT))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_place_has_a_map_of_its_own_towards_the_isolated_cache(name: str) -> None:
    blender = with_maps(name)
    found = blender.correction(LAYOUT.prefix, contextual=True, first=True)
    assert found is not None
    assert found is not blender.correction(LAYOUT.prefix, contextual=True)
    rows = torch.arange(*AT)
    features = position_features(LAYOUT, rows, found.before, found.length)
    plain, mapped = first_chunk(blender, UNCORRECTED), first_chunk(blender, REUSE)
    for part, turn, old, new in zip(found.layers, blender.decoder.rotations, plain, mapped, strict=True):
        still, there = rows_of(*old, turn, rows), rows_of(*new, turn, rows)
        assert_close(there, still if part is None else still + by_formula(part, still, features))
    for contextual in (False, True):
        assert blender.correction(LAYOUT.prefix, contextual=contextual) is not None


@pytest.mark.parametrize("name", FAMILIES)
def test_the_map_brings_first_chunks_of_the_corpus_closer(name: str) -> None:
    blender = with_maps(name)
    error = [0.0, 0.0]
    for chunk in corpus()[:20]:
        layout = PromptLayout(LAYOUT.prefix, (chunk,), LAYOUT.suffix)
        if chunk in blender.library(LAYOUT.prefix).surrogate:
            continue
        blender.library(LAYOUT.prefix).compute([Variant(chunk, contextual=True)])
        truth = blender.prefill(layout, config=BlendConfig(selector="all")).cache
        for number, config in enumerate((UNCORRECTED, REUSE)):
            kv, span = blender.prefill(layout, config=config).cache, slice(*layout.context)
            error[number] += sum(
                float((a - b)[:, :, span].square().sum())
                for index in range(len(kv.layers))
                for a, b in zip(kv.view(index), truth.view(index), strict=True)
            )
    assert error[1] < 0.97 * error[0]


def test_isolated_caches_are_computed_for_the_fit_and_not_kept() -> None:
    blender = with_maps("llama")
    library = blender.library(LAYOUT.prefix)
    held = {key.digest for key in library.store.keys(library.isolated.identity.namespace)}
    assert held <= {library.key(Variant(chunk, contextual=False)).digest for chunk in library.surrogate}
    assert library.missing(LAYOUT.chunks) == []


def test_a_damaged_map_is_reported_and_not_used(tmp_path: Path) -> None:
    blender = calibrated(location=tmp_path)
    plain = first_chunk(blender, UNCORRECTED)
    (path,) = (tmp_path / "artifacts").glob("correction_first-*")
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 0xFF
    path.write_bytes(raw)
    again = Blender(decoder("llama"), open_store(tmp_path, codec="native"))
    blend = again.prefill(LAYOUT, config=REUSE)
    assert len(blend.artifact_problems) == 1
    for old, new in zip(plain, first_chunk(again, REUSE), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert again.calibrate(LAYOUT.prefix, corpus())
    assert again.prefill(LAYOUT, config=REUSE).artifact_problems == ()


def test_chunks_of_the_surrogate_context_stay_exact_in_the_first_place() -> None:
    blender = with_maps("llama")
    library = blender.library(LAYOUT.prefix)
    layout = PromptLayout(LAYOUT.prefix, (library.surrogate[0], *LAYOUT.chunks), LAYOUT.suffix)
    library.compute(library.missing(layout.chunks))
    placed = place(layout, library.open, contextual=True)
    assert placed.first_exact
    assert blender.corrections(placed).of_chunks[0] is None
    blend, dense = blender.prefill(layout, config=REUSE), dense_prefill(eager_model("llama"), layout.token_ids)
    span = slice(*layout.chunk_spans[0])
    for index, kv in enumerate(dense.layers):
        for got, expected in zip(blend.cache.view(index), kv, strict=True):
            assert_close(got[0, :, span], expected[0, :, span])


def test_there_and_back_again() -> None:
    blender = filled(one=False)
    library, chunks = blender.library(LAYOUT.prefix), list(LAYOUT.chunks)
    before = blender.prefill(LAYOUT, config=REUSE)
    remove_spare(library, chunks)
    assert blender.store.stats().entries == 8
    one = in_copies(library, one=True)
    assert one.missing(chunks) == []
    remove_spare(one, chunks)
    assert blender.store.stats().entries == 4
    two = in_copies(one, one=False)
    assert two.missing(chunks) == [Variant(chunk, contextual=False) for chunk in chunks]
    two.compute(two.missing(chunks))
    assert torch.equal(blender.prefill(LAYOUT, config=REUSE).logits, before.logits)


def test_a_pinned_isolated_cache_stays() -> None:
    blender = filled(one=False)
    one, spare = in_copies(blender.library(LAYOUT.prefix), one=True), Variant(LAYOUT.chunks[1], contextual=False)
    pin_cache(blender.store.backend, one.key(spare).digest, on=True)
    remove_spare(one, LAYOUT.chunks)
    assert blender.store.stats().entries == 5
    assert one.key(spare) in blender.store


def test_an_isolated_cache_goes_only_when_the_contextual_one_is_there() -> None:
    """After a quick run, or an interrupted one: questions are answered from what there is."""
    blender = Blender(decoder("llama"), open_store("memory:", codec="native"))
    library = in_copies(with_surrogate(blender.library(LAYOUT.prefix), corpus(), 30), one=True)
    quick = library.quickest(LAYOUT.chunks)
    assert quick == [Variant(chunk, contextual=False) for chunk in LAYOUT.chunks]
    library.compute(quick)
    library.compute([Variant(LAYOUT.chunks[1], contextual=True)])
    assert library.quickest(LAYOUT.chunks)[:2] == [quick[0], Variant(LAYOUT.chunks[1], contextual=True)]
    remove_spare(library, LAYOUT.chunks)
    assert library.store.stats().entries == 4
    opened = library.open(LAYOUT.chunks)
    assert [(one.contextual, hit) for one, hit in opened.pairs] == [
        (False, True),
        (True, True),
        (False, True),
        (False, True),
    ]
    assert opened.first_exact
    assert len(opened.missing) == 3


def test_a_damaged_cache_is_computed_again_and_the_first_place_falls_back(tmp_path: Path) -> None:
    blender = filled(location=tmp_path)
    library = blender.library(LAYOUT.prefix)
    (path,) = tmp_path.rglob(f"{library.key(Variant(LAYOUT.chunks[0], contextual=True)).digest}*")
    os.truncate(path, path.stat().st_size - 1)
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert blend.hits == (False, True, True, True)
    assert blend.missing == (Variant(LAYOUT.chunks[0], contextual=True),)
    assert blender.remember(blend) == 1
    assert blender.prefill(LAYOUT, config=REUSE).hits == (True,) * 4


def test_a_chunk_that_goes_takes_a_spare_along() -> None:
    blender = filled(one=False)
    library = in_copies(blender.library(LAYOUT.prefix), one=True)
    assert OtherCorpora(library, None, {}).spare(LAYOUT.chunks) == set(blender.store.keys())


def test_plain_reuse_is_measured_over_isolated_caches() -> None:
    one, two = filled(), filled(one=False)
    library = one.library(LAYOUT.prefix)
    lacking = library.missing(LAYOUT.chunks, isolated=True)
    assert lacking == [Variant(chunk, contextual=False) for chunk in LAYOUT.chunks]
    library.compute(lacking)
    found, expected = (blender.prefill(LAYOUT, config=PLAIN_REUSE) for blender in (one, two))
    assert found.hits == (True,) * 4
    assert torch.equal(found.logits, expected.logits)
    remove_spare(library, LAYOUT.chunks)
    assert one.store.stats().entries == 4


def test_measuring_anew_in_two_copies_leaves_no_map_of_other_chunks() -> None:
    blender = calibrated()
    in_copies(blender.library(LAYOUT.prefix), one=False)
    assert blender.calibrate(LAYOUT.prefix, corpus(40, 10), anew=True)
    assert blender.correction(LAYOUT.prefix, contextual=True, first=True) is None


def test_reports_and_analyses_compare_with_plain_reuse_all_the_same() -> None:
    """Both take it from isolated caches, which they compute; what is compared with it stays in one copy."""
    one, two = filled(), filled(one=False)
    found, expected = (analyze_prompt(blender, LAYOUT).before for blender in (one, two))
    np.testing.assert_array_equal(found.values.squared, expected.values.squared)
    remove_spare(one.library(LAYOUT.prefix), LAYOUT.chunks)
    evaluator = Evaluator(one, PromptTemplate(decoder("llama").tokenizer))
    for methods, count in (([Method("full"), Method("blend", REUSE)], 4), (standard_methods(REUSE), 8)):
        evaluator.cache_chunks(LAYOUT, methods)
        assert one.store.stats().entries == count
    assert one.library(LAYOUT.prefix).open(LAYOUT.chunks).used[0].contextual


def test_the_fit_asks_for_each_cache_once() -> None:
    """An isolated cache is a forward pass: not one a layer."""
    blender = filled()
    library, asked = blender.library(LAYOUT.prefix), list[tuple[Tokens, bool]]()

    def caches(chunks: Sequence[Tokens], *, contextual: bool) -> Sequence[ChunkCache]:
        asked.extend((chunk, contextual) for chunk in chunks)
        return library.caches(chunks, contextual=contextual)

    sources = partial(caches, contextual=True), partial(caches, contextual=False)
    fit_first(blender.decoder, LAYOUT.prefix, LAYOUT.chunks, sources)
    assert len(asked) == len(set(asked)) == 2 * len(LAYOUT.chunks)
