"""How tests of stores read entries, find their files and damage them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from blend.store import ChunkStore
from blend.store.backend import cache_name
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
