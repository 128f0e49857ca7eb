"""How a store keeps the surrogate context: a small artifact, verified before it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import EntryDamagedError

if TYPE_CHECKING:
    from blend.store.base import ChunkStore

Tokens = tuple[int, ...]


class StoredSurrogate(NamedTuple):
    """decided: whether the store holds a choice, of none too. chunks: their token ids. problems: why one is not used."""

    decided: bool
    chunks: tuple[Tokens, ...] = ()
    problems: tuple[str, ...] = ()


def read_surrogate(store: ChunkStore, name: str, vocabulary: int) -> StoredSurrogate:
    """The surrogate context under this name; one that is damaged, or has ids of `vocabulary` and beyond, counts as absent."""
    try:
        content = store.read_artifact(name)
        if content is None:
            return StoredSurrogate(decided=False)
        return StoredSurrogate(True, _parsed(content, vocabulary))
    except (EntryDamagedError, ValueError) as error:
        return StoredSurrogate(False, (), (f"the surrogate context cannot be used: {error}",))


def write_surrogate(store: ChunkStore, name: str, chunks: Sequence[Tokens]) -> None:
    """Keep these chunks under this name. Raises `StoreError` when the store cannot be written."""
    store.write_artifact(name, json.dumps({"chunks": chunks}).encode())


def _parsed(content: bytes, vocabulary: int) -> tuple[Tokens, ...]:
    try:
        chunks = tuple(tuple(chunk) for chunk in json.loads(content)["chunks"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is no list of chunks") from None
    if not all(chunk and all(type(t) is int and 0 <= t < vocabulary for t in chunk) for chunk in chunks):
        raise ValueError(f"it has tokens that a vocabulary of {vocabulary} does not")
    return chunks
