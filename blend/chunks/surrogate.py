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
    """decided: whether the store holds a choice, of none too. chunks: their token ids. problems: why one is not used.

    one_copy: whether chunks that have a contextual cache are to have no other (`blend.chunks.library`).
    """

    decided: bool
    chunks: tuple[Tokens, ...] = ()
    problems: tuple[str, ...] = ()
    one_copy: bool = False


def read_surrogate(store: ChunkStore, name: str, vocabulary: int) -> StoredSurrogate:
    """The surrogate context under this name; one that is damaged, or has ids of `vocabulary` and beyond, counts as absent."""
    try:
        content = store.read_artifact(name)
        if content is None:
            return StoredSurrogate(decided=False)
        chunks, one_copy = _parsed(content, vocabulary)
        return StoredSurrogate(True, chunks, one_copy=one_copy)
    except (EntryDamagedError, ValueError) as error:
        return StoredSurrogate(False, (), (f"the surrogate context cannot be used: {error}",))


def write_surrogate(store: ChunkStore, name: str, chunks: Sequence[Tokens], *, one_copy: bool = False) -> None:
    """Keep this choice under this name. Raises `StoreError` when the store cannot be written."""
    store.write_artifact(name, json.dumps({"chunks": chunks, **({"one_copy": True} if one_copy else {})}).encode())


def _parsed(content: bytes, vocabulary: int) -> tuple[tuple[Tokens, ...], bool]:
    """The chunks, and whether they are kept in one copy: a word that artifacts of before, and of two copies, lack."""
    try:
        read = json.loads(content)
        chunks, one_copy = tuple(tuple(chunk) for chunk in read["chunks"]), read.get("one_copy", False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is no list of chunks") from None
    if type(one_copy) is not bool:
        raise ValueError("it does not say whether chunks have one cache or two")
    if not all(chunk and all(type(t) is int and 0 <= t < vocabulary for t in chunk) for chunk in chunks):
        raise ValueError(f"it has tokens that a vocabulary of {vocabulary} does not")
    return chunks, one_copy
