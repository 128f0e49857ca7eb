"""The tier of memory: a cache that a prompt read is in memory once, is what the store holds, and stays within the budget."""

import time

import pytest
import torch
from cases import assert_same_blend, cache_chunks, cache_of, make_layout
from models import decoder
from reading import damage_caches, flip, in_threads, path_of, watched

from blend.chunks.opened import caches_of, open_chunks
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.layout import PromptLayout
from blend.prefill.blender import Blender
from blend.store import ChunkPool, ChunkReader, ChunkStore, open_store
from blend.store.admin import verify_entry
from blend.store.backend import cache_name
from blend.types import ChunkCache, ChunkKey

MB = 1 << 20
TOKEN = 1024  # bytes of a token in the memory of the tiny llama
REUSE = BlendConfig("none", correction=False)
LAYOUT = make_layout()
PREFIX, CHUNKS = LAYOUT.prefix, LAYOUT.chunks


def blender_of(store):
    return Blender(decoder("llama"), store, REUSE)


def filled(store):
    """With the caches of the prompt's chunks in the store."""
    return cache_chunks(blender_of(store), LAYOUT)


def asking(*chunks):
    return PromptLayout.of_chunks(PREFIX, chunks, LAYOUT.suffix)


def address(blender, chunk):
    return blender.encoder(PREFIX).identity.key(chunk)


def put(blender, chunk, mark):
    """Store a cache of the chunk whose every number is this mark."""
    part = (torch.full((2, len(chunk), 16), float(mark)),) * 4
    blender.store.put(address(blender, chunk), ChunkCache(part, part, start=len(PREFIX)))


def mark_of(chunk):
    """The one number in a chunk's memory."""
    (mark,) = torch.cat([part.flatten() for part in (*chunk.kv.keys, *chunk.kv.values)]).unique().tolist()
    return float(mark)


def used(blender, chunk):
    """Read by a prompt; the mark of the cache that it placed, or None for a miss."""
    blend = blender.prefill(asking(chunk))
    if not blend.hits[0]:
        return None
    values = torch.stack([layer[1] for layer in cache_of(blend)])
    (mark,) = values[..., slice(*blend.layout.chunk_spans[0]), :].unique().tolist()
    return float(mark)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", memory_bytes=MB)


@pytest.fixture
def opened(monkeypatch):
    """Every key that stores are asked for from now on."""
    asked: list[ChunkKey] = []
    plain = ChunkStore.open_many

    def open_many(self, keys):
        asked.extend(keys)
        return plain(self, keys)

    monkeypatch.setattr(ChunkStore, "open_many", open_many)
    return asked


def test_caches_that_a_prompt_read_are_in_memory_for_later_prompts(store, opened):
    blender = filled(store)
    assert store.memory == (0, 0, 0, 0, 0, MB)
    first = blender.prefill(LAYOUT)
    nbytes = LAYOUT.context.length * TOKEN
    assert store.memory == (0, 4, 0, 4, nbytes, MB)
    assert set(opened) == {address(blender, chunk) for chunk in CHUNKS}
    opened.clear()
    again = blender.prefill(LAYOUT)
    other = blender_of(store).prefill(asking(*CHUNKS[::-1], CHUNKS[0]))
    assert opened == []
    assert_same_blend(again, first)
    assert other.hits == (True,) * 5
    assert store.memory == (9, 4, 0, 4, nbytes, MB)


def test_what_no_prompt_used_to_its_end_brings_nothing_in(store, monkeypatch):
    blender = filled(store)
    key, library = address(blender, CHUNKS[0]), blender.library(PREFIX)
    assert key in store
    assert verify_entry(store, cache_name(key)) == ""
    with store.open(key) as reader:
        _ = [reader.layer(index) for index in range(reader.layers)]
    with open_chunks(library, LAYOUT) as opened:
        opened.loader.read_all()
    assert caches_of(library, CHUNKS, contextual=False)
    assert store.memory[:4] == (0, 0, 0, 0)

    def before(index):
        if index == 2:
            raise StoreError("the network is down")

    watched(store, monkeypatch, before)
    with pytest.raises(StoreError, match="the network is down"):
        blender.prefill(LAYOUT)
    assert store.memory[:4] == (0, 0, 0, 0), "a part of it"


def test_few_bits_stay_few_in_memory(tmp_path):
    most = {"native": 1.0, "int8": 0.35, "int4": 0.25}
    for codec, share in most.items():
        store = open_store(tmp_path / codec, codec=codec, memory_bytes=MB)
        blender = blender_of(store)
        library = blender.library(PREFIX)
        library.compute(library.missing(CHUNKS))
        first = blender.prefill(LAYOUT)
        assert store.memory.entries == 4
        assert store.memory.nbytes <= share * LAYOUT.context.length * TOKEN
        assert_same_blend(blender.prefill(LAYOUT), first)


def chunk_of(number):
    return tuple(3 + (7 * number + j * (number + 1)) % 90 for j in range(40))


def holding(tmp_path, count):
    """A store of six marked caches, with memory for so many of them."""
    blender = blender_of(open_store(tmp_path / "store", memory_bytes=count * 40 * TOKEN))
    for number in range(6):
        put(blender, chunk_of(number), number)
    return blender


def test_the_least_recently_used_go_and_the_budget_holds(tmp_path):
    blender = holding(tmp_path, 3)
    store, budget = blender.store, 3 * 40 * TOKEN
    for number in (0, 1, 2, 0, 3):
        assert used(blender, chunk_of(number)) == number
        assert store.memory.nbytes <= budget
    assert store.memory == (1, 4, 1, 3, budget, budget)
    for number in (2, 3, 0):
        used(blender, chunk_of(number))
    assert store.memory.hits == 4
    assert used(blender, chunk_of(1)) == 1
    assert store.memory == (4, 5, 2, 3, budget, budget), "it had gone"


def test_what_a_prompt_uses_stays_until_it_ends(tmp_path, opened):
    blender = holding(tmp_path, 2)
    used(blender, chunk_of(0))
    with open_chunks(blender.library(PREFIX), asking(chunk_of(0))) as prompt:
        for number in (1, 2, 3, 4):
            used(blender, chunk_of(number))
        assert mark_of(prompt.chunks[0]) == 0
        opened.clear()
        assert used(blender, chunk_of(0)) == 0
        assert opened == []
    used(blender, chunk_of(5))
    used(blender, chunk_of(4))
    opened.clear()
    used(blender, chunk_of(0))
    assert opened == [address(blender, chunk_of(0))]
    assert blender.store.memory.nbytes <= 2 * 40 * TOKEN


def test_what_memory_serves_is_used_last_for_the_budget_of_the_disk_too(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    sizing = blender_of(open_store(tmp_path / "one"))
    put(sizing, chunk_of(0), 0)
    size = sizing.store.stats().nbytes
    store = open_store(tmp_path / "store", budget_bytes=int(3.5 * size), memory_bytes=MB)
    blender = blender_of(store)
    for number in range(3):
        put(blender, chunk_of(number), number)
        now += 10
    for number in (0, 1, 2, 0):  # the last one out of memory
        used(blender, chunk_of(number))
        now += 10
    put(blender, chunk_of(3), 3)
    assert set(store.keys()) == {address(blender, chunk_of(number)) for number in (0, 2, 3)}


def test_what_is_replaced_or_deleted_is_gone_at_once_but_for_the_prompt_that_uses_it(store):
    blender, chunk = blender_of(store), CHUNKS[0]
    for mark in (1, 2):
        put(blender, chunk, mark)
        assert store.memory[3:5] == (0, 0)
        assert used(blender, chunk) == mark
    with open_chunks(blender.library(PREFIX), asking(chunk)) as opened:
        store.delete(address(blender, chunk))
        assert store.memory[3:5] == (0, 0)
        assert used(blender, chunk) is None
        assert mark_of(opened.chunks[0]) == 2


@pytest.mark.parametrize("location", ["disk", "memory:"])
def test_what_was_replaced_while_it_was_opened_or_read_does_not_come_in(tmp_path, location, monkeypatch):
    store = open_store(location if location == "memory:" else tmp_path / "store", memory_bytes=MB)
    blender, chunk = blender_of(store), CHUNKS[0]
    put(blender, chunk, 1)
    with open_chunks(blender.library(PREFIX), asking(chunk)) as opened:
        put(blender, chunk, 2)
        opened.loader.read_all()
        opened.keep()
        assert mark_of(opened.chunks[0]) == 1
    put(blender, chunk, 3)
    opening = store.open_many

    def open_many(keys):
        found = opening(keys)
        put(blender, chunk, 4)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(store, "open_many", open_many)
        assert used(blender, chunk) == 3
    assert used(blender, chunk) == 4


def test_what_is_stored_while_other_prompts_run_comes_in(store, opened):
    """On a busy server some prompt always runs."""
    blender = filled(store)
    with open_chunks(blender.library(PREFIX), LAYOUT):
        put(blender, chunk_of(1), 1)
        used(blender, chunk_of(1))
        opened.clear()
        assert used(blender, chunk_of(1)) == 1
        assert opened == []


def test_another_processs_changes_are_seen_from_the_next_generation_on(tmp_path, store):
    other, blender = blender_of(open_store(tmp_path / "store")), blender_of(store)
    one, two = CHUNKS[0], CHUNKS[1]
    for chunk in (one, two):
        put(blender, chunk, 1)
        assert used(blender, chunk) == 1
    put(other, one, 2)
    other.store.delete(address(blender, two))
    assert (used(blender, one), used(blender, two)) == (1, 1), "nothing says so yet"
    other.store.advance()
    assert (used(blender, one), used(blender, two)) == (2, None)
    assert store.memory.entries == 1
    kept = address(blender, one)
    put(other, one, 3)
    other.store.prune([kept], kept.namespace)
    assert used(blender, one) == 2, "nothing was pruned"
    put(other, two, 3)
    other.store.prune([kept], kept.namespace)
    assert used(blender, one) == 3


def test_what_is_read_while_another_process_replaces_it_is_not_served_afterwards(tmp_path, store):
    """A prompt of before the change ends after one that saw it."""
    other, blender, chunk = blender_of(open_store(tmp_path / "store")), blender_of(store), CHUNKS[0]
    put(blender, chunk, 1)
    with open_chunks(blender.library(PREFIX), asking(chunk)) as before:
        put(other, chunk, 2)
        other.store.advance()
        assert used(blender, chunk) == 2
        before.loader.read_all()
        before.keep()
    assert used(blender, chunk) == 2


def test_after_a_change_each_cache_is_checked_once_and_not_read(store, opened, monkeypatch):
    blender = filled(store)
    first = blender.prefill(LAYOUT)
    store.write_artifact("a-map", b"content")
    opened.clear()
    monkeypatch.setattr(ChunkReader, "read_into", lambda *args: pytest.fail("it is read"))
    assert_same_blend(blender.prefill(LAYOUT), first)
    assert sorted(opened) == sorted(address(blender, chunk) for chunk in CHUNKS)
    opened.clear()
    assert_same_blend(blender.prefill(LAYOUT), first)
    assert opened == []
    assert store.memory[:2] == (8, 4)


def test_damage_on_the_disk_reaches_no_cache_in_memory_and_no_other_comes_in(tmp_path, store):
    blender = filled(store)
    first = blender.prefill(LAYOUT)
    damage_caches(tmp_path / "store")
    assert_same_blend(blender.prefill(LAYOUT), first)
    store.advance()
    assert_same_blend(blender.prefill(LAYOUT), first)  # the same entry, by its header
    flip(path_of(store, address(blender, CHUNKS[1])), 60)
    store.advance()
    for _ in range(2):
        blend = blender.prefill(LAYOUT)
        assert blend.hits == (True, False, True, True)
        assert len(blend.problems) == 1
    fresh = blender_of(open_store(tmp_path / "store", memory_bytes=MB))
    assert not any(fresh.prefill(LAYOUT).hits)
    assert fresh.store.memory.entries == 0


def test_a_store_that_is_gone_is_an_outage_whatever_is_in_memory(tmp_path, store):
    blender = filled(store)
    first = blender.prefill(LAYOUT)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is gone"):
        blender.prefill(LAYOUT)
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert_same_blend(blender.prefill(LAYOUT), first)


def test_stores_that_share_memory_keep_their_entries_apart(tmp_path):
    pool = ChunkPool(MB)
    one, two = (blender_of(open_store(tmp_path / name, memory_bytes=pool)) for name in ("one", "two"))
    again = blender_of(open_store(tmp_path / "one", memory_bytes=pool, key=b"another one's key"))
    chunk = CHUNKS[0]
    put(one, chunk, 1)
    put(two, chunk, 2)
    for _ in range(2):
        assert (used(one, chunk), used(two, chunk), used(again, chunk)) == (1, 2, None)
    assert pool.stats[:4] == (2, 2, 0, 2)
    one.store.delete(address(one, chunk))
    assert (used(one, chunk), used(two, chunk)) == (None, 2)


def test_prompts_and_writers_in_eight_threads(tmp_path):
    """Each does everything that can be done to eleven entries."""
    budget = 6 * 40 * TOKEN
    store = open_store(tmp_path / "store", memory_bytes=budget, budget_bytes=2 * MB)

    def work(seed):
        blender = blender_of(store)
        for step in range(40):
            number = (5 * seed + step * step) % 11
            if (seed + step) % 5 == 0:
                put(blender, chunk_of(number), 100 * number + seed)
            elif (seed + step) % 13 == 0:
                store.delete(address(blender, chunk_of(number)))
            else:
                mark = used(blender, chunk_of(number))
                assert mark is None or mark // 100 == number

    in_threads(8, work)
    assert store.memory.hits > 20
    assert store.memory.nbytes <= budget
    blender, fresh = blender_of(store), blender_of(open_store(tmp_path / "store"))
    for number in range(11):
        assert used(blender, chunk_of(number)) == used(fresh, chunk_of(number))
        store.delete(address(blender, chunk_of(number)))
        assert used(blender, chunk_of(number)) is None
    assert store.memory[3:5] == (0, 0)
