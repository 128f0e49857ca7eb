"""What operators do with a store: notes of which document each cache is of, stale copies, verification; pins of far stores.

    sources/<corpus>.<namespace>   JSON, namespace -> digest of a cache -> id of the document, sealed; `_` is the corpus without
                                   a name. The namespace in the name is that of isolated caches: one note for each model

Removing a document removes its caches, pinned or not.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.backend import CACHES, SOURCES, Backend, key_of, pin_cache, pinned
from blend.store.base import ChunkStore
from blend.store.reader import require_finite

EVERY_S = 30.0
_UNNAMED = "_"

Documents = Mapping[str, Mapping[str, str]]
"""Namespace -> digest of a cache -> id of a document."""


class FarPins:
    """The pins of a far store, for a disk in front of it: looked up twice a minute, copied to the disk for outages."""

    def __init__(self, far: Backend, near: Backend) -> None:
        self._far = far
        self._near: Backend = weakref.proxy(near)  # which owns this: the far place's connections close with the store
        self._lock = threading.Lock()
        self._stale_at = float("-inf")

    def __call__(self) -> frozenset[str]:
        """Digests of the pinned caches as last known. Raises `StoreError` only for the disk."""
        with self._lock:
            if time.monotonic() >= self._stale_at:
                with suppress(StoreError):  # an outage, or a full or read-only disk: tried again later
                    self._copy(pinned(self._far))
                self._stale_at = time.monotonic() + EVERY_S
            return pinned(self._near)

    def _copy(self, pins: frozenset[str]) -> None:
        for digest in pins ^ pinned(self._near):
            pin_cache(self._near, digest, on=digest in pins)


class Sources(NamedTuple):
    """The notes of all corpora together.

    Attributes:
        documents: ids of documents by the digest of a cache.
        namespaces: those that notes name.
        corpora: those with a readable note.
        unread: names of notes that are damaged or sealed with another key.

    """

    documents: Mapping[str, str]
    namespaces: frozenset[str]
    corpora: frozenset[str]
    unread: tuple[str, ...]


def write_sources(store: ChunkStore, corpus: str, namespace: str, documents: Documents) -> None:
    """Replace the note of a corpus and a model. Nothing is pruned meanwhile.

    Namespaces of the last note stay in it, so that caches in them count as unused.

    Args:
        store: holds the note.
        corpus: the name of the corpus.
        namespace: the namespace of its isolated caches.
        documents: which cache is of which document.

    Raises:
        StoreError: the store cannot be read or written.

    """
    name = f"{SOURCES}{corpus or _UNNAMED}.{namespace}"
    with store.writing():
        note: dict[str, Mapping[str, str]] = {former: {} for former in _read(store, name) or {}}
        note.update(documents)
        store.put_manifest(name, json.dumps(note).encode())


def forget_sources(store: ChunkStore, corpus: str) -> None:
    """Delete the notes of a corpus. Raises `StoreError`."""
    for name in store.backend.names(SOURCES):
        if note_of(name)[0] == corpus:
            store.backend.delete(name)


def read_sources(store: ChunkStore) -> Sources:
    """The notes of all corpora. Raises `StoreError`."""
    notes = {name: _read(store, name) for name in store.backend.names(SOURCES)}
    sound = {name: note for name, note in notes.items() if note is not None}
    documents: dict[str, str] = {}
    for note in sound.values():
        for of_namespace in note.values():
            documents |= of_namespace
    corpora = frozenset(note_of(name)[0] for name in sound)
    unread = tuple(name for name in notes if name not in sound)
    return Sources(documents, frozenset[str]().union(*sound.values()), corpora, unread)


def note_of(name: str) -> tuple[str, str]:
    """The corpus and the namespace of isolated caches in a note's name."""
    corpus, _, namespace = name.removeprefix(SOURCES).partition(".")
    return "" if corpus == _UNNAMED else corpus, namespace


def _read(store: ChunkStore, name: str) -> Documents | None:
    """A note; None when there is no usable one."""
    _, content = store.read_manifest(name)
    try:
        note = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    is_sound = isinstance(note, dict) and all(isinstance(documents, dict) for documents in note.values())
    return note if is_sound else None


def remove_copies(backend: Backend, *, dry_run: bool = False) -> int:
    """Remove unpinned copies in nearer tiers of caches that the far place lacks; returns how many. dry_run: only count.

    A tier that was down missed what was removed meanwhile. Raises `StoreError` when the far place does not answer, and at the
    end when a nearer tier did not.
    """
    far, *nearer = backend.tiers.values()
    far_names = set(far.names(CACHES)) if nearer else set()
    pins = pinned(far)
    removed = 0
    failed: list[str] = []
    for tier in nearer:
        try:
            missing = [name for name in tier.names(CACHES) if name not in far_names and key_of(name).digest not in pins]
            for name in () if dry_run else missing:
                tier.delete(name)
            removed += len(missing)
        except StoreError:
            failed.append(tier.place)
    if failed and not dry_run:
        raise StoreUnreachableError(
            f"copies of what was removed may still be in {', '.join(failed)}: run the same command again when that is up"
        )
    return removed


def verify_entry(store: ChunkStore, name: str) -> str:
    """The damage of an entry, every byte read; empty when there is none. Raises `StoreError` for an outage."""
    try:
        reader = store.open(key_of(name))
        if reader is not None:
            with reader:
                for index in range(reader.layers):
                    parts = (*reader.layer(index), *reader.operator(index))
                    require_finite(key_of(name), index, parts)
    except EntryDamagedError as error:
        return str(error)
    return ""
