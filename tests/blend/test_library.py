"""The caches behind a prefix: alone for the first chunk of a prompt, contextual for the others, whole under any fault."""

from pathlib import Path

import pytest
import torch
from blends import assert_bits, assert_kv, texts
from cases import cache_of, make_layout
from corrections import by_formula
from dense_reference import assert_close, dense_prefill
from models import decoder, eager_model

from blend.chunks.correction import position_features, rows_of
from blend.chunks.library import ChunkLibrary
from blend.chunks.opened import OpenChunks, caches_of, open_chunks
from blend.chunks.surrogate import with_given_surrogate, with_surrogate, without_surrogate
from blend.config import BlendConfig
from blend.errors import PromptError
from blend.layout import PromptLayout
from blend.prefill.blender import Blender
from blend.store import codec_names, open_store
from blend.types import CacheKey, CacheKind, ChunkCache
from tests.store.reading import path_of

FAMILIES = ("llama", "gemma3", "deepseek-v3")
LAYOUT = make_layout()
REUSE = BlendConfig(selector="none")
AS_STORED = BlendConfig(selector="none", correction=False, surrogate=False)


def corpus(count: int = 24, length: int = 9) -> list[tuple[int, ...]]:
    return texts(*[length] * count, seed=3, below=60)


def empty_library(name: str = "llama", location: str | Path = "memory:", codec: str = "native") -> ChunkLibrary:
    return ChunkLibrary(decoder(name), open_store(location, codec=codec), LAYOUT.prefix)


def filled(name: str = "llama", location: str | Path = "memory:") -> tuple[Blender, ChunkLibrary]:
    """A blender and the library of its store, which holds every cache of the prompt's chunks."""
    blender = Blender(decoder(name), open_store(location))
    library = with_surrogate(blender.library(LAYOUT.prefix), corpus(), 27)
    assert library.contextual
    library.compute(library.missing(LAYOUT.chunks))
    return blender, library


def kinds(opened: OpenChunks) -> list[bool]:
    """Of a prompt with a cache at every place, which of them are contextual."""
    return [chunk.key.kind is CacheKind.CONTEXTUAL for chunk in opened.chunks]


@pytest.mark.parametrize("name", FAMILIES)
def test_contextual_caches_are_those_of_the_model_behind_prefix_and_surrogate(name):
    _, library = filled(name)
    before = (*LAYOUT.prefix, *(token for chunk in library.surrogate for token in chunk))
    with open_chunks(library, LAYOUT) as opened:
        opened.loader.read_all()
        assert kinds(opened) == [False, True, True, True]
    starts = (len(LAYOUT.prefix), *[len(before)] * 3)
    for tokens, chunk, start in zip(LAYOUT.chunks, opened.chunks, starts, strict=True):
        dense = dense_prefill(eager_model(name), (*before[:start], *tokens))
        assert chunk.start == start
        found = [chunk.layer(index, torch.float32) for index in range(len(dense.layers))]
        assert_kv(found, [(keys[0, :, start:], values[0, :, start:]) for keys, values in dense.layers])


@pytest.mark.parametrize("name", FAMILIES)
def test_their_keys_are_moved_back_to_the_prompts_positions(name):
    """In a prompt that begins with the surrogate context itself, what was computed in context is exact."""
    blender, library = filled(name)
    layout = PromptLayout.of_chunks(LAYOUT.prefix, (*library.surrogate, LAYOUT.chunks[1]), LAYOUT.suffix)
    library.compute(library.missing(layout.chunks))
    found = cache_of(blender.prefill(layout, config=REUSE))
    dense = dense_prefill(eager_model(name), layout.token_ids)
    assert_kv(found, dense.layers, slice(*layout.chunk_spans[-1]))


def test_a_prompts_first_chunk_and_full_recompute_are_as_without():
    blender, _ = filled()
    plain, contextual = (cache_of(blender.prefill(LAYOUT, config=config)) for config in (AS_STORED, REUSE))
    assert_kv(contextual, plain, slice(LAYOUT.chunk_spans[0].stop), assert_bits)
    assert not torch.equal(plain[2][0], contextual[2][0])
    dense = dense_prefill(eager_model("llama"), LAYOUT.token_ids)
    assert_close(blender.prefill(LAYOUT, config=BlendConfig("all")).logits[0], dense.logits[-1])


def test_the_surrogate_is_part_of_the_corpus_small_and_stays(tmp_path):
    chunks, library = corpus(), empty_library(location=tmp_path)
    assert not library.decided
    library = with_surrogate(library, chunks, 1000)
    chosen = library.surrogate
    assert len(chosen) == len(chunks) // 8
    assert set(chosen) <= set(chunks)
    again = with_surrogate(empty_library(location=tmp_path), corpus(80), 10)
    assert again.surrogate == chosen
    assert again.contextual.identity == library.contextual.identity
    assert ChunkLibrary(decoder("llama"), open_store(tmp_path), (3, 4)).surrogate == ()


@pytest.mark.parametrize(("count", "tokens"), [(7, 100), (24, 8), (0, 100)])
def test_a_corpus_may_be_too_small_for_one(count, tokens):
    library = with_surrogate(empty_library(), corpus(count), tokens)
    assert library.contextual is None
    assert [key.kind for key in library.variants(corpus(count))] == [CacheKind.ISOLATED] * count


def test_chunks_of_the_surrogate_and_those_too_long_have_no_contextual_cache():
    _, library = filled()
    long = (7,) * (library.decoder.context_length - len(LAYOUT.prefix) - 3)
    chunks = (*library.surrogate, long)
    assert library.variants(chunks) == [CacheKey(chunk, CacheKind.ISOLATED) for chunk in chunks]
    assert with_surrogate(empty_library(), [*corpus(), long], 27).contextual is None


@pytest.mark.parametrize(
    ("chunk", "kinds_lost", "hit"),
    [(2, [CacheKind.CONTEXTUAL], True), (2, [*CacheKind], False), (0, [*CacheKind], False)],
    ids=["in company", "both", "both of the first"],
)
def test_lost_caches_are_made_again(chunk, kinds_lost, hit):
    """Without the one in company the one alone is used."""
    blender, library = filled()
    lost = [CacheKey(LAYOUT.chunks[chunk], kind) for kind in kinds_lost]
    for one in lost:
        library.store.delete(library.key(one))
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert blend.hits == tuple(hit or index != chunk for index in range(4))
    assert set(blend.missing) == set(lost)
    assert blend.problems == ()
    assert blender.remember(blend) == 1
    assert library.missing(LAYOUT.chunks) == []


def test_progress_is_that_of_finished_caches_and_ends_with_all_tokens():
    _, library = filled()
    ticks = []
    total = library.compute(library.variants(corpus(5)), lambda _, done, of: ticks.append((done, of)))
    assert ticks == [(9 * count, total) for count in range(total // 9 + 1)]


def test_nothing_in_company_is_asked_for_where_it_is_switched_off():
    blender, library = filled()
    library.store.prune((), library.contextual.identity.namespace)
    assert blender.prefill(LAYOUT, config=AS_STORED).missing == ()
    assert len(blender.prefill(LAYOUT, config=REUSE).missing) == 3


def test_a_damaged_cache_in_company_gives_way_to_the_one_alone(tmp_path):
    blender, library = filled(location=tmp_path)
    path = path_of(library.store, library.key(CacheKey(LAYOUT.chunks[1], CacheKind.CONTEXTUAL)))
    path.write_bytes(path.read_bytes()[:-1])
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert len(blend.problems) == 1
    assert blend.hits == (True,) * 4
    for contextual in (False, True):
        with open_chunks(library, LAYOUT) as opened:
            assert kinds(opened) == [False, contextual, True, True]
        blender.remember(blend)


UNREADABLE = [
    b"",
    b"{",
    b'{"chunks": [[4, 5000]]}',
    b'{"chunks": [[4, -1]]}',
    b'{"chunks": [[]]}',
    b'{"chunks": 3}',
    b"[" * 9999,
]


@pytest.mark.parametrize(
    "damage", [*UNREADABLE, "file empty", "file cut", "file of another token"], ids=lambda d: d[:30]
)
def test_a_damaged_surrogate_is_reported_not_used_and_chosen_again(tmp_path, damage):
    """One that the model cannot have read, too."""
    _, library = filled(location=tmp_path)
    (path,) = (tmp_path / "artifacts").glob("surrogate-*")
    raw, token = path.read_bytes(), library.surrogate[0][0]
    if isinstance(damage, bytes):
        library.store.write_artifact(library.isolated.identity.surrogate_name, damage)
    else:
        another = raw.replace(b"[[%d" % token, b"[[%d" % ((token + 1) % 60), 1)
        path.write_bytes({"file empty": b"", "file cut": raw[:-9], "file of another token": another}[damage])
    assert path.read_bytes() != raw
    blender = Blender(decoder("llama"), open_store(tmp_path))
    blend = blender.prefill(LAYOUT, config=REUSE)
    assert len(blend.artifact_problems) == 1
    assert blend.hits == (True,) * 4
    assert blend.missing == blend.problems == ()
    assert torch.equal(blend.logits, blender.prefill(LAYOUT, config=AS_STORED).logits)
    again = with_surrogate(empty_library(location=tmp_path), corpus(), 27)
    assert again.surrogate == library.surrogate
    assert again.problems == ()
    assert again.missing(LAYOUT.chunks) == []


def test_a_running_process_takes_up_what_another_one_precomputes(tmp_path):
    running = Blender(decoder("llama"), open_store(tmp_path))
    assert running.prefill(LAYOUT, config=REUSE).hits == (False,) * 4
    other, _ = filled(location=tmp_path)
    other.calibrate(LAYOUT.prefix, corpus(120, 14))
    blend = running.prefill(LAYOUT, config=REUSE)
    assert blend.hits == (True,) * 4
    assert torch.equal(blend.logits, other.prefill(LAYOUT, config=REUSE).logits)
    for kind in CacheKind:
        assert running.correction(LAYOUT.prefix, kind) is not None


def test_each_kind_of_cache_has_a_map_of_its_own():
    blender, library = filled()
    assert blender.calibrate(LAYOUT.prefix, corpus(120, 14))
    isolated, contextual = (blender.correction(LAYOUT.prefix, kind) for kind in CacheKind)
    assert isolated is not contextual
    library.store.delete(library.key(CacheKey(LAYOUT.chunks[3], CacheKind.CONTEXTUAL)))
    configs = (BlendConfig("none", correction=False), REUSE)
    plain, corrected = (cache_of(blender.prefill(LAYOUT, config=config)) for config in configs)
    for span, found in zip(LAYOUT.chunk_spans[1:], (contextual, contextual, isolated), strict=True):
        rows = torch.arange(*span)
        features = position_features(LAYOUT, rows, found.before, found.length)
        layers = zip(found.layers, blender.decoder.rotations, plain, corrected, strict=True)
        for part, turn, *pairs in layers:
            before, after = (rows_of(*(kv[:, :, rows] for kv in pair), turn, rows)[0] for pair in pairs)
            assert_close(after, before if part is None else before + by_formula(part, before, features))


def test_calibration_does_not_need_the_store_to_keep_what_it_computes(tmp_path):
    """A budget of a few caches, far less than the chunks of one prompt."""
    one = caches_of(filled()[1], corpus(1, 14), contextual=False)[0].nbytes
    store = open_store(tmp_path, budget_bytes=3 * one)
    library = with_surrogate(ChunkLibrary(decoder("llama"), store, LAYOUT.prefix), corpus(40, 14), 28)
    chunks = [chunk for chunk in corpus(40, 14) if chunk not in library.surrogate][:8]
    caches = caches_of(library, chunks, contextual=True)
    starts = [len(LAYOUT.prefix), *[len(library.contextual.prefix_tokens)] * 7]
    assert [(cache.tokens, cache.start) for cache in caches] == [(14, start) for start in starts]
    assert store.stats().nbytes <= 3 * one


def test_a_text_that_everybody_may_read_can_be_the_surrogate_context():
    (_, library), given = filled(), (9, 8, 7, 6, 5)
    now = with_given_surrogate(library, given)
    assert now.surrogate == (given,)
    assert now.contextual.prefix_tokens == (*LAYOUT.prefix, *given)
    assert with_given_surrogate(now, given).generation == now.generation
    other = with_given_surrogate(now, (6, 6, 7))
    assert other.contextual.prefix_tokens == (*LAYOUT.prefix, 6, 6, 7), "caches behind the old text are not for it"
    assert without_surrogate(other).contextual is None
    now = with_given_surrogate(library, given)
    assert with_surrogate(now, corpus(), 27).surrogate == (given,)
    with pytest.raises(PromptError, match="empty"):
        with_given_surrogate(library, ())
    with pytest.raises(PromptError, match="reads at most"):
        with_given_surrogate(library, (5,) * library.decoder.context_length)


def test_an_entry_that_is_larger_than_its_tokens_can_make_it_is_not_read():
    """Without a store key anybody can write a header that holds; nothing is fetched for what it says."""
    (_, library), chunk = filled(), LAYOUT.chunks[1]
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
    library = empty_library(name, codec=codec)
    variants = library.variants(corpus(3, 7) + corpus(2, 80))
    library.compute(variants)
    assert sum(map(library.entry_bytes, variants)) == library.store.stats().nbytes


def measured(name: str = "", store=None) -> ChunkLibrary:
    """With two caches behind the surrogate context, and something under the names of everything that is measured."""
    library = ChunkLibrary(decoder("llama"), store or open_store("memory:"), LAYOUT.prefix, corpus=name)
    library = with_surrogate(library, corpus(), 27)
    library.compute([one for one in library.variants(corpus()) if one.kind is CacheKind.CONTEXTUAL][:2])
    for encoder in (library.isolated, library.contextual):
        library.store.write_artifact(encoder.identity.correction_name, b"measured")
    library.store.describe(library.contextual.identity.namespace, {"contextual": "surrogate context"})
    library.store.describe(library.isolated.identity.namespace, {"model": "tiny"})
    return library


@pytest.mark.parametrize(
    "change", [lambda library: with_given_surrogate(library, (9, 8, 7, 6, 5)), without_surrogate], ids=["given", "none"]
)
def test_a_surrogate_context_that_is_replaced_leaves_nothing_behind(change):
    """Neither caches nor what was measured on them, nor words."""
    library = measured()
    isolated, now = library.isolated.identity, change(library)
    assert now.surrogate != library.surrogate
    assert set(now.store.artifacts()) == {isolated.surrogate_name, isolated.correction_name}
    assert set(now.store.namespaces()) == {isolated.namespace}
    assert list(now.store.keys()) == []


def test_what_another_corpus_uses_of_a_surrogate_context_stays():
    library = measured()
    other = measured("legal", library.store)
    assert other.contextual.identity.namespace == library.contextual.identity.namespace
    used = set(library.store.keys())
    without_surrogate(library, lambda: used)
    assert set(library.store.keys()) == used
    assert other.contextual.identity.namespace in library.store.namespaces()
    assert len([name for name in library.store.artifacts() if name.endswith("-legal")]) == 3
