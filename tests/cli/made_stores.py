"""Stores with caches of no model, and `blend store` called in this process."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from click.testing import CliRunner, Result

from blend.cli.store import command
from blend.store import ChunkStore, open_store
from blend.store.admin import write_sources
from blend.types import CacheIdentity, ChunkCache, ChunkKey


def key(number: int, model: str = "model") -> ChunkKey:
    return CacheIdentity(model, "float32", (1, 2, 3)).key((number, number + 1))


def cache(seed: int = 0) -> ChunkCache:
    source = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(2, 2, 5, 4, generator=source) for _ in range(3)]
    return ChunkCache(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), start=3)


def made(root: Path, count: int, secret: bytes | None = None, model: str = "model") -> ChunkStore:
    """A store in `root` with so many caches, two hours old."""
    store = open_store(root / "kv", key=secret)
    for number in range(count):
        store.put(key(number, model), cache(number))
    age(root)
    return store


def note(store: ChunkStore, numbers: Iterable[int], corpus: str = "", model: str = "model") -> None:
    """The note of a precompute: these caches are of the documents doc0, doc1, ..."""
    space = key(0, model).namespace
    write_sources(store, corpus, space, {space: {key(n, model).digest: f"doc{n}" for n in numbers}})


def left(store: ChunkStore) -> set[str]:
    """Digests of the caches that the store holds."""
    return {one.digest for one in store.keys()}  # noqa: SIM118 - a store is no dict


def age(root: Path, hours: float = 2.0) -> None:
    """Make every cache that old."""
    then = time.time() - 3600 * hours
    for path in (root / "kv" / "objects").rglob("*.safetensors"):
        os.utime(path, (then, then))


def call(root: Path | str, *arguments: object) -> Result:
    """`blend store`, with the exit code of an error of ours, and its line as the output's last."""
    result = CliRunner().invoke(command, [*map(str, arguments), "--store", str(root)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        result.exit_code = getattr(result.exception, "exit_code", 1)
        result.output_bytes += f"{result.exception}\n".encode()
    return result
