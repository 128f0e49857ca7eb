"""A prefix cache that many threads use at a time: rows stay right and counted, and the budget holds."""

import random
import time

import pytest
import torch
from test_prefixes import ROW, cache_of, check

from blend.serve.engine.prefixes import Conversation, PrefixCache
from blend.serve.request import RequestOrigin
from blend.types import ChunkCache
from tests.store.reading import in_threads

THREADS = 8
OWNERS = ("", "ann")
SESSIONS = ("mill", "quay", "weir")


class Token(int):
    """Lets another thread go on whenever it is looked up, so also amid what a thread does alone."""

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


TOKENS = (Token(1), Token(2))


def assert_rows(cache: ChunkCache, ids: tuple[int, ...], start: int = 0) -> None:
    """These are the rows of these tokens, from row `start` on."""
    rows = slice(start, start + cache.tokens)
    layer = cache_of(ids).layers[0]
    assert torch.equal(cache.keys[0][0], layer.keys[0, 0, rows])
    assert torch.equal(cache.values[0][0], layer.values[0, 0, rows])


def work(prefixes: PrefixCache, seed: int) -> None:
    """Add, find and drop rows of random prompts. Few tokens: prompts often begin alike, so runs are split and joined."""
    draw = random.Random(seed)
    for _ in range(40):
        owner, session = draw.choice(OWNERS), draw.choice(SESSIONS)
        origin = RequestOrigin(session=session, client=owner)
        ids = tuple(draw.choices(TOKENS, k=draw.randrange(3, 9)))
        length = draw.randrange(1, len(ids) - 1)
        conversation = Conversation(owner, ids[:length], ids[length:])
        prefixes.keep(owner, ids, cache_of(ids), origin)
        prefixes.keep_conversation(conversation, cache_of(ids), length, origin=origin)
        turn = (*ids, 1)
        if prefix := prefixes.find(owner, turn):
            assert_rows(prefix.cache, turn)
        start = draw.randrange(length)
        for whose in (conversation, Conversation(owner, ids, ())):  # rows that it blended, and exact ones
            if rows := prefixes.rows_of(whose, start, length):
                assert rows.tokens == length - start
                assert_rows(rows, ids, start)
        if draw.random() < 0.3:
            prefixes.drop_blended(conversation)
        if draw.random() < 0.2:
            assert prefixes.forget(owner, origin.users_session) >= 0
        assert prefixes.nbytes >= 0


@pytest.mark.parametrize("rows", [40, 1 << 20], ids=["too small for all", "room for all"])
def test_threads_share_it(rows: int) -> None:
    prefixes = PrefixCache(ROW * rows)
    in_threads(THREADS, lambda number: work(prefixes, number))
    assert 0 < prefixes.nbytes <= ROW * rows
    assert (prefixes.evictions > 0) == (rows == 40)
    # What is counted is what is there: without its sessions nothing is left, and the budget is free again.
    for owner in OWNERS:
        for session in SESSIONS:
            prefixes.forget(owner, RequestOrigin(session=session).users_session)
    assert prefixes.nbytes == 0
    ids = tuple(range(1, 21))
    prefixes.keep("", ids, cache_of(ids))
    check(prefixes, (*ids, 0), len(ids))
    assert prefixes.nbytes == ROW * len(ids)
