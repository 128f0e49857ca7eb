"""The caches behind a prefix: alone for the first chunk of a prompt, contextual for the others, whole under any fault."""

import os
from pathlib import Path

import pytest
import torch
from cases import make_layout
from corrections import by_formula
from dense_reference import assert_close, dense_prefill
from models import decoder, eager_model

from blend.chunks.correction import position_features, rows_of
from blend.chunks.library import ChunkLibrary
from blend.chunks.opened import OpenChunks, caches_of, open_chunks
from blend.chunks.surrogate import with_given_surrogate, with_surrogate
from blend.config import BlendConfig
from blend.errors import PromptError
from blend.prefill.blender import Blender
from blend.store import codec_names, open_store
from blend.types import CacheKey, CacheKind, ChunkCache, PromptLayout

FAMILIES = ("llama", "gemma3", "deepseek-v3")
LAYOUT = make_layout()
ALL = BlendConfig(selector="all")
REUSE = BlendConfig(selector="none")
AS_STORED = BlendConfig(selector="none", correction=False, surrogate=False)


def corpus(count: int = 24, length: int = 9) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(3, 60, (length,), generator=draw).tolist()) for _ in range(count)]


def filled(name: str = "llama", location: str | Path = "memory:") -> Blender:
    """A blender whose store holds every cache of the prompt's chunks."""
    blender = Blender(decoder(name), open_store(location, codec="native"))
    library = blender.library(LAYOUT.prefix)
    library = with_surrogate(library, corpus(), 27)
    assert library.contextual
    library.compute(library.missing(LAYOUT.chunks))
    return blender


def kinds(opened: OpenChunks) -> list[bool]:
    """Of a prompt with a cache at every place, which of them are contextual."""
    return [chunk.key.kind is CacheKind.CONTEXTUAL for chunk in opened.chunks]


@pytest.mark.parametrize("name", FAMILIES)
def test_contextual_caches_are_those_of_the_model_behind_prefix_and_surrogate(name):
    library = filled(name).library(LAYOUT.prefix)
    before = (*LAYOUT.prefix, *(token for chunk in library.surrogate for token in chunk))
    with open_chunks(library, LAYOUT) as opened:
        opened.loader.read_all()
        assert kinds(opened) == [False, True, True, True]
    starts = (len(LAYOUT.prefix), *[len(before)] * 3)
    for tokens, chunk, start in zip(LAYOUT.chunks, opened.chunks, starts, strict=True):
        dense = dense_prefill(eager_model(name), (*before[:start], *tokens))
        assert chunk.start == start
        for index, (dense_keys, dense_values) in enumerate(dense.layers):
            keys, values = chunk.layer(index, torch.float32)
            assert_close(keys, dense_keys[0, :, start:])
            assert_close(values, dense_values[0, :, start:])


@pytest.mark.parametrize("name", FAMILIES)
def test_their_keys_are_moved_back_to_the_prompts_positions(name):
    """In a prompt that begins with the surrogate context itself, what was computed in context is exact."""
    blender = filled(name)
    library = blender.library(LAYOUT.prefix)
    layout = PromptLayout.of_chunks(LAYOUT.prefix, (*library.surrogate, LAYOUT.chunks[1]), LAYOUT.suffix)
    library.compute(library.missing(layout.chunks))
    cache = blender.prefill(layout, config=REUSE).cache
    dense = dense_prefill(eager_model(name), layout.token_ids)
    span = slice(*layout.chunk_spans[-1])
    for index, kv in enumerate(dense.layers):
        for got, expected in zip(cache.view(index), kv, strict=True):
            assert_close(got[0, :, span], expected[0, :, span])


def test_a_prompts_first_chunk_and_full_recompute_are_as_without():
    blender = filled()
    plain = blender.prefill(LAYOUT, config=AS_STORED).cache
    contextual = blender.prefill(LAYOUT, config=REUSE).cache
    first = slice(0, LAYOUT.chunk_spans[0].stop)
    for index in range(len(plain.layers)):
        for one, other in zip(plain.view(index), contextual.view(index), strict=True):
            assert torch.equal(one[:, :, first], other[:, :, first])
    assert not torch.equal(plain.view(2)[0], contextual.view(2)[0])
    dense = dense_prefill(eager_model("llama"), LAYOUT.token_ids)
    assert_close(blender.prefill(LAYOUT, config=ALL).logits[0], dense.logits[-1])


def test_the_surrogate_is_part_of_the_corpus_small_and_stays(tmp_path):
    chunks = corpus()
    library = ChunkLibrary(decoder("llama"), open_store(tmp_path), LAYOUT.prefix)
    assert not library.decided
    library = with_surrogate(library, chunks, 1000)
    chosen = library.surrogate
    assert len(chosen) == len(chunks) // 8
    assert set(chosen) <= set(chunks)
    again = with_surrogate(ChunkLibrary(decoder("llama"), open_store(tmp_path), LAYOUT.prefix), corpus(80), 10)
    assert again.surrogate == chosen
    assert again.contextual.identity == library.contextual.identity
    assert ChunkLibrary(decoder("llama"), open_store(tmp_path), (3, 4)).surrogate == ()


@pytest.mark.parametrize(("count", "tokens"), [(7, 100), (24, 8), (0, 100)])
def test_a_corpus_may_be_too_small_for_one(count, tokens):
    library = with_surrogate(
        ChunkLibrary(decoder("llama"), open_store("memory:"), LAYOUT.prefix), corpus(count), tokens
    )
    assert library.contextual is None
    assert [key.kind for key in library.variants(corpus(count))] == [CacheKind.ISOLATED] * count


def test_chunks_of_the_surrogate_and_those_too_long_have_no_contextual_cache():
    library = filled().library(LAYOUT.prefix)
    context = library.decoder.context_length
    long = tuple([7] * (context - len(LAYOUT.prefix) - 3))
    assert library.variants([*library.surrogate, long]) == [
        CacheKey(chunk, CacheKind.ISOLATED) for chunk in (*library.surrogate, long)
    ]
    empty = ChunkLibrary(library.decoder, open_store("memory:"), LAYOUT.prefix)
    assert with_surrogate(empty, [*corpus(), long], 27).contextual is None


def test_without_the_cache_in_company_the_one_alone_is_used_and_the_other_made_up_for():
    blender = filled()
    library = blender.library(LAYOUT.prefix)
    lost = CacheKey(LAYOUT.chunks[2], CacheKind.CONTEXTUAL)
    library.store.delete(library.key(lost))
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert blend.hits == (True,) * 4
    assert blend.missing == (lost,)
    assert blender.remember(blend) == 1
    assert blender.prefill(LAYOUT, config=REUSE).missing == ()


def test_a_chunk_that_is_not_stored_gets_both_caches():
    blender = filled()
    library = blender.library(LAYOUT.prefix)
    for one in library.variants(LAYOUT.chunks[:2]):
        library.store.delete(library.key(one))
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert blend.hits == (False, False, True, True)
    assert blend.problems == ()
    assert blender.remember(blend) == 2
    assert library.missing(LAYOUT.chunks) == []


def test_progress_is_that_of_finished_caches_and_ends_with_all_tokens():
    library = filled().library(LAYOUT.prefix)
    ticks: list[tuple[int, int]] = []
    total = library.compute(library.variants(corpus(5)), lambda _, done, of: ticks.append((done, of)))
    assert ticks == [(9 * count, total) for count in range(total // 9 + 1)]


def test_nothing_in_company_is_asked_for_where_it_is_switched_off():
    blender = filled()
    library = blender.library(LAYOUT.prefix)
    library.store.prune((), library.contextual.identity.namespace)
    assert blender.prefill(LAYOUT, config=AS_STORED).missing == ()
    assert len(blender.prefill(LAYOUT, config=REUSE).missing) == 3


def test_a_damaged_cache_in_company_gives_way_to_the_one_alone(tmp_path):
    blender = filled(location=tmp_path)
    library = blender.library(LAYOUT.prefix)
    (path,) = tmp_path.rglob(f"{library.key(CacheKey(LAYOUT.chunks[1], CacheKind.CONTEXTUAL)).digest}*")
    os.truncate(path, path.stat().st_size - 1)
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert len(blend.problems) == 1
    assert blend.hits == (True,) * 4
    with open_chunks(library, LAYOUT) as opened:
        assert kinds(opened) == [False, False, True, True]
    assert blender.remember(blend) == 1
    with open_chunks(library, LAYOUT) as opened:
        assert kinds(opened) == [False, True, True, True]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"chunks": [[4, 5000]]}',
        b'{"chunks": [[4, -1]]}',
        b'{"chunks": [[]]}',
        b'{"chunks": 3}',
        b"[" * 9999,
    ],
)
def test_a_surrogate_that_the_model_cannot_have_read_is_reported_and_not_used(tmp_path, content):
    library = filled(location=tmp_path).library(LAYOUT.prefix)
    library.store.write_artifact(library.isolated.identity.surrogate_name, content)
    _assert_answers_from_caches_alone(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "cut", "one token"])
def test_a_damaged_surrogate_is_reported_not_used_and_chosen_again(tmp_path, damage):
    library = filled(location=tmp_path).library(LAYOUT.prefix)
    (path,) = (tmp_path / "artifacts").glob("surrogate-*")
    raw, token = path.read_bytes(), str(library.surrogate[0][0]).encode()
    changed = raw.replace(b"[[" + token, b"[[" + str((int(token) + 1) % 60).encode(), 1)
    path.write_bytes({"empty": b"", "cut": raw[:-9], "one token": changed}[damage])
    assert path.read_bytes() != raw
    _assert_answers_from_caches_alone(tmp_path)
    again = with_surrogate(ChunkLibrary(library.decoder, open_store(tmp_path), LAYOUT.prefix), corpus(), 27)
    assert again.surrogate == library.surrogate
    assert again.problems == ()
    assert again.missing(LAYOUT.chunks) == []


def _assert_answers_from_caches_alone(location: Path) -> None:
    blender = Blender(decoder("llama"), open_store(location))
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert len(blend.artifact_problems) == 1
    assert blend.hits == (True,) * 4
    assert blend.missing == blend.problems == ()
    assert torch.equal(blend.logits, blender.prefill(LAYOUT, config=AS_STORED).logits)


def test_a_running_process_takes_up_what_another_one_precomputes(tmp_path):
    running = Blender(decoder("llama"), open_store(tmp_path, codec="native"))
    assert running.prefill(LAYOUT, config=REUSE).hits == (False,) * 4
    other = filled(location=tmp_path)
    other.calibrate(LAYOUT.prefix, corpus(120, 14))
    blend = running.prefill(LAYOUT, config=REUSE)
    assert blend.hits == (True,) * 4
    assert torch.equal(blend.logits, other.prefill(LAYOUT, config=REUSE).logits)
    for kind in CacheKind:
        assert running.correction(LAYOUT.prefix, kind) is not None


def test_each_kind_of_cache_has_a_map_of_its_own():
    blender = filled()
    library = blender.library(LAYOUT.prefix)
    assert blender.calibrate(LAYOUT.prefix, corpus(120, 14))
    maps = [blender.correction(LAYOUT.prefix, kind) for kind in CacheKind]
    assert None not in maps
    assert maps[0] is not maps[1]
    rows = torch.arange(LAYOUT.chunk_spans[1].start, LAYOUT.context.stop)
    library.store.delete(library.key(CacheKey(LAYOUT.chunks[3], CacheKind.CONTEXTUAL)))
    got = blender.prefill(LAYOUT, config=REUSE).cache
    plain = blender.prefill(LAYOUT, config=BlendConfig(selector="none", correction=False)).cache
    for span, found in zip(LAYOUT.chunk_spans[1:], (maps[1], maps[1], maps[0]), strict=True):
        mine = rows[(rows >= span.start) & (rows < span.stop)]
        features = position_features(LAYOUT, mine, found.before, found.length)
        for index, (part, turn) in enumerate(zip(found.layers, blender.decoder.rotations, strict=True)):
            still, there = (
                rows_of(*(kv[:, :, mine] for kv in cache.view(index)), turn, mine)[0] for cache in (plain, got)
            )
            assert_close(there, still if part is None else still + by_formula(part, still, features))


def test_calibration_does_not_need_the_store_to_keep_what_it_computes(tmp_path):
    """A budget of a few caches, far less than the chunks of one prompt."""
    one = caches_of(filled().library(LAYOUT.prefix), corpus(1, 14), contextual=False)[0].nbytes
    store = open_store(tmp_path, codec="native", budget_bytes=3 * one)
    blender = Blender(decoder("llama"), store)
    library = with_surrogate(blender.library(LAYOUT.prefix), corpus(40, 14), 28)
    chunks = [chunk for chunk in corpus(40, 14) if chunk not in library.surrogate][:8]
    caches = caches_of(library, chunks, contextual=True)
    assert [(cache.tokens, cache.start) for cache in caches] == [
        (14, len(LAYOUT.prefix)),
        *[(14, len(library.contextual.prefix_tokens))] * 7,
    ]
    assert store.stats().nbytes <= 3 * one


def test_a_text_that_everybody_may_read_can_be_the_surrogate_context():
    library, given = filled().library(LAYOUT.prefix), (9, 8, 7, 6, 5)
    chosen, before = library.surrogate, library.contextual.identity.namespace
    now = with_given_surrogate(library, given)
    assert now.surrogate == (given,)
    assert now.contextual.prefix_tokens == (*LAYOUT.prefix, *given)
    assert list(now.store.keys(before)) == []
    assert not set(chosen) & set(now.surrogate)
    assert with_given_surrogate(now, given).generation == now.generation
    assert with_surrogate(now, corpus(), 27).surrogate == (given,)
    with pytest.raises(PromptError, match="empty"):
        with_given_surrogate(library, ())
    with pytest.raises(PromptError, match="reads at most"):
        with_given_surrogate(library, (5,) * library.decoder.context_length)


def test_an_entry_that_is_larger_than_its_tokens_can_make_it_is_not_read():
    """Without a store key anybody can write a header that holds; nothing is fetched for what it says."""
    library, chunk = filled().library(LAYOUT.prefix), LAYOUT.chunks[1]
    cache = caches_of(library, [chunk], contextual=False)[0]
    wide = tuple(torch.zeros(part.shape[0], part.shape[1], 1 << 12) for part in cache.keys)
    one = CacheKey(chunk, CacheKind.ISOLATED)
    library.store.put(library.key(one), ChunkCache(wide, wide, cache.start))
    assert library.store.open(library.key(one)).stored_bytes > 1 << 20
    with open_chunks(library, PromptLayout.of_chunks(LAYOUT.prefix, (chunk,), ()), contextual=False) as opened:
        assert opened.missing == (one,)
        assert f"bytes, one of {len(chunk)} tokens at most" in opened.problems[0]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("llama", codec) for codec in codec_names()),
        *((name, "int4") for name in ("gemma3n", "deepseek-v3", "qwen3-next", "falcon-h1")),
    ],
)
def test_the_bytes_of_an_entry_are_known_before_it_is_made(name, codec):
    store = open_store("memory:", codec=codec)
    library = ChunkLibrary(decoder(name), store, LAYOUT.prefix)
    variants = library.variants(corpus(3, 7) + corpus(2, 80))
    library.compute(variants)
    assert sum(map(library.entry_bytes, variants)) == store.stats().nbytes
