"""The chunk caches of a store as its commands show them, over every tier."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.cli import opening

if TYPE_CHECKING:
    from blend.store import ChunkStore, Stored

DAY_S = 86400.0


class Listed(NamedTuple):
    """A cache as `ls` shows it.

    age_s: since it was last used where the tier knows, else since it was put. hits: prompts on this machine that it was read
    for, from whichever tier.
    """

    digest: str
    namespace: str
    nbytes: int
    age_s: float
    hits: int
    document: str
    pinned: bool


def open_caches(store: Path, store_key: Path | None) -> ChunkStore:
    """The caches of a store that must be there. Raises `StoreError`."""
    from blend.errors import StoreError
    from blend.store import open_store
    from blend.store.addresses import root_of

    if root_of(store) is None and not (store / "kv").is_dir():
        raise StoreError(f"{store} holds no chunk caches; make some with `blend precompute PATH --store {store}`")
    return open_store(store / "kv", key=opening.store_key({"store_key": store_key}))


def tiers_of(caches: ChunkStore) -> Iterator[tuple[str, Any]]:
    """The tiers of a store by name, the one that decides first."""
    from blend.store.admin import places

    return places(caches.backend)


def list_caches(caches: ChunkStore, tier: str | None = None) -> Iterator[Listed]:
    """The caches of a tier, by default of the one that decides. Raises `ConfigError` for a tier that the store has not."""
    from blend.errors import ConfigError
    from blend.store import sources
    from blend.store.admin import pinned
    from blend.store.backend import CACHES

    held = dict(tiers_of(caches))
    if tier is not None and tier not in held:
        raise ConfigError(f"this store has no tier {tier!r}; it has {', '.join(held)}")
    backend = held[tier] if tier else next(iter(held.values()))
    documents = sources.read_sources(caches).documents
    uses = caches.backend.uses
    hits = {} if uses is None else uses.read().of_caches
    pins, now = pinned(caches.backend), time.time()
    for page in backend.listing(CACHES):
        for stored in page:
            yield _shown(stored, documents, hits, pins, now)


def _shown(
    stored: Stored, documents: Mapping[str, str], hits: Mapping[str, int], pins: frozenset[str], now: float
) -> Listed:
    from blend.store.backend import key_of

    key = key_of(stored.name)
    age, document = max(0.0, now - stored.used), documents.get(key.digest, "")
    used = hits.get(key.digest, 0)
    return Listed(key.digest, key.namespace, stored.nbytes, age, used, document, key.digest in pins)


def in_bytes(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def in_time(seconds: float) -> str:
    """An age for people."""
    for unit, length in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
