"""Caches that were removed stay removed, and the list of them does not grow for ever."""

from __future__ import annotations

import pytest

from blend.serve.learned import KEEP_S, RemovedKeys
from blend.types import ChunkKey


def test_a_removed_cache_stays_removed_and_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    removed, now, kept = RemovedKeys(), [1000.0], list[str]()
    monkeypatch.setattr("blend.serve.learned.monotonic", lambda: now[0])
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
