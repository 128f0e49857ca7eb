"""The machines of a soak of stores, what they keep, and the one beside that nothing is wrong with."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from _soak_faults import DATABASE, PATIENCE, Asked
from _store_servers import s3_environment
from blend.sharing import Sharing
from blend.store import ChunkStore, Patience, open_store
from blend.store.addresses import replica_of
from blend.store.backend import cache_name
from blend.store.codecs import get_codec
from blend.store.format import encode_entry
from blend.store.seal import make_seal
from blend.types import CacheIdentity, ChunkCache, ChunkKey

KEYS = 16
_LARGE_EVERY = 5  # larger than what comes along when an entry is opened
_BUDGET = 200_000  # of a disk: about half of all
_IDENTITY = CacheIdentity("soak", "float32", (1, 2, 3))


class Machine(NamedTuple):
    """One process on a machine. sharing: of the indexes; None on a machine without a disk."""

    store: ChunkStore
    asked: Asked
    root: Path | None
    sharing: Sharing | None


class Site(NamedTuple):
    """Where the store is: its address, its server's port and that of the proxy in front of it, the Redis behind its proxy.

    secret: the store's key, or None.
    """

    address: str
    port: int
    bucket: int
    redis: int
    secret: bytes | None

    def machine(self, folder: Path, number: int) -> Machine:
        """A process that starts, on one of two machines with a disk (0, 1) or one without (2)."""
        os.environ.update(s3_environment(self.bucket))
        hot = f"redis://127.0.0.1:{self.redis}/{DATABASE}"
        if number == 2:
            store = open_store(self.address, hot=hot, patience=PATIENCE, key=self.secret)
            return Machine(store, Asked(store), None, None)
        root = replica_of(self.address, folder / f"machine-{number}", hot)
        store = open_store(root / "kv", patience=PATIENCE, key=self.secret, budget_bytes=_BUDGET)
        return Machine(store, Asked(store), root, Sharing(root, lambda: store))

    def witness(self) -> ChunkStore:
        """Another machine, on which nothing ever fails."""
        os.environ.update(s3_environment(self.port))
        return open_store(self.address, patience=Patience(60, 60, 0), key=self.secret)


@cache
def key(number: int) -> ChunkKey:
    """One of `KEYS`."""
    return _IDENTITY.key((number,))


@cache
def kv(number: int) -> ChunkCache:
    """What belongs under it."""
    source = torch.Generator().manual_seed(number)
    shape = (1, 80, 64) if number % _LARGE_EVERY == 0 else (1, 4 + number, 8)
    pairs = [torch.randn(2, *shape, generator=source) for _ in range(2)]
    return ChunkCache(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), number)


@cache
def entry(number: int, secret: bytes | None) -> tuple[str, bytes]:
    """Its name, and its bytes as they are stored."""
    header, blobs = encode_entry(key(number), kv(number), get_codec("native"), make_seal(secret))
    return cache_name(key(number)), b"".join((header, *blobs))
