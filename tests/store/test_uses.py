"""How often each cache was used is counted on this machine's disk, by all its processes, and never in the way of a prompt."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servers
from far_stores import bucket_of

from blend.store import ChunkStore, open_store
from blend.store.uses import NAME, Hits, Uses
from blend.types import ChunkCache, ChunkKey

Keys, Caches = Callable[..., ChunkKey], Callable[..., ChunkCache]
NOTHING = Hits({}, {})


@pytest.fixture
def store(tmp_path: Path, key: Keys, cache: Caches) -> ChunkStore:
    """A directory with two caches."""
    made = open_store(tmp_path / "store")
    for number in (1, 2):
        made.put(key(number), cache(number))
    return made


def read(store: ChunkStore, key: ChunkKey) -> None:
    """As a prompt does."""
    reader = store.open(key)
    assert reader is not None
    with reader:
        for index in range(reader.layers):
            reader.layer(index)


def counted(store: ChunkStore) -> Hits:
    """What the database says after all was written."""
    uses = store.backend.uses
    assert uses is not None
    uses.write()
    return uses.read()


def test_a_cache_that_is_read_is_a_use_however_many_layers_it_has(store: ChunkStore, key: Keys) -> None:
    for number in (1, 1, 2):
        read(store, key(number))
    assert counted(store) == Hits({key(1).digest: 2, key(2).digest: 1}, {"store": 3})
    read(store, key(2))
    assert counted(store).of_caches == {key(1).digest: 2, key(2).digest: 2}


def test_to_look_at_a_cache_is_no_use(store: ChunkStore, key: Keys) -> None:
    with store.open(key(1)):
        pass
    assert store.held([key(1)])
    with store.open(key(2)) as verified:
        verified.counts = False
        verified.layer(0)
    assert counted(store) == NOTHING
    assert not (store.backend.root / NAME).exists()


def test_threads_and_processes_lose_no_count(tmp_path: Path) -> None:
    """Four processes of four threads, which write now and then while others do."""
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from blend.store.uses import Uses
uses = Uses(Path(sys.argv[1]), lambda: 0o600)
def many(thread):
    for number in range(250):
        uses.count(str(number % 5), "store")
        if number % 50 == thread:
            uses.write()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(many, range(4)))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, tmp_path]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert Uses(tmp_path, lambda: 0o600).read() == Hits({str(number): 800 for number in range(5)}, {"store": 4000})


def test_what_was_counted_is_written_now_and_then_and_at_the_end(
    store: ChunkStore, key: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = store.backend.uses
    assert uses is not None
    for number in (1, 2):
        read(store, key(number))
    assert uses.read().of_caches == {key(1).digest: 1}  # the first at once, the others some seconds later
    monkeypatch.setattr("blend.store.uses._EVERY_S", 0.0)
    read(store, key(1))
    assert uses.read().of_caches == {key(1).digest: 2, key(2).digest: 1}
    code = "import sys; from pathlib import Path; from blend.store.uses import Uses\n"
    code += "Uses(Path(sys.argv[1]), lambda: 0o600).count('one', 'local')"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=60)
    assert Uses(tmp_path, lambda: 0o600).read() == Hits({"one": 1}, {"local": 1})


@pytest.mark.parametrize("damage", [b"", b"not a database" * 100, b"SQLite format 3\0" + bytes(500)])
def test_a_damaged_database_begins_anew(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / NAME).write_bytes(damage)
    uses = Uses(tmp_path, lambda: 0o600)
    assert uses.read() == NOTHING
    uses.count("one", "far")
    uses.write()
    uses.write()  # what could not be added the first time
    assert uses.read().of_caches == {"one": 1}


@pytest.mark.parametrize("obstacle", ["folder", "link", "nowhere", "no table"])
def test_what_cannot_be_written_now_is_written_later(tmp_path: Path, obstacle: str) -> None:
    root, path, target = tmp_path / "store", tmp_path / "store" / NAME, tmp_path / "target"
    if obstacle != "nowhere":
        root.mkdir()
    if obstacle == "folder":
        path.mkdir()
    elif obstacle == "link":
        sqlite3.connect(target).close()
        path.symlink_to(target)
    elif obstacle == "no table":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE uses (other TEXT)")
    uses = Uses(root, lambda: 0o600)
    uses.count("one", "far")
    uses.write()
    assert uses.read() == NOTHING
    if obstacle == "link":
        assert target.read_bytes() == b""
    if obstacle == "nowhere":
        assert not root.exists()  # a store that was deleted does not come back
        root.mkdir()
    elif obstacle == "folder":
        path.rmdir()
    else:
        path.unlink()
    uses.count("one", "far")
    uses.write()
    assert uses.read().of_caches == {"one": 2}


def test_values_that_nobody_has_written_are_no_hits(tmp_path: Path) -> None:
    uses = Uses(tmp_path, lambda: 0o600)
    uses.count("one", "far")
    uses.write()
    with sqlite3.connect(tmp_path / NAME) as database:
        database.execute("UPDATE uses SET hits = 'many'")
    database.close()
    assert uses.read() == NOTHING


def test_another_process_that_writes_for_long_is_not_waited_for_by_who_counts(
    tmp_path: Path,
) -> None:
    uses = Uses(tmp_path, lambda: 0o600)
    uses.count("one", "far")
    uses.write()
    with sqlite3.connect(tmp_path / NAME, isolation_level=None) as busy:
        busy.execute("BEGIN EXCLUSIVE")
        uses.count("one", "far")
        uses.write()
        busy.execute("ROLLBACK")
    busy.close()
    assert uses.read().of_caches == {"one": 1}
    uses.count("two", "far")
    uses.write()
    assert uses.read().of_caches == {"one": 2, "two": 1}


def test_what_was_not_used_for_a_year_is_forgotten(tmp_path: Path) -> None:
    uses = Uses(tmp_path, lambda: 0o600)
    uses.count("old", "far")
    uses.write()
    with sqlite3.connect(tmp_path / NAME) as database:
        database.execute("UPDATE uses SET last = last - 366 * 86400")
    database.close()
    another = Uses(tmp_path, lambda: 0o600)
    another.count("new", "far")
    another.write()
    assert another.read().of_caches == {"new": 1}


def test_the_database_is_closed_to_others(store: ChunkStore, key: Keys) -> None:
    before = os.umask(0)
    try:
        read(store, key(1))
        counted(store)
    finally:
        os.umask(before)
    assert (store.backend.root / NAME).stat().st_mode & 0o777 == 0o600


def test_uses_are_counted_by_the_tier_that_was_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: Keys, cache: Caches
) -> None:
    address, redis = bucket_of(monkeypatch, tmp_path), f"redis://127.0.0.1:{servers.redis_port()}/5"

    def machine(name: str, **options: Any) -> ChunkStore:
        return open_store(address, cache=tmp_path / name, hot=redis, **options)

    open_store(address, cache=tmp_path / "writer").put(key(1), cache())  # into the bucket alone
    one = machine("one")
    read(one, key(1))
    assert counted(one).of_tiers == {"far": 1}
    assert one.backend.wait(30)
    read(one, key(1))
    assert counted(one).of_tiers == {"far": 1, "local": 1}
    two = machine("two", memory_bytes=1 << 20)
    read(two, key(1))
    assert two.backend.below.wait(30)
    assert two.backend.wait(30)
    read(two, key(1))
    assert counted(two) == Hits({key(1).digest: 2}, {"hot": 1, "memory": 1})
