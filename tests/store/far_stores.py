"""Stores on real servers, which tests start on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import servers

from blend.store import ChunkStore, open_store

FAR = ("objects", "redis", "tiered")


def environment_of_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server is and how it is entered, as its clients look for it."""
    for name, value in servers.s3_environment(servers.s3().port).items():
        monkeypatch.setenv(name, value)


def open_far(request: pytest.FixtureRequest, tmp_path: Path, **options: Any) -> ChunkStore:
    """A store on real servers, the same one for a test however often it is opened."""
    kind = request.param
    if kind == "redis":
        return open_store(f"redis://127.0.0.1:{servers.redis_port()}/0/{tmp_path.name}", **options)
    environment_of_s3(request.getfixturevalue("monkeypatch"))
    address = f"s3://{servers.BUCKET}/{tmp_path.name}"
    if kind == "objects":
        return open_store(address, **options)
    return open_store(address, cache=tmp_path / "near", hot=f"redis://127.0.0.1:{servers.redis_port()}/1", **options)
