"""Work orders: shares are a partition, balanced by tokens, the same for whoever asks; who is last is told once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from models import decoder

from blend.chunks.library import ChunkLibrary, Tokens
from blend.chunks.surrogate import with_surrogate
from blend.chunks.work import Share, Work, WorkOrder, close, finish, take_up, tokens_of
from blend.errors import ConfigError
from blend.store import ChunkStore, open_store

PREFIX = tuple(range(3, 9))
DRAW = random.Random(5)
CHUNKS = [tuple(DRAW.randrange(3, 90) for _ in range(DRAW.randrange(4, 30))) for _ in range(90)]


def taken_up(store: ChunkStore, chunks: Sequence[Tokens] = CHUNKS) -> Work:
    library = ChunkLibrary(decoder("llama"), store, PREFIX, batch_tokens=64)
    library = with_surrogate(library, chunks, 40)
    return take_up(library, library.variants(chunks))


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_shares_are_a_partition_balanced_by_tokens(of: int) -> None:
    work = taken_up(open_store("memory:"))
    shares = [work.of(Share(number, of)) for number in range(1, of + 1)]
    assert sorted(one for share in shares for one in share) == sorted(work.passes)
    assert sorted(v for one in work.passes for v in one) == sorted(work.variants)
    loads = [sum(map(tokens_of, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(tokens_of, work.passes))
    assert all([one[0].contextual for one in share] == sorted(one[0].contextual for one in share) for share in shares)


def test_whoever_comes_later_finds_the_same_passes_though_some_are_done() -> None:
    store = open_store("memory:")
    first = taken_up(store)
    for one in first.of(Share(2, 3))[:2]:
        first.library.compute_pass(one)
    later = taken_up(store)
    assert later.order == first.order
    assert [later.of(Share(n, 3)) for n in (1, 2, 3)] == [first.of(Share(n, 3)) for n in (1, 2, 3)]
    assert first.library.compute_pass(first.of(Share(2, 3))[0]) == 0
    assert taken_up(store, CHUNKS[:-1]).order != first.order


def test_the_last_one_is_told_once_and_again_after_a_kill() -> None:
    store = open_store("memory:")
    work = taken_up(store)
    assert finish(work, Share(1, 2)) == (True, (2,), False)
    assert finish(work, Share(1, 2)) == (True, (2,), False)
    assert finish(work, Share(2, 2)) == (True, (), True)
    assert finish(work, Share(2, 2)) == (True, (), False)  # its twin
    assert finish(taken_up(store), Share(1, 2)) == (True, (), True)  # started when nobody was left to finish it
    close(work.library)
    assert finish(work, Share(1, 2)) == (False, (), False)
    assert not [name for name in store.artifacts() if name.startswith("work-")]


def test_what_is_left_of_a_half_done_corpus_is_mostly_new_or_not() -> None:
    store = open_store("memory:")
    assert taken_up(store).mostly_new
    work = taken_up(store)
    for one in work.passes:
        work.library.compute_pass(one)
    assert taken_up(store).mostly_new  # as it was when the first began
    close(work.library)
    assert not taken_up(store).mostly_new


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"digest": 1, "missing": "x", "done": []}', b"\xff"])
def test_a_damaged_order_counts_for_nothing(content: bytes) -> None:
    store = open_store("memory:")
    work = taken_up(store)
    store.write_artifact(work.library.isolated.identity.work_name, content)
    assert taken_up(store).order == work.order
    assert WorkOrder.from_bytes(work.order.to_bytes()) == work.order


def test_passes_make_the_bytes_of_one_process() -> None:
    alone, shared = open_store("memory:"), open_store("memory:")
    work, other = taken_up(alone), taken_up(shared)
    work.library.compute(work.variants)
    for share in (Share(2, 2), Share(1, 2)):
        for one in other.of(share):
            other.library.compute_pass(one)
    for key in list(alone.keys()):
        mine, theirs = alone.open(key), shared.open(key)
        assert mine is not None
        assert theirs is not None
        for layer in range(mine.layers):
            assert all(a.equal(b) for a, b in zip(mine.layer(layer), theirs.layer(layer), strict=True))
    assert set(alone.keys()) == set(shared.keys())


@pytest.mark.parametrize("text", ["1/0", "0/1", "2/1", "one/2", "1/2/3", "", "/", "²/3", "1/10001"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 2/4"):
        Share.parse(text)
