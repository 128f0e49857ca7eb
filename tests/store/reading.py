"""How tests of stores read entries, find their files and damage them."""

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from blend.errors import EntryDamagedError
from blend.store import ChunkStore
from blend.store.backend import cache_name
from blend.store.reader import ChunkReader
from blend.types import ChunkCache, ChunkKey


def read(store: ChunkStore, key: ChunkKey) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Copies of an entry's layers; None when there is none."""
    reader = store.open(key)
    if reader is None:
        return None
    with reader:
        pairs = [reader.layer(index) for index in range(reader.layers)]
        return [(keys.clone(), values.clone()) for keys, values in pairs]


def assert_holds(store: ChunkStore, key: ChunkKey, cache: ChunkCache, through: torch.dtype | None = None) -> None:
    """through: the dtype that the values were rounded to."""
    found = read(store, key)
    assert found is not None
    for (keys, values), put_keys, put_values in zip(found, cache.keys, cache.values, strict=True):
        for got, put in ((keys, put_keys), (values, put_values)):
            assert got.dtype == put.dtype
            assert torch.equal(got, put.to(through or put.dtype).to(put.dtype))


def path_of(store: ChunkStore, key: ChunkKey) -> Path:
    """The file of an entry of a disk store."""
    return store.backend.root / cache_name(key)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def damage_caches(root: Path) -> None:
    """Every cache in this folder, in its last layer."""
    for path in (root / "objects").rglob("*.safetensors"):
        flip(path, -1)


class WatchedReader:
    """A store's reader that calls before each layer it reads."""

    def __init__(self, reader: ChunkReader, before: Callable[[int], None]) -> None:
        self._reader, self._before, self.closed = reader, before, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        self._before(index)
        self._reader.read_into(index, keys_out, values_out)

    def close(self) -> None:
        self.closed = True
        self._reader.close()


def watched(store: ChunkStore, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> list[WatchedReader]:
    """Every reader that the store opens from now on."""
    opened: list[WatchedReader] = []
    plain = store.open_many

    def open_many(keys: Sequence[ChunkKey]) -> list[WatchedReader | EntryDamagedError | None]:
        found = [WatchedReader(one, before) if isinstance(one, ChunkReader) else one for one in plain(keys)]
        opened.extend(one for one in found if isinstance(one, WatchedReader))
        return found

    monkeypatch.setattr(store, "open_many", open_many)
    return opened


def enter(context: AbstractContextManager[None]) -> None:
    """Go in and out of it."""
    with context:
        pass


def open_descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def descriptors_before() -> int:
    """The same, at a test's beginning: files that earlier tests left to the garbage collector must not close meanwhile."""
    gc.collect()
    return open_descriptors()


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call `work` in threads that begin at the same time; raises what one raises."""
    start = threading.Barrier(count)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))
