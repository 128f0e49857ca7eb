"""Which document each cache of a corpus is of: small notes that a store keeps for its operators.

sources/<corpus>.<namespace>   JSON, namespace -> digest of a cache -> id of the document; `_` is the corpus without a name;
                               the namespace in the name is that of isolated caches: each model keeps a note of its own
sources/<corpus>               of before: digest -> id, of the model that came last

Notes are sealed like artifacts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from blend.store.backend import SOURCES, Backend
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store.base import ChunkStore

_UNNAMED = "_"

Documents = Mapping[str, Mapping[str, str]]
"""Namespace -> digest of a cache -> id of a document."""


class Sources(NamedTuple):
    """What the notes of all corpora say together.

    documents: by the digest of a cache. namespaces: that notes speak of; of others nothing is known, of before's notes neither.
    corpora: that have a note which can be read. unread: names of notes that are damaged, or sealed with another key.
    """

    documents: Mapping[str, str]
    namespaces: frozenset[str]
    corpora: frozenset[str]
    unread: tuple[str, ...]


def write_sources(store: ChunkStore, corpus: str, namespace: str, documents: Documents) -> None:
    """Remember, in place of what was remembered of this corpus and model, and of what kvblend of before wrote of it.

    namespace: of the isolated caches. Namespaces that were spoken of before still are: what is in them and in no note is
    unused. Nothing is pruned meanwhile. Raises `StoreError`.
    """
    before = f"{SOURCES}{corpus or _UNNAMED}"
    with store.writing():
        name = f"{before}.{namespace}"
        former: dict[str, Mapping[str, str]] = {space: {} for space in _read(store, name) or {}}
        store.put_manifest(name, json.dumps({**former, **documents}).encode())
        store.backend.delete(before)


def forget_sources(store: ChunkStore, corpus: str) -> None:
    """The corpus is no more. Raises `StoreError`."""
    for name in _names(store):
        if note_of(name)[0] == corpus:
            store.backend.delete(name)


def read_sources(store: ChunkStore) -> Sources:
    """What is remembered of all corpora. Raises `StoreError`."""
    documents: dict[str, str] = {}
    namespaces, corpora, unread = set[str](), set[str](), list[str]()
    for name in _names(store):
        note = _read(store, name)
        if note is None:
            unread.append(name)
            continue
        corpora.add(note_of(name)[0])
        namespaces |= note.keys() - {""}
        for one in note.values():
            documents |= one
    return Sources(documents, frozenset(namespaces), frozenset(corpora), tuple(unread))


def _names(store: ChunkStore) -> list[str]:
    return [name for page in store.backend.names(SOURCES) for name in page]


def note_of(name: str) -> tuple[str, str]:
    """The corpus and the namespace of isolated caches that a note of this name speaks of; of before's no namespace."""
    corpus, _, namespace = name.removeprefix(SOURCES).partition(".")
    return "" if corpus == _UNNAMED else corpus, namespace


def _read(store: ChunkStore, name: str) -> Documents | None:
    """A note, one of before under the namespace ""; None where there is none that can be used."""
    _, content = store.read_manifest(name)
    try:
        note = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    note = note if "." in name.removeprefix(SOURCES) else {"": note}
    return note if _is_note(note) else None


def _is_note(note: object) -> bool:
    of_spaces = list(note.values()) if isinstance(note, dict) else [None]
    return all(isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) for one in of_spaces)


def key_of(namespace: str, digest: str) -> ChunkKey:
    """The key of a cache that a listing shows."""
    return ChunkKey(namespace, digest)


def places(backend: Backend) -> Iterator[tuple[str, Backend]]:
    """The tiers of a store by name, the one that decides first: "far", "hot", "local"; a store in one place is "store"."""
    tiers = getattr(backend, "tiers", None)
    if tiers is None:
        yield "store", backend
        return
    yield "far", tiers.far
    for name, tier in (("hot", tiers.hot), ("local", tiers.local)):
        if tier is not None:
            yield name, tier
