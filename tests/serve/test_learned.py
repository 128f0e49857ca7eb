"""Text that requests brought: its caches, computed apart from their prompts, within a budget that outlives the process."""

import random
import sqlite3
import stat
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic
from unittest.mock import Mock

import pytest
import torch
from learned_bench import SIZE, Bench, change, size_of_text, text

from blend.errors import StoreError
from blend.serve.prompts.learned import Forgotten, LearnedCaches, Wish
from blend.serve.removed import KEEP_S, RemovedKeys, removed_from
from blend.serve.request import RequestOrigin
from blend.serve.shares import ACTIVE_S
from blend.store.backend import pin_cache
from blend.types import ChunkKey
from tests.store.reading import in_threads


@pytest.mark.parametrize("name", ["llama", "bamba"])
@pytest.mark.parametrize("codec", ["native", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_that_count_are_those_of_the_store(tmp_path: Path, name: str, codec: str, dtype: torch.dtype) -> None:
    bench = Bench(tmp_path, codec=codec, dtype=dtype, name=name)
    bench.learn(text(1), text(2, 100))
    stats = bench.store.stats()
    assert (stats.entries, stats.nbytes) == (2, pytest.approx(bench.learned.nbytes, rel=0.02))


def test_a_new_process_finds_the_same_and_evicts_in_the_same_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 5)
    for number in range(4):
        bench.learn(text(number))
    bench.use(text(0))
    again = Bench(tmp_path, 5)
    assert (len(again.learned), again.learned.nbytes) == (4, 4 * size_of_text())
    asked = tuple(token for number in range(4) for token in (*text(number), 7))
    assert again.found(asked) == bench.found(asked) == [(65 * n, 65 * n + 64, 0) for n in range(4)]
    for number in range(4, 8):
        again.recur(number)
        held = again.hits(*map(text, range(8)))
        assert sum(held) <= 5
        assert held[number]
    assert again.hits(*map(text, range(4))) == [True, False, False, False], "1, 2 and 3 were used less lately"
    files = list(tmp_path.glob("learned*"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]


def test_a_smaller_budget_holds_for_all_users_from_the_first_request_on(tmp_path: Path) -> None:
    bench, users = Bench(tmp_path), range(6)
    for number in users:
        bench.learn(text(number), user=str(number))
    small = Bench(tmp_path, 3)
    small.use()
    found = [bool(small.found(text(number), str(number))) for number in users]
    assert small.store.stats().entries == len(small.learned) == sum(found) == 3
    tiny = Bench(tmp_path, 0.99)
    tiny.learn(text(7))
    assert (tiny.store.stats().entries, len(tiny.learned), tiny.found(text(7))) == (0, 0, [])


def test_each_user_finds_the_texts_that_the_user_brought(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    first.learn(text(1), text(2), user="ada")
    first.learn(text(2), text(3), user="bob")
    first.learn(text(4))
    theirs = {"ada": {1, 2}, "bob": {2, 3}, "eve": set(), "": {4}}
    for bench in (first, Bench(tmp_path)):
        for user, numbers in theirs.items():
            assert bench.finds(range(5), user) == [number in numbers for number in range(5)]
    assert first.store.stats().entries == 4, "a function of the tokens alone is stored once"


def test_a_cache_stays_until_the_last_of_its_users_texts_goes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for user in ("ada", "bob"):
        bench.learn(text(1), user=user)
    bench.learned.drop(bench.store, [text(1), text(2)], "ada")
    assert (bench.found(text(1), "ada"), bool(bench.found(text(1), "bob")), bench.hits(text(1))) == ([], True, [True])
    bench.learned.drop(bench.store, [text(1)], "bob")
    assert bench.hits(text(1)) == [False]
    for user in ("ada", "bob"):
        bench.learn(text(1), user=user)
    bench.learned.forget(bench.store, [text(1)])
    assert (len(bench.learned), bench.learned.nbytes, bench.store.stats().entries) == (0, 0, 0)


@pytest.mark.parametrize("what", ["text", "session"])
def test_a_deletion_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    bench = Bench(tmp_path)

    def remove() -> None:
        if what == "text":
            bench.learned.forget(bench.store, [text(1)])
        else:
            bench.learned.end_session(bench.store, "", "mill")

    bench.pin(text(1), session="mill")
    bench.learn(text(1), session="mill")
    with monkeypatch.context() as broken:
        broken.setattr(type(bench.store), "delete", Mock(side_effect=StoreError("away")))
        with pytest.raises(StoreError):
            remove()
    remove()
    assert bench.found(text(1)) == Bench(tmp_path).found(text(1)) == []
    bench.learn(text(1))
    assert bench.hits(text(1)) == [True]


def test_caches_of_corpora_and_pinned_ones_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 2)
    bench.learn(text(1), text(2))
    bench.put_in_corpus(text(1))
    pin_cache(bench.store.backend, bench.key(text(2)).digest, on=True)
    for number in range(3, 8):
        bench.recur(number)
    assert bench.hits(text(1), text(2)) == [True, True]
    assert sum(bench.hits(*map(text, range(3, 8)))) <= 2
    (tmp_path / "kv" / "sources" / "_.0123456789abcdef").write_bytes(b"damaged")
    held = bench.hits(*map(text, range(10)))
    with pytest.raises(StoreError, match="nothing more is learned"):
        bench.learn(text(8), text(9), text(10))
    assert bench.hits(*map(text, range(10))) == held
    assert bench.found(text(8)) == []


def test_a_pin_ends_with_its_time(tmp_path: Path) -> None:
    now = [1000.0]
    first, second = (Bench(tmp_path, 4, clock=lambda: now[0]) for _ in range(2))
    assert first.pin(text(0), text(1), text(2)) == [True, True, False], "half of the budget"
    first.learn(text(0), text(1), text(2))
    for number in range(10, 20):
        (first, second)[number % 2].recur(number)
    assert first.hits(text(0), text(1), text(2)) == [True, True, False]
    now[0] += 50
    assert second.pin(text(1)) == [True]
    now[0] += 20
    for number in range(20, 30):
        first.recur(number)
    assert second.hits(text(0), text(1)) == [False, True], "it was used again in time"
    assert first.pin(text(3), text(4)) == [True, False], "what has ended makes room"
    again = Bench(tmp_path, 4, clock=lambda: now[0])
    assert again.pin(text(4)) == [False]
    now[0] += 61
    assert again.pin(text(4)) == [True]


@pytest.mark.parametrize("how", ["one end user", "many sessions", "many names of one client", "no name"])
def test_nobody_takes_all_pins(tmp_path: Path, how: str) -> None:
    """Ten texts may be pinned, and somebody pins them all; then others come."""
    bench = Bench(tmp_path, 20)
    same = {"client": "key 1" if how == "many names of one client" else "key 0"}
    for number in range(12):
        by = {
            "one end user": {"user": "eve"},
            "many sessions": {"user": "eve", "session": f"s{number}"},
            "many names of one client": {"user": f"eve {number}"},
            "no name": {},
        }[how]
        assert bench.pin(text(number), **by, client="key 0") == [number < 10]
    ann = {"user": "ann", **same}
    assert [bench.pin(text(number), **ann)[0] for number in range(100, 107)] == [True] * 5 + [False] * 2
    assert bench.pin(text(120), user="bob", **same) == [True]
    loses = how == "many names of one client"  # bob shares the room of this client with ann
    assert bench.pin(text(100), **ann) == [not loses]
    assert bench.pin(text(104), **ann) == [True], "what is pinned is pinned anew"


def test_a_lost_pin_lets_the_text_go_and_its_session_can_still_be_deleted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 4)
    for number in range(2):
        bench.pin(text(number), user="eve", session="mill")
        bench.learn(text(number), user="eve", session="mill")
    assert bench.pin(text(9), user="ann") == [True]
    bench.learn(text(9), user="ann")
    for number in range(20, 30):
        bench.learn(text(number), user="eve")
    assert bench.finds(range(2), "eve") == [False, True], "the one that would have ended first"
    assert bench.finds(range(9, 10), "ann") == [True]
    assert bench.learned.end_session(bench.store, "eve", "mill").texts == 1


@pytest.mark.parametrize("flood", ["end user", "names of another client"])
def test_a_flood_of_text_takes_none_of_anothers_share(tmp_path: Path, flood: str) -> None:
    bench = Bench(tmp_path, 10)
    client = "b" if flood == "end user" else "a"
    bench.learn(*map(text, range(4)), user="ann", client=client)
    for number in range(20, 60):
        name = "eve" if flood == "end user" else f"eve {number}"
        for _ in range(2):  # what recurs stays longest
            bench.learn(text(number), user=name, client="b")
    assert bench.finds(range(4), "ann") == [True] * 4
    assert bench.store.stats().entries <= 10


def test_a_share_ends_an_hour_behind_the_last_use(tmp_path: Path) -> None:
    now = [1000.0]
    bench = Bench(tmp_path, 10, clock=lambda: now[0])
    bench.learn(*map(text, range(4)), user="ann")
    now[0] += ACTIVE_S + 1
    for number in range(20, 40):
        bench.learn(text(number), user="eve")
    assert bench.finds(range(4), "ann") == [False] * 4
    assert sum(bench.finds(range(20, 40), "eve")) == 10


def test_many_sessions_of_a_text_are_counted_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(200):
        bench.learn(text(0), session=f"s{number}")
        bench.pin(text(0), session=f"s{number}")
    with closing(sqlite3.connect(tmp_path / "learned.sqlite")) as file:
        assert file.execute("SELECT count(*) FROM pins").fetchone()[0] <= 65
    assert bench.learned.end_session(bench.store, "", "s1").texts == 0
    assert bench.hits(text(0)) == [True], "text of so many sessions is that of all"


def test_nothing_of_an_ended_session_is_learned_or_pinned(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    origin = RequestOrigin(session="mill", ended=lambda: True)
    assert bench.learned.admitted(bench.library, [text(0)], origin) == set()
    assert bench.learned.pin({text(0): Wish(60, size_of_text())}, origin) == set()
    assert (len(bench.learned), bench.pin(text(0))) == (0, [True])


def test_a_session_ends_with_the_texts_that_it_alone_used(tmp_path: Path) -> None:
    first, second = Bench(tmp_path), Bench(tmp_path)
    first.learn(text(0))
    for session, numbers in {"mill": (0, 1, 2, 3), "quay": (2,)}.items():
        texts = [text(number) for number in numbers]
        first.pin(*texts, session=session)
        first.learn(*texts, session=session)
    second.use(text(3))
    one = Forgotten(1, size_of_text())
    assert second.learned.end_session(second.store, "ann", "mill") == Forgotten()
    assert second.learned.end_session(second.store, "", "mill") == one
    assert first.hits(*map(text, range(4))) == [True, False, True, True]
    assert first.learned.end_session(first.store, "", "quay") == one
    assert Bench(tmp_path).hits(*map(text, range(4))) == [True, False, False, True]


def test_a_file_of_an_earlier_form_is_read(tmp_path: Path) -> None:
    """It lists the caches of a text as JSON."""
    Bench(tmp_path).learn(text(1))
    Bench(tmp_path).learn(text(2), user="ann")
    caches = (
        "(SELECT json_group_array(json_array(namespace, digest, nbytes)) FROM caches WHERE caches.name = pieces.name)"
    )
    make = f"CREATE TABLE texts AS SELECT user, name, tokens, {caches} AS caches, used FROM pieces;"
    change(tmp_path, f"{make} DROP TABLE pieces; DROP TABLE caches; DROP TABLE pins;")
    bench = Bench(tmp_path)
    assert bench.found(text(1)) == bench.found(text(2), "ann") == [(0, SIZE, 0)]
    assert bench.store.stats().entries == len(bench.learned) == 2
    assert bench.pin(text(1), session="mill") == [True]
    assert bench.learned.end_session(bench.store, "", "mill") == Forgotten(), "others brought it"
    bench.learned.drop(bench.store, [text(1)])
    assert bench.hits(text(1), text(2)) == [False, True]


def test_what_recurs_stays_while_novel_text_passes(tmp_path: Path) -> None:
    """300 requests, half of them for one of ten pages, half with ten novel pieces: twelve times the budget."""
    rng = random.Random(0)
    pages = [text(number, 100) for number in range(10)]
    bench = Bench(tmp_path, 90)
    for request in range(300):
        if request % 2:
            bench.use(rng.choice(pages))
        else:
            bench.use(*(text(1000 + 10 * request + number) for number in range(10)))
    assert sum(bool(bench.found(page)) for page in pages) >= 9


def test_a_new_text_stays_for_the_second_request(tmp_path: Path) -> None:
    """Also when all that is there was used often; and what was used often long ago makes room in time."""
    bench = Bench(tmp_path, 10)
    for topic in range(2):
        texts = [text(100 * topic + number) for number in range(9)]
        for own in texts * 12:
            bench.use(own)
            assert bench.found(own)
        assert all(bench.found(own) for own in texts)


def test_the_stores_own_budget_spares_pinned_text(tmp_path: Path) -> None:
    bench = Bench(tmp_path, store_budget=3 * size_of_text())
    bench.store.backend.spared = lambda: bench.learned.pinned
    bench.pin(text(1))
    for number in range(10):
        bench.learn(text(number))
    assert bench.hits(text(0), text(1)) == [False, True]


def test_what_is_dropped_or_forgotten_leaves_the_caches_of_corpora(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1), text(2), text(3))
    bench.put_in_corpus(text(1), text(2))
    bench.learned.drop(bench.store, [text(1)])
    bench.learned.forget(bench.store, [text(2), text(3)])
    assert len(bench.learned) == 0
    assert bench.hits(text(1), text(2), text(3)) == [True, True, False]


@pytest.mark.parametrize("pieces", [3, 12])
def test_of_a_text_that_is_forgotten_no_piece_stays(tmp_path: Path, pieces: int) -> None:
    bench, secret = Bench(tmp_path), text(50)
    mixed = [text(number, 40) + secret for number in range(pieces)]
    for one in (text(51), *mixed):
        bench.learn(one)
    bench.learned.forget(bench.store, [secret])
    assert bench.hits(text(51), *mixed) == [True] + [False] * pieces
    assert bench.found(secret) == Bench(tmp_path).found(secret) == []
    assert len(bench.learned) == bench.store.stats().entries == 1


def test_a_list_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "file").write_text("")
    bench.learned = LearnedCaches(tmp_path / "file" / "learned.sqlite", 1 << 20)
    with pytest.raises(StoreError, match=r"\Athe list of learned texts .* cannot be used: [^\n]+\Z"):
        bench.learn(text(1))


def test_two_threads_keep_one_budget(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 6)

    def work(thread: int) -> None:
        first = 6 * thread  # half of what they learn is the same
        for number in range(first, first + 12):
            bench.learn(text(number), text(first))
            bench.found(text(number) + text(first))

    in_threads(2, work)
    held = bench.hits(*map(text, range(18)))
    assert sum(held) == bench.store.stats().entries == len(bench.learned) == len(Bench(tmp_path, 6).learned)
    assert bench.learned.nbytes == size_of_text() * sum(held) <= bench.learned.budget
    assert bench.finds(range(18)) == held


def test_two_processes_share_a_list(tmp_path: Path) -> None:
    pair = first, second = Bench(tmp_path, 6), Bench(tmp_path, 6)
    in_threads(2, lambda number: pair[number].learn(*map(text, range(3 * number, 3 * number + 3)), user="ann"))
    assert first.finds(range(6), "ann") == second.finds(range(6), "ann") == [True] * 6
    first.learned.forget(first.store, [text(4)])
    second.learned.drop(second.store, [text(1)], "ann")
    left = [True, False, True, True, False, True]
    for bench in (first, second, Bench(tmp_path, 6)):
        assert bench.finds(range(6), "ann") == bench.hits(*map(text, range(6))) == left
        assert bench.learned.nbytes == 4 * size_of_text()
    for number in range(10, 30):
        pair[number % 2].learn(text(number), user="ann")
        assert first.store.stats().entries <= 6


KEYS = [ChunkKey("space", f"{number:032x}") for number in range(100)]


def may_store(removed: RemovedKeys, key: ChunkKey, begun: float) -> bool:
    """Whether a prompt that began then may store this cache."""
    stored = list[ChunkKey]()
    removed.unless_removed(key, begun, partial(stored.append, key))
    return stored == [key]


def test_what_one_process_removed_no_other_stores(tmp_path: Path) -> None:
    first, second = (RemovedKeys(tmp_path / "removed.sqlite") for _ in range(2))
    first.add(KEYS[:1])
    assert [may_store(second, key, monotonic()) for key in KEYS[:2]] == [False, True]
    second.allow(KEYS[:1])
    for removed in (second, RemovedKeys(tmp_path / "removed.sqlite")):
        assert may_store(removed, KEYS[0], monotonic())


@pytest.mark.parametrize("file", ["removed.sqlite", "no folder/removed.sqlite"])
def test_a_removal_stays_one_where_it_cannot_be_written(tmp_path: Path, file: str) -> None:
    (tmp_path / "removed.sqlite").write_bytes(b"no list" * 1000)
    removed = RemovedKeys(tmp_path / file)
    removed.add(KEYS[:1])
    assert not may_store(removed, KEYS[0], monotonic())
    removed.allow(KEYS[:1])
    assert may_store(removed, KEYS[0], monotonic())


def test_what_was_removed_while_a_prompt_ran_is_learned_again_unless_it_is_old(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1))
    removed_from(bench.store).add([bench.key(text(1))])
    bench.store.delete(bench.key(text(1)))
    bench.learn(text(1), begun=monotonic() - 2 * KEEP_S)
    assert bench.hits(text(1)) == [False]
    bench.learn(text(1), begun=monotonic())
    assert bench.hits(text(1)) == [True]


def test_a_removed_cache_stays_removed_and_is_forgotten_in_time() -> None:
    now = [1000.0]
    removed = RemovedKeys(clock=lambda: now[0])
    first, *others = KEYS
    removed.add([first])
    began = now[0] - 1
    for other in others:
        now[0] += KEEP_S / 2
        assert may_store(removed, other, now[0])
        removed.add([other])
        assert len(removed) <= 4
        assert not may_store(removed, other, now[0])
        assert not may_store(removed, first, began)
    assert may_store(removed, first, now[0])
