"""Entries of tests of stores: how they read them, find their files and damage them."""

import gc
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from blend.store import ChunkStore
from blend.store.backend import cache_name
from blend.store.reader import ChunkReader
from blend.types import CacheIdentity, ChunkCache, ChunkKey


def key(number: int, model: str = "model-a") -> ChunkKey:
    return CacheIdentity(model, "float32", (1, 2, 3)).key((number, number + 1))


def cache(seed: int = 0, layers: int = 3, tokens: int = 5, dtype: torch.dtype = torch.float32) -> ChunkCache:
    source = torch.Generator().manual_seed(seed)
    # Heads and head sizes differ between keys and values and between layers, as they may.
    keys = [torch.randn(2, tokens, 4 + 2 * i, generator=source).to(dtype) for i in range(layers)]
    values = [torch.randn(2, tokens, 6, generator=source).to(dtype) for _ in range(layers)]
    return ChunkCache(tuple(keys), tuple(values), start=7)


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
    return store.backend.root / cache_name(key)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def damage_caches(root: Path) -> None:
    for path in (root / "objects").rglob("*.safetensors"):
        flip(path, -1)


def watched(store: ChunkStore, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> list[Any]:
    """Every reader that the store opens from now on: it calls `before` each layer it reads, and says whether it is `closed`."""

    class Watched(ChunkReader):
        closed = False

        def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
            before(index)
            super().read_into(index, keys_out, values_out)

        def close(self) -> None:
            self.closed = True
            super().close()

    opened, plain = [], store.open_many

    def open_many(keys: Sequence[ChunkKey]) -> list[Any]:
        found = plain(keys)
        readers = [reader for reader in found if isinstance(reader, ChunkReader)]
        for reader in readers:
            reader.__class__ = Watched
        opened.extend(readers)
        return found

    monkeypatch.setattr(store, "open_many", open_many)
    return opened


def failing(code: int) -> Callable[..., NoReturn]:
    """Stands for a call of the system that ends with this error."""

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


def open_descriptors() -> int:
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
