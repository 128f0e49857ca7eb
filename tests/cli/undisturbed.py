"""What one process makes of a folder, for tests in which many make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from blend_process import entries

CHUNKS = ("--chunk-tokens", "32")


def contents(store: Path) -> dict[str, bytes]:
    """Every byte of caches, artifacts and index by name; left out is what says when and how fast they were made."""
    names = {path.relative_to(store): path for path in store.rglob("*") if path.is_file()}
    kept = {
        name: path
        for name, path in names.items()
        if name.parts[1] not in ("generation", ".lock", ".writing", "namespaces")
    }
    return {str(name): path.read_bytes() for name, path in kept.items()}


class Undisturbed(NamedTuple):
    """What one process makes of the documents, and answers from it."""

    contents: dict[str, bytes]
    answer: dict[str, Any]


ASK = ("answer", "How many crates are in lot 3?", "--json", "--max-new-tokens", "8")


def all_caches(store: Path) -> int:
    return len(entries(store)) + len(entries(store, "contextual"))
