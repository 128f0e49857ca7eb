import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from far_stores import FAR, open_far
from store_processes import FORK, PREAMBLE

from blend.store import ChunkStore, open_store
from blend.types import CacheIdentity, ChunkCache, ChunkKey


@pytest.fixture
def key() -> Callable[..., ChunkKey]:
    def make(number: int, model: str = "model-a") -> ChunkKey:
        return CacheIdentity(model, "float32", (1, 2, 3)).key((number, number + 1))

    return make


@pytest.fixture
def cache() -> Callable[..., ChunkCache]:
    def make(seed: int = 0, layers: int = 3, tokens: int = 5, dtype: torch.dtype = torch.float32) -> ChunkCache:
        source = torch.Generator().manual_seed(seed)
        # Heads and head sizes differ between keys and values and between layers, as they may.
        keys = [torch.randn(2, tokens, 4 + 2 * i, generator=source).to(dtype) for i in range(layers)]
        values = [torch.randn(2, tokens, 6, generator=source).to(dtype) for _ in range(layers)]
        return ChunkCache(tuple(keys), tuple(values), start=7)

    return make


@pytest.fixture(params=["memory:", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ChunkStore]:
    """Over two backends, which are enough for codecs: backends move bytes."""
    return lambda codec: open_store("memory:" if request.param == "memory:" else tmp_path, codec=codec)


BUDGETED = ("disk", "memory tier")


@pytest.fixture(params=["memory:", *BUDGETED, *FAR])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ChunkStore]:
    """Over each backend; "memory tier" is a disk behind one, "tiered" a disk and a Redis in front of a bucket."""
    if request.param in FAR:
        return lambda codec="native": open_far(request, tmp_path, codec=codec)
    return _near(request.param, tmp_path)


@pytest.fixture(params=BUDGETED)
def make_budgeted(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ChunkStore]:
    """Over each backend that keeps a budget: servers keep their own."""
    return _near(request.param, tmp_path)


def _near(kind: str, tmp_path: Path) -> Callable[..., ChunkStore]:
    def make(codec: str = "native", budget_bytes: int | None = None) -> ChunkStore:
        location = kind if kind == "memory:" else tmp_path / "store"
        memory_bytes = 1 << 20 if kind == "memory tier" else None
        return open_store(location, codec=codec, budget_bytes=budget_bytes, memory_bytes=memory_bytes)

    return make


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes = []

    def start(root: Path, body: str, workers: int = 1) -> subprocess.Popen[str]:
        code = PREAMBLE + (FORK if workers > 1 else "") + textwrap.dedent(body)
        command = [sys.executable, "-c", code, str(root), str(workers)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()
