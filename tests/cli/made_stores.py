"""Stores with caches of no model, and `blend store` called in this process."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from click.testing import CliRunner

from blend.cli.store import command
from blend.store import ChunkStore, open_store
from blend.store.admin import write_sources
from blend.types import CacheIdentity, ChunkCache, ChunkKey

SECRET = b"correct horse battery staple"


def key(number: int, model: str = "model") -> ChunkKey:
    return CacheIdentity(model, "float32", (1, 2, 3)).key((number, number + 1))


def cache(seed: int = 0) -> ChunkCache:
    source = torch.Generator().manual_seed(seed)
    pairs = [torch.randn(2, 2, 5, 4, generator=source) for _ in range(3)]
    return ChunkCache(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), start=3)


def made(
    root: Path, count: int, secret: bytes | None = None, model: str = "model", noted: Iterable[int] | None = None
) -> ChunkStore:
    """A store in `root` with so many caches, two hours old. noted: those of them that are documents'."""
    store = open_store(root / "kv", key=secret)
    for number in range(count):
        store.put(key(number, model), cache(number))
    age(root)
    if noted is not None:
        note(store, noted, model=model)
    return store


def note(store: ChunkStore, numbers: Iterable[int], corpus: str = "", model: str = "model") -> None:
    """The note of a precompute: these caches are of the documents doc0, doc1, ..."""
    space = key(0, model).namespace
    write_sources(store, corpus, space, {space: {key(n, model).digest: f"doc{n}" for n in numbers}})


def left(store: ChunkStore) -> set[str]:
    """Digests of the caches that the store holds."""
    return {one.digest for one in store.keys()}  # noqa: SIM118 - a store is no dict


def digests(*numbers: int, model: str = "model") -> set[str]:
    return {key(number, model).digest for number in numbers}


def age(root: Path, hours: float = 2.0) -> None:
    """Make every cache that old."""
    then = time.time() - 3600 * hours
    for path in (root / "kv" / "objects").rglob("*.safetensors"):
        os.utime(path, (then, then))


def call(root: Path | str, *arguments: object, code: int = 0) -> str:
    """The output of `blend store`, which must end with this exit code; behind it the line of an error."""
    result = CliRunner().invoke(command, [*map(str, arguments), "--store", str(root)])
    exit_code, output = result.exit_code, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        exit_code = getattr(result.exception, "exit_code", 1)
        output += f"{result.exception}\n"
    assert exit_code == code, output
    return output


def key_file(folder: Path, secret: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / f"key-{len(list(folder.glob('key-*')))}"
    path.write_bytes(secret)
    path.chmod(mode)
    return path
