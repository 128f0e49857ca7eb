"""Which document each cache of a corpus is of, and which caches are pinned: small notes that a store keeps for its operators.

sources/<corpus>   JSON, digest of a cache -> id of the document, sealed like an artifact; `_` is the corpus without a name
pins/<digest>      nothing: that there is such a name says that the cache is neither pruned nor evicted from a disk
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.store.backend import Backend
from blend.store.names import PINS, SOURCES
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store.base import ChunkStore

PINNED = b"pinned"
_UNNAMED = "_"
_DIGEST = re.compile(r"[0-9a-f]{8,128}")


def write_sources(store: ChunkStore, corpus: str, documents: Mapping[str, str]) -> None:
    """Remember, in place of what was remembered of this corpus. Raises `StoreError`."""
    store.put_manifest(f"{SOURCES}{corpus or _UNNAMED}", json.dumps(dict(documents)).encode())


def read_sources(store: ChunkStore) -> dict[str, dict[str, str]]:
    """Of each corpus that was remembered, by its name; what is damaged or of another key is left out."""
    found: dict[str, dict[str, str]] = {}
    for page in store.backend.names(SOURCES):
        for name in page:
            corpus = name.removeprefix(SOURCES)
            _, content = store.read_manifest(name)
            if content is not None:
                found["" if corpus == _UNNAMED else corpus] = json.loads(content)
    return found


def key_of(namespace: str, digest: str) -> ChunkKey:
    """The key of a cache that a listing shows."""
    return ChunkKey(namespace, digest)


def pinned(backend: Backend) -> frozenset[str]:
    """Digests of the caches that are pinned."""
    return frozenset(name.removeprefix(PINS) for page in backend.names(PINS) for name in page)


def pin(backend: Backend, digest: str, *, on: bool) -> None:
    """Pin a cache, or let it go again. Raises `StoreError`."""
    if not _DIGEST.fullmatch(digest):
        raise StoreError(f"{digest!r:.80} is no digest of a cache: `blend store ls` shows them")
    if on:
        backend.put(PINS + digest, [PINNED])
    else:
        backend.delete(PINS + digest)


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
