"""What operators do with a store: notes of which document each cache is of, stale copies, verification; pins of far stores.

    sources/<corpus>.<namespace>   JSON, namespace -> digest of a cache -> id of the document, sealed; `_` is the corpus without
                                   a name. The namespace in the name is that of isolated caches: one note for each model

Removing a document removes its caches, pinned or not.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.backend import CACHES, SOURCES, Backend, key_of, pin_cache, pinned, still_pinned
from blend.store.base import ChunkStore

_EVERY_S = 30.0
_UNNAMED = "_"

Documents = Mapping[str, Mapping[str, str]]
"""Namespace -> digest of a cache -> id of a document."""


class FarPins:
    """The pins of a far store, for a disk in front of it: looked up every `every_s` seconds, copied to the disk for outages."""

    def __init__(self, far: Backend, near: Backend, *, every_s: float = _EVERY_S) -> None:
        self._far, self._near, self._every_s = far, near, every_s
        self._lock = threading.Lock()
        self._known: frozenset[str] | None = None
        self._after = float("-inf")

    def __call__(self) -> frozenset[str]:
        """Digests of the pinned caches as last known. Raises `StoreError` only for the disk."""
        with self._lock:
            if self._known is None or time.monotonic() >= self._after:
                self._known = self._asked()
                self._after = time.monotonic() + self._every_s
            return self._known

    def _asked(self) -> frozenset[str]:
        try:
            pins = pinned(self._far)
        except StoreError:
            return pinned(self._near) if self._known is None else self._known
        with suppress(StoreError):  # a full or read-only disk: the next process tries again
            noted = pinned(self._near)
            for digest in pins ^ noted:
                pin_cache(self._near, digest, on=digest in pins)
        return pins


class Sources(NamedTuple):
    """The notes of all corpora together.

    documents: by the digest of a cache. namespaces: those that notes name. corpora: those with a readable note. unread: names
    of notes that are damaged, sealed with another key or of an older version.
    """

    documents: Mapping[str, str]
    namespaces: frozenset[str]
    corpora: frozenset[str]
    unread: tuple[str, ...]


def write_sources(store: ChunkStore, corpus: str, namespace: str, documents: Documents) -> None:
    """Replace the note of this corpus and model, and an older note of the corpus. Nothing is pruned meanwhile.

    namespace: of the isolated caches. Namespaces of the last note are kept, so that caches in them count as unused.
    Raises `StoreError`.
    """
    older = f"{SOURCES}{corpus or _UNNAMED}"
    name = f"{older}.{namespace}"
    with store.writing():
        former: dict[str, Mapping[str, str]] = {space: {} for space in _read(store, name) or {}}
        store.put_manifest(name, json.dumps({**former, **documents}).encode())
        store.backend.delete(older)


def forget_sources(store: ChunkStore, corpus: str) -> None:
    """Delete the notes of a corpus. Raises `StoreError`."""
    for name in store.backend.names(SOURCES):
        if note_of(name)[0] == corpus:
            store.backend.delete(name)


def read_sources(store: ChunkStore) -> Sources:
    """The notes of all corpora. Raises `StoreError`."""
    names = list(store.backend.names(SOURCES))
    notes = {name: note for name in names if (note := _read(store, name)) is not None}
    return Sources(
        {digest: document for note in notes.values() for one in note.values() for digest, document in one.items()},
        frozenset(chain.from_iterable(notes.values())),
        frozenset(note_of(name)[0] for name in notes),
        tuple(name for name in names if name not in notes),
    )


def note_of(name: str) -> tuple[str, str]:
    """The corpus and the namespace of isolated caches in a note's name; an older name has no namespace."""
    corpus, _, namespace = name.removeprefix(SOURCES).partition(".")
    return "" if corpus == _UNNAMED else corpus, namespace


def _read(store: ChunkStore, name: str) -> Documents | None:
    """A note; None when there is no usable one."""
    _, content = store.read_manifest(name)
    try:
        note = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    spaces = list(note.values()) if isinstance(note, dict) else [None]
    sound = all(isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) for one in spaces)
    return note if sound else None


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


def remove_copies(backend: Backend, *, dry_run: bool = False) -> int:
    """Remove unpinned copies in nearer tiers of caches that the far place lacks; returns how many. dry_run: only count.

    A tier that was down missed what was removed meanwhile. Raises `StoreError` when the far place does not answer, and at the
    end when a nearer tier did not.
    """
    (_, far), *nearer = places(backend)
    held = set(far.names(CACHES)) if nearer else set()
    removed, left = 0, list[str]()
    for _, tier in nearer:
        try:
            missing = [name for name in tier.names(CACHES) if name not in held]
            pins = still_pinned(far, [key_of(name).digest for name in missing])
            for name in missing:
                if key_of(name).digest not in pins:
                    removed += 1
                    _ = dry_run or tier.delete(name)
        except StoreError:
            left.append(tier.place)
    if left and not dry_run:
        raise StoreUnreachableError(
            f"copies of what was removed may still be in {', '.join(left)}: run the same command again when that is up"
        )
    return removed


def verify_entry(store: ChunkStore, name: str) -> str:
    """The damage of an entry, every byte read; empty when there is none. Raises `StoreError` for an outage."""
    try:
        reader = store.over(store.backend).open(key_of(name))  # not through the memory tier, which is for prompts
        if reader is not None:
            with reader:
                for index in range(reader.layers):
                    reader.layer(index)
                    reader.operator(index)
    except EntryDamagedError as error:
        return str(error)
    return ""
