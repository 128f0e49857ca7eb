from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far_stores import FAR, bucket_of, bucket_proxy, open_far, tell_bucket
from servers import redis_port
from wire import Proxy

from blend.store import ChunkStore, open_store


@pytest.fixture(params=["memory:", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ChunkStore]:
    """Over two backends, which are enough for codecs: backends move bytes."""
    return lambda codec: open_store("memory:" if request.param == "memory:" else tmp_path, codec=codec)


@pytest.fixture(params=["memory:", "disk", "memory tier", *FAR])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ChunkStore]:
    """Over each backend; "memory tier" is a disk behind one, "tiered" a disk and a Redis in front of a bucket."""
    if request.param in FAR:
        return lambda codec="native": open_far(request, tmp_path, codec=codec)
    location = "memory:" if request.param == "memory:" else tmp_path / "store"
    memory_bytes = 1 << 20 if request.param == "memory tier" else None
    return lambda codec="native": open_store(location, codec=codec, memory_bytes=memory_bytes)


@pytest.fixture
def failing_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, Proxy]]:
    """The address of a store in a bucket, and the proxy in front of its server."""
    address = bucket_of(monkeypatch, tmp_path)
    proxy = bucket_proxy(monkeypatch, address)
    yield address, proxy
    proxy.close()
    tell_bucket("")


@pytest.fixture
def failing_redis() -> Iterator[Proxy]:
    proxy = Proxy(redis_port())
    yield proxy
    proxy.close()
