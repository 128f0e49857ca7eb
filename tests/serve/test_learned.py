"""Text that requests brought: its caches, computed apart from their prompts, within a budget that outlives the process."""

import random
import sqlite3
import stat
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, time
from unittest.mock import Mock

import pytest
import torch
from cases import make_layout
from layouts import marked
from models import decoder

from blend.chunks.library import ChunkLibrary
from blend.chunks.opened import open_chunks
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.prefill.blender import Blender
from blend.serve.prompts.learned import Forgotten, LearnedCaches, Wish
from blend.serve.removed import KEEP_S, RemovedKeys, removed_from
from blend.store import open_store
from blend.store.admin import write_sources
from blend.store.backend import pin_cache
from blend.types import CacheKey, CacheKind, ChunkKey, PromptLayout, Tokens
from tests.store.reading import in_threads

PREFIX = make_layout().prefix
SIZE = 64  # tokens of a text


def text(number: int, size: int = SIZE) -> Tokens:
    return make_layout(chunks=(size,), seed=100 + number).chunks[0]


def prompt(*chunks: Tokens) -> PromptLayout:
    return marked(PromptLayout.of_chunks(PREFIX, chunks, make_layout().suffix), learned=range(len(chunks)))


class Bench:
    """A store of a tiny decoder's caches and the texts learned into it."""

    def __init__(
        self,
        root: Path,
        budget: int = 1 << 24,
        codec: str = "native",
        clock: Callable[[], float] = time,
        store_budget: int | None = None,
        **model: torch.dtype,
    ) -> None:
        self.path = root / "learned.sqlite"
        self.decoder = decoder("llama", **model)
        self.store = open_store(root / "kv", codec=codec, budget_bytes=store_budget)
        self.blender = Blender(self.decoder, self.store, BlendConfig("none"))
        self.learned = LearnedCaches(self.path, budget, clock)

    @property
    def library(self) -> ChunkLibrary:
        return self.blender.library(PREFIX)

    def learn(self, *texts: Tokens, user: str = "", begun: float = inf) -> None:
        """As a request does that brought them all, once the server was idle. begun: when it came."""
        library = self.library
        admitted = self.learned.admitted(library, texts, user)
        for variant, cache in library.computed(library.missing(sorted(admitted))):
            keep = partial(library.keep, variant, cache)
            removed_from(self.store).unless_removed(library.key(variant), begun, keep)

    def use(self, *texts: Tokens, user: str = "") -> None:
        """As a request does that found them."""
        self.learned.admitted(self.library, texts, user)

    def pin(self, seconds: float, *texts: Tokens, session: str = "") -> list[bool]:
        """Which of these texts are pinned."""
        wishes = {
            text: Wish(seconds, sum(map(self.library.entry_bytes, self.library.variants([text])))) for text in texts
        }
        pinned = self.learned.pin(wishes, "", session)
        return [text in pinned for text in texts]

    def hits(self, *chunks: Tokens) -> list[bool]:
        opened = open_chunks(self.library, prompt(*chunks))
        opened.close()
        return list(opened.hits)

    def found(self, ids: Tokens, user: str = "") -> list[tuple[int, int, int]]:
        return sorted((run.start, run.stop, run.first) for run in self.learned.index(user).runs(ids))


def entry_bytes(folder: Path) -> int:
    """Of one text."""
    bench = Bench(folder)
    bench.learn(text(0))
    return bench.learned.nbytes


@pytest.mark.parametrize("codec", ["native", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_that_count_are_those_of_the_store(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    bench = Bench(tmp_path, codec=codec, dtype=dtype)
    bench.learn(text(1), text(2, 100))
    stats = bench.store.stats()
    assert (stats.entries, stats.nbytes) == (2, pytest.approx(bench.learned.nbytes, rel=0.02))


def test_a_new_process_finds_the_same_and_evicts_in_the_same_order(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 5 * size)
    for number in range(4):
        bench.learn(text(number))
    bench.use(text(0))
    again = Bench(tmp_path / "own", 5 * size)
    assert (len(again.learned), again.learned.nbytes, again.learned.budget) == (4, 4 * size, 5 * size)
    asked = tuple(token for number in range(4) for token in (*text(number), 7))
    assert again.found(asked) == bench.found(asked) == [(65 * n, 65 * n + 64, 0) for n in range(4)]
    for number in range(4, 8):  # each used again at once: recurs
        again.learn(text(number))
        again.use(text(number))
        held = again.hits(*map(text, range(8)))
        assert sum(held) <= 5
        assert held[number]
    assert again.hits(*map(text, range(8)))[:4] == [True, False, False, False], "1, 2 and 3 were used less lately"
    files = list(tmp_path.glob("own/learned*"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]


def test_a_smaller_budget_holds_from_the_first_request_on(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own")
    bench.learn(*map(text, range(6)))
    small = Bench(tmp_path / "own", 3 * size)
    small.use()
    assert small.store.stats().entries == len(small.learned) == 3
    assert small.learned.nbytes <= 3 * size
    assert sum(bool(small.found(text(number))) for number in range(6)) == 3
    tiny = Bench(tmp_path / "own", size - 1)
    tiny.learn(text(7))
    assert (tiny.store.stats().entries, len(tiny.learned), tiny.found(text(7))) == (0, 0, [])


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, "another table", "another text"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: bytes | str) -> None:
    Bench(tmp_path).learn(text(1))
    path = tmp_path / "learned.sqlite"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        change = {
            "another table": "ALTER TABLE pieces RENAME TO others",
            "another text": "UPDATE pieces SET tokens = x'010203'",
        }[content]
        with sqlite3.connect(path) as file:
            file.execute(change)
        file.close()
    bench = Bench(tmp_path)
    assert (len(bench.learned), bench.found(text(1))) == (0, [])
    bench.learn(text(2))
    assert Bench(tmp_path).found(text(2)) == [(0, SIZE, 0)]


def test_each_user_finds_the_texts_that_the_user_brought(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    first.learn(text(1), text(2), user="ada")
    first.learn(text(2), text(3), user="bob")
    first.learn(text(4))
    for bench in (first, Bench(tmp_path)):
        found = {
            user: [bool(bench.found(text(number), user)) for number in range(1, 5)]
            for user in ("ada", "bob", "eve", "")
        }
        assert found == {
            "ada": [True, True, False, False],
            "bob": [False, True, True, False],
            "eve": [False] * 4,
            "": [False, False, False, True],
        }
    assert first.store.stats().entries == 4, "a function of the tokens alone is stored once"


def test_a_cache_stays_until_the_last_of_its_users_texts_goes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1), user="ada")
    bench.learn(text(1), user="bob")
    bench.learned.drop(bench.store, [text(1), text(2)], "ada")
    assert (bench.found(text(1), "ada"), bool(bench.found(text(1), "bob")), bench.hits(text(1))) == ([], True, [True])
    bench.learned.drop(bench.store, [text(1)], "bob")
    assert bench.hits(text(1)) == [False]
    bench.learn(text(1), user="ada")
    bench.learn(text(1), user="bob")
    bench.learned.forget(bench.store, [text(1)])
    assert (len(bench.learned), bench.learned.nbytes, bench.store.stats().entries) == (0, 0, 0)


def test_many_users_stay_within_one_budget(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 4 * size)
    for number in range(40):
        bench.learn(text(number), user=f"user {number}")
    assert bench.learned.nbytes <= 4 * size
    assert sum(bool(bench.found(text(number), f"user {number}")) for number in range(40)) == len(bench.learned) <= 4


def test_a_deletion_that_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1))
    with monkeypatch.context() as broken:
        broken.setattr(type(bench.store), "delete", Mock(side_effect=StoreError("away")))
        with pytest.raises(StoreError):
            bench.learned.forget(bench.store, [text(1)])
    bench.learned.forget(bench.store, [text(1)])
    assert bench.found(text(1)) == []
    bench.learn(text(1))
    assert bench.hits(text(1)) == [True]


def test_caches_of_corpora_and_pinned_ones_stay(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 2 * size)
    bench.learn(text(1), text(2))
    keys = [bench.library.key(CacheKey(text(number), CacheKind.ISOLATED)) for number in (1, 2)]
    write_sources(bench.store, "", keys[0].namespace, {keys[0].namespace: {keys[0].digest: "a.txt"}})
    pin_cache(bench.store.backend, keys[1].digest, on=True)
    for number in range(3, 8):
        bench.learn(text(number))
        bench.use(text(number))
    assert bench.hits(text(1), text(2)) == [True, True]
    assert sum(bench.hits(*map(text, range(3, 8)))) <= 2
    note = tmp_path / "own" / "kv" / "sources"
    (note / "_.0123456789abcdef").write_bytes(b"damaged")
    held = bench.hits(*map(text, range(10)))
    with pytest.raises(StoreError, match="nothing more is learned"):
        bench.learn(text(8), text(9), text(10))
    assert bench.hits(*map(text, range(10))) == held
    assert bench.found(text(8)) == []


def test_a_pin_ends_with_its_time(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    now = [1000.0]
    first, second = (Bench(tmp_path / "own", 4 * size, clock=lambda: now[0]) for _ in range(2))
    assert first.pin(60, text(0), text(1), text(2)) == [True, True, False], "half of the budget"
    first.learn(text(0), text(1), text(2))
    for number in range(10, 20):  # each recurs at once
        (first, second)[number % 2].learn(text(number))
        (first, second)[number % 2].use(text(number))
    assert first.hits(text(0), text(1), text(2)) == [True, True, False]
    now[0] += 50
    assert second.pin(60, text(1)) == [True]
    now[0] += 20
    for number in range(20, 30):
        first.learn(text(number))
        first.use(text(number))
    assert second.hits(text(0), text(1)) == [False, True], "it was used again in time"
    assert first.pin(60, text(3), text(4)) == [True, False], "what has ended makes room"
    again = Bench(tmp_path / "own", 4 * size, clock=lambda: now[0])
    assert again.pin(60, text(4)) == [False]
    now[0] += 61
    assert again.pin(60, text(4)) == [True]


def test_a_session_ends_with_the_texts_that_it_alone_used(tmp_path: Path) -> None:
    first, second = (Bench(tmp_path) for _ in range(2))
    first.learn(text(0))
    for session, numbers in {"mill": (0, 1, 2, 3), "quay": (2,)}.items():
        texts = [text(number) for number in numbers]
        first.pin(60, *texts, session=session)
        first.learned.admitted(first.library, texts, "", session)
        first.library.compute(first.library.missing(texts))
    second.use(text(3))
    size = first.learned.nbytes // 4
    assert second.learned.end_session(second.store, "ann", "mill") == Forgotten()
    assert second.learned.end_session(second.store, "", "mill") == Forgotten(1, size)
    assert first.hits(*map(text, range(4))) == [True, False, True, True]
    assert first.learned.end_session(first.store, "", "quay") == Forgotten(1, size)
    assert Bench(tmp_path).hits(*map(text, range(4))) == [True, False, False, True]


def test_a_session_whose_deletion_fails_can_be_deleted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.pin(60, text(1), session="mill")
    bench.learned.admitted(bench.library, [text(1)], "", "mill")
    with monkeypatch.context() as broken:
        broken.setattr(type(bench.store), "delete", Mock(side_effect=StoreError("away")))
        with pytest.raises(StoreError):
            bench.learned.end_session(bench.store, "", "mill")
    bench.learned.end_session(bench.store, "", "mill")
    assert bench.found(text(1)) == Bench(tmp_path).found(text(1)) == []


def test_a_file_of_an_earlier_form_is_read(tmp_path: Path) -> None:
    """It lists the caches of a text as JSON."""
    Bench(tmp_path).learn(text(1))
    Bench(tmp_path).learn(text(2), user="ann")
    with sqlite3.connect(tmp_path / "learned.sqlite") as file:
        caches = "(SELECT json_group_array(json_array(namespace, digest, nbytes)) FROM caches WHERE caches.name = pieces.name)"
        file.execute(f"CREATE TABLE texts AS SELECT user, name, tokens, {caches} AS caches, used FROM pieces")
        file.executescript("DROP TABLE pieces; DROP TABLE caches; DROP TABLE pins")
    file.close()
    bench = Bench(tmp_path)
    assert bench.found(text(1)) == bench.found(text(2), "ann") == [(0, SIZE, 0)]
    assert bench.store.stats().entries == len(bench.learned) == 2
    assert bench.pin(60, text(1), session="mill") == [True]
    assert bench.learned.end_session(bench.store, "", "mill") == Forgotten(), "others brought it"
    bench.learned.drop(bench.store, [text(1)])
    assert bench.hits(text(1), text(2)) == [False, True]


def test_what_recurs_stays_while_novel_text_passes(tmp_path: Path) -> None:
    """300 requests, half of them for one of ten pages, half with ten novel pieces: twelve times the budget."""
    rng = random.Random(0)
    pages = [text(number, 100) for number in range(10)]
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 90 * size)
    for request in range(300):
        if request % 2:
            bench.use(rng.choice(pages))
        else:
            bench.use(*(text(1000 + 10 * request + number) for number in range(10)))
    assert sum(bool(bench.found(page)) for page in pages) >= 9


def test_a_new_text_stays_for_the_second_request(tmp_path: Path) -> None:
    """Also when all that is there was used often; and what was used often long ago makes room in time."""
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 10 * size)
    for topic in range(2):
        texts = [text(100 * topic + number) for number in range(9)]
        for _ in range(12):
            for own in texts:
                bench.use(own)
                assert bench.found(own)
        assert all(bench.found(own) for own in texts)


def test_the_stores_own_budget_spares_pinned_text(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", store_budget=3 * size)
    bench.store.backend.spared = lambda: bench.learned.pinned
    bench.pin(60, text(1))
    for number in range(10):
        bench.learn(text(number))
    assert bench.hits(text(0), text(1)) == [False, True]


def test_what_is_dropped_or_forgotten_leaves_the_caches_of_corpora(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1), text(2), text(3))
    keys = [bench.library.key(CacheKey(text(number), CacheKind.ISOLATED)) for number in (1, 2)]
    write_sources(bench.store, "", keys[0].namespace, {keys[0].namespace: {key.digest: "a.txt" for key in keys}})
    bench.learned.drop(bench.store, [text(1)])
    bench.learned.forget(bench.store, [text(2), text(3)])
    assert len(bench.learned) == 0
    assert bench.hits(text(1), text(2), text(3)) == [True, True, False]


@pytest.mark.parametrize("pieces", [3, 12])
def test_of_a_text_that_is_forgotten_no_piece_stays(tmp_path: Path, pieces: int) -> None:
    bench, secret = Bench(tmp_path), text(50)
    mixed = [text(number, 40) + secret for number in range(pieces)]
    bench.learn(text(51))
    for one in mixed:
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
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 6 * size)

    def work(thread: int) -> None:
        first = 6 * thread  # half of what they learn is the same
        for number in range(first, first + 12):
            bench.learn(text(number), text(first))
            bench.found(text(number) + text(first))

    in_threads(2, work)
    held = bench.hits(*map(text, range(18)))
    assert sum(held) == bench.store.stats().entries == len(bench.learned)
    assert bench.learned.nbytes == size * sum(held) <= bench.learned.budget
    assert [bool(bench.found(text(number))) for number in range(18)] == held
    assert len(Bench(tmp_path / "own", 6 * size).learned) == sum(held)


def test_two_processes_share_a_list(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "size")
    first, second = (Bench(tmp_path / "own", 6 * size) for _ in range(2))
    in_threads(
        2, lambda number: (first, second)[number].learn(*map(text, range(3 * number, 3 * number + 3)), user="ann")
    )
    for bench in (first, second):
        assert all(bench.found(text(number), "ann") for number in range(6))
    first.learned.forget(first.store, [text(4)])
    second.learned.drop(second.store, [text(1)], "ann")
    for bench in (first, second, Bench(tmp_path / "own", 6 * size)):
        assert [bool(bench.found(text(number), "ann")) for number in range(6)] == [True, False, True, True, False, True]
        assert bench.hits(*map(text, range(6))) == [True, False, True, True, False, True]
        assert bench.learned.nbytes == 4 * size
    for number in range(10, 30):
        (first, second)[number % 2].learn(text(number), user="ann")
        assert first.store.stats().entries <= 6


def test_what_one_process_removed_no_other_stores(tmp_path: Path) -> None:
    first, second = (RemovedKeys(tmp_path / "removed.sqlite") for _ in range(2))
    key, other = (ChunkKey("space", f"{number:032x}") for number in range(2))
    first.add([key])
    second.unless_removed(key, monotonic(), lambda: pytest.fail("it was removed"))
    kept = list[ChunkKey]()
    second.unless_removed(other, monotonic(), lambda: kept.append(other))
    second.allow([key])
    for removed in (second, RemovedKeys(tmp_path / "removed.sqlite")):
        removed.unless_removed(key, monotonic(), lambda: kept.append(key))
    assert kept == [other, key, key]


def test_a_removal_stays_one_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "removed.sqlite").write_bytes(b"no list" * 1000)
    for path in (tmp_path / "removed.sqlite", tmp_path / "no folder" / "removed.sqlite"):
        removed, key, kept = RemovedKeys(path), ChunkKey("space", "0" * 32), list[Path]()
        removed.add([key])
        removed.unless_removed(key, monotonic(), lambda: pytest.fail("it was removed"))
        removed.allow([key])
        removed.unless_removed(key, monotonic(), partial(kept.append, path))
        assert kept == [path]


def test_what_was_removed_while_a_prompt_ran_is_learned_again_unless_it_is_old(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1))
    key = bench.library.key(CacheKey(text(1), CacheKind.ISOLATED))
    removed_from(bench.store).add([key])
    bench.store.delete(key)
    bench.learn(text(1), begun=monotonic() - 2 * KEEP_S)
    assert bench.hits(text(1)) == [False]
    bench.learn(text(1), begun=monotonic())
    assert bench.hits(text(1)) == [True]


def test_a_removed_cache_stays_removed_and_is_forgotten_in_time() -> None:
    now, kept = [1000.0], list[str]()
    removed = RemovedKeys(clock=lambda: now[0])
    first, *others = (ChunkKey("space", f"{number:032x}") for number in range(100))
    removed.add([first])
    began = now[0] - 1
    for other in others:
        now[0] += KEEP_S / 2
        removed.unless_removed(other, now[0], lambda: kept.append("never removed"))
        removed.add([other])
        assert len(removed) <= 4
        removed.unless_removed(other, now[0], lambda: pytest.fail("it was removed just now"))
        removed.unless_removed(first, began, lambda: pytest.fail("this prompt began before it was removed"))
    assert kept == ["never removed"] * len(others)
    removed.unless_removed(first, now[0], lambda: kept.append("brought anew"))
    assert kept[-1] == "brought anew"
