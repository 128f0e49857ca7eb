"""`ChunkStore`: chunk caches under content addresses, readable one layer at a time, over any backend."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import (
    ARTIFACTS,
    CACHES,
    DESCRIPTIONS,
    GENERATION,
    SEALED,
    Backend,
    Found,
    artifact_name,
    cache_name,
    close_all,
    description_name,
    in_batches,
    is_artifact,
    key_of,
    pinned,
)
from blend.store.codecs import Codec
from blend.store.format import encode_entry
from blend.store.pool import ChunkPool, MemoryStats
from blend.store.reader import ChunkReader, damaged, read_header
from blend.store.seal import Seal, as_json, pack_artifact, unpack_artifact
from blend.types import ChunkCache, ChunkKey

Opened = ChunkReader | EntryDamagedError | None
"""What opening a key gives: its reader, its damage, or None for a miss."""

_OpenBlobs = Callable[[Sequence[str]], list[Found]]
_AT_ONCE = 64


class StoreStats(NamedTuple):
    """What a store holds: entries and their bytes as stored."""

    entries: int
    nbytes: int


class ChunkStore:
    """Content-addressed chunk caches. Threads may share it, and processes where the backend allows it.

    Looking at what a store holds loads no torch.

    Args:
        backend: moves the bytes.
        codec: encodes new entries; entries of every codec are read.
        seal: verifies entries and artifacts; those with another seal count as damaged.
        pool: keeps recently read caches in memory.
        folder: its directory on this machine, if it has one.

    """

    def __init__(
        self, backend: Backend, codec: Codec, seal: Seal, pool: ChunkPool | None = None, folder: Path | None = None
    ) -> None:
        self.backend = backend
        self.folder = folder
        self.codec = codec
        self.pool = pool
        self._seal = seal
        self._key_is_marked: bool | None = None  # unknown

    def check_key(self) -> bool:
        """Whether the store says that this is its key, as it does from its first artifact on.

        Raises `StoreError` where it is sealed with another key.
        """
        check, content = self.read_manifest(SEALED)
        if not check:  # a copy of nothing is empty
            return False
        if content is None:
            which = "a"
            remedy = "give --store-key FILE, the key that it was made with"
            if self._seal.keyed:
                which = "another"
                remedy += f", or remove {SEALED!r} in it to have everything computed again under this one"
            raise StoreError(f"the store {self.backend.place} is sealed with {which} store key: {remedy}")
        return self._seal.keyed

    def require_its_key(self) -> None:
        """Raise `StoreError` when the store is sealed with another key; checked before the first write."""
        if self._key_is_marked is None:
            self._key_is_marked = self.check_key()

    def _mark_key(self) -> None:
        """Mark the store as sealed with this key, if there is one. Raises `StoreError`."""
        self.require_its_key()
        if self._seal.keyed and not self._key_is_marked:
            self.backend.swap(SEALED, pack_artifact(SEALED, b"", self._seal), None)
            self._key_is_marked = True

    def open(self, key: ChunkKey) -> ChunkReader | None:
        """The entry under `key`, or None when there is none. Raises `EntryDamagedError` when it must not be used."""
        (reader,) = self.open_many([key])
        if isinstance(reader, EntryDamagedError):
            raise reader
        return reader

    def open_many(self, keys: Sequence[ChunkKey]) -> list[Opened]:
        """`open` several keys in as few exchanges with the backend as possible.

        The result has their order, with an error in the place of an entry that must not be used. Raises `StoreError`, and
        leaves nothing open.
        """
        self._touch_used()
        return self._opened_many(keys, self.backend.open_many)

    def _opened_many(self, keys: Sequence[ChunkKey], open_blobs: _OpenBlobs) -> list[Opened]:
        blobs = open_blobs([cache_name(key) for key in keys])
        try:
            return [self._opened(key, blob) for key, blob in zip(keys, blobs, strict=True)]
        except BaseException:
            close_all(blobs)
            raise

    def _opened(self, key: ChunkKey, blob: Found) -> Opened:
        if isinstance(blob, EntryDamagedError):
            return damaged(key, str(blob))
        if blob is None:
            self._forget(key)
            return None
        try:
            header = blob.header or read_header(blob, key, self._seal)
        except EntryDamagedError as error:
            blob.close()
            return damaged(key, str(error))
        self.backend.touch(cache_name(key))
        return ChunkReader(blob, key, header)

    @property
    def memory(self) -> MemoryStats | None:
        """Figures of the caches in memory; None without a budget for them."""
        return None if self.pool is None or self.pool.budget_bytes is None else self.pool.stats

    def put(self, key: ChunkKey, cache: ChunkCache) -> None:
        """Write or replace an entry; readers see the old or the new one. After a `StoreError` the store is as it was."""
        self.require_its_key()
        header, blobs = encode_entry(key, cache, self.codec, self._seal)
        self._touch_used()
        self.backend.put(cache_name(key), (header, *blobs))
        self._forget(key)

    def delete(self, key: ChunkKey) -> None:
        """Remove an entry; nothing happens when there is none. Open readers keep it."""
        self.require_its_key()
        self.backend.delete(cache_name(key))
        self._forget(key)

    def _forget(self, key: ChunkKey) -> None:
        if self.pool is not None:
            self.pool.forget(self, key)

    def _touch_used(self) -> None:
        """Tell the backend which caches were used in memory, so that its budget evicts others first."""
        if self.pool is not None:
            for key in self.pool.touched(self):
                self.backend.touch(cache_name(key))

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """Keys of all entries, or of those in one namespace, in no particular order. Nothing is opened."""
        folder = CACHES if namespace is None else f"{CACHES}{namespace}/"
        return map(key_of, self.backend.names(folder))

    def stats(self) -> StoreStats:
        """What the store holds now."""
        sizes = [stored.nbytes for stored in self.backend.listing(CACHES)]
        return StoreStats(len(sizes), sum(sizes))

    def prune(self, keep: Collection[ChunkKey], namespace: str) -> int:
        """Delete the entries of `namespace` that are neither in `keep` nor pinned; returns how many went."""
        spared = set(keep)
        pins = pinned(self.backend)
        unused = [key for key in self.keys(namespace) if key not in spared and key.digest not in pins]
        for key in unused:
            self.delete(key)
        if unused:  # what others hold in memory must be checked
            self.advance()
        return len(unused)

    def describe(self, namespace: str, description: Mapping[str, str]) -> None:
        """Remember in words what a namespace stands for, such as {"model": "..."}. Raises `StoreError`."""
        self.backend.put(description_name(namespace), [as_json(description)])

    def describe_new(self, namespace: str, description: Mapping[str, str]) -> None:
        """`describe` a namespace that has no description yet. Raises `StoreError`."""
        self.backend.swap(description_name(namespace), as_json(description), None)

    def undescribe(self, namespace: str) -> None:
        """Forget the words for a namespace; nothing happens when there are none. Raises `StoreError`."""
        self.backend.delete(description_name(namespace))

    def namespaces(self) -> dict[str, dict[str, str]]:
        """Every namespace that has entries or a description, with its description (empty when there is none)."""
        descriptions = read_descriptions(self.backend)
        for namespace in self.backend.folders(CACHES):
            descriptions.setdefault(namespace, {})
        return descriptions

    @property
    def generation(self) -> str:
        """Changes whenever any process calls `advance`: what was read of artifacts before may be out of date then.

        Empty before the first change. Cheap enough for every prompt. Raises `StoreError`.
        """
        try:
            token = self.backend.read(GENERATION)
        except EntryDamagedError:  # something else took its place
            return ""
        return (token or b"").decode("ascii", errors="replace")

    def advance(self) -> None:
        """Begin a new generation. Raises `StoreError` when the store cannot be written."""
        self.backend.put(GENERATION, [uuid.uuid4().hex.encode()])

    def read_artifact(self, name: str) -> bytes | None:
        """The artifact that was last written under `name`, or None. Raises `EntryDamagedError` when it is damaged."""
        try:
            raw = self.backend.read(artifact_name(name))
            return None if raw is None else unpack_artifact(name, raw, self._seal)
        except EntryDamagedError as error:
            raise EntryDamagedError(f"{name} in {self.backend.place} cannot be used: {error}") from None

    def write_artifact(self, name: str, content: bytes) -> None:
        """Keep a small named content, replacing the last one, and begin a new generation.

        Artifacts are what chunk caches depend on and what is measured once. They do not count towards the budget and are never
        evicted. After a `StoreError` the old one is still there.
        """
        self._mark_key()
        self.backend.put(artifact_name(name), [pack_artifact(name, content, self._seal)])
        self.advance()  # after it: who sees the new token finds the artifact

    def delete_artifact(self, name: str) -> None:
        """Remove an artifact, if there is one, and begin a new generation."""
        self.require_its_key()
        self.backend.delete(artifact_name(name))
        self.advance()

    def read_manifest(self, name: str) -> tuple[bytes | None, bytes | None]:
        """A manifest of `swap_manifest`, as it is kept and its content; no content when it is damaged. Raises `StoreError`."""
        try:
            raw = self.backend.read(name)
        except EntryDamagedError:
            return b"", None
        content: bytes | None = None
        with suppress(EntryDamagedError):
            content = None if raw is None else unpack_artifact(name, raw, self._seal)
        return raw, content

    def swap_manifest(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Seal and keep a manifest if the last one is still kept as `was`; whether it did. Raises `StoreError`."""
        self._mark_key()
        return self.backend.swap(name, pack_artifact(name, content, self._seal), was)

    def put_manifest(self, name: str, content: bytes) -> None:
        """Seal and keep a manifest, whatever was there. Raises `StoreError`."""
        self._mark_key()
        self.backend.put(name, [pack_artifact(name, content, self._seal)])

    def over(self, backend: Backend) -> ChunkStore:
        """The same encoding and seal over another backend, such as one tier of this one's."""
        return ChunkStore(backend, self.codec, self._seal)

    def artifacts(self) -> list[str]:
        """Names of all artifacts, sorted."""
        return sorted(name.removeprefix(ARTIFACTS) for name in self.backend.names(ARTIFACTS) if is_artifact(name))

    def writing(self) -> AbstractContextManager[None]:
        """The lock of all processes for choosing and writing artifacts; not nested. Read again inside what was read before.

        Raises `StoreError` when another process holds it for too long.
        """
        return self.backend.writing()

    def held(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those of these keys that have a usable entry, in tiers in the far place alone. Raises `StoreError`."""
        return self._usable(keys, self.backend.stored)

    def restore(self, key: ChunkKey) -> bool:
        """Copy an entry that the far place lost back from a nearer tier. Returns whether one has it. Raises `StoreError`."""
        self.require_its_key()
        return self.backend.restore(cache_name(key))

    def readable(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those of these keys that have an entry in any tier."""
        return self._usable(keys, self.backend.open_many)

    def _usable(self, keys: Iterable[ChunkKey], open_blobs: _OpenBlobs) -> set[ChunkKey]:
        usable: set[ChunkKey] = set()
        for batch in in_batches(list(dict.fromkeys(keys)), _AT_ONCE):
            for key, reader in zip(batch, self._opened_many(batch, open_blobs), strict=True):
                if isinstance(reader, ChunkReader):
                    usable.add(key)
                    reader.close()
        return usable

    def __contains__(self, key: ChunkKey) -> bool:
        """See `held`. Raises `StoreError` when the store cannot be read."""
        return key in self.held([key])


def read_descriptions(backend: Backend) -> dict[str, dict[str, str]]:
    """Every namespace's description; a damaged one reads as empty. Raises `StoreError`."""
    descriptions: dict[str, dict[str, str]] = {}
    for name in backend.names(DESCRIPTIONS):
        fields: dict[str, object] = {}
        with suppress(EntryDamagedError, ValueError, TypeError, RecursionError):
            fields = dict(json.loads(backend.read(name) or b""))
        namespace = name.removeprefix(DESCRIPTIONS).removesuffix(".json")
        descriptions[namespace] = {key: str(value) for key, value in fields.items()}
    return descriptions
