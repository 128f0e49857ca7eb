"""Chunk caches in the memory of this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from blend.store.base import (
    ChunkReader,
    ChunkStore,
    StoreStats,
    copy_layer,
    require_artifact_name,
    require_budget,
)
from blend.store.codec import Codec
from blend.store.entry import require_sound
from blend.types import ChunkCache, ChunkKey

if TYPE_CHECKING:
    import torch


class MemoryEntry(NamedTuple):
    """Encoded layers of one chunk; `dtype` is the one that was put in."""

    layers: tuple[Mapping[str, torch.Tensor], ...]
    codec: Codec
    dtype: torch.dtype
    tokens: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of all encoded tensors."""
        return sum(tensor.nbytes for parts in self.layers for tensor in parts.values())


class MemoryReader(ChunkReader):
    """An entry that stays readable when it is evicted meanwhile."""

    def __init__(self, entry: MemoryEntry) -> None:
        self.tokens, self.layers, self.start = entry.tokens, len(entry.layers), entry.start
        self._entry = entry

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values; the store's own memory when the codec keeps the dtype."""
        return self._entry.codec.decode(self._parts(index), self._entry.dtype)

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """One converting copy each."""
        copy_layer(index, self._entry.codec.decode(self._parts(index), None), (keys_out, values_out))

    def _parts(self, index: int) -> Mapping[str, torch.Tensor]:
        if not 0 <= index < self.layers:
            raise IndexError(f"layer {index} of {self.layers}")
        return self._entry.layers[index]


class MemoryStore(ChunkStore):
    """A store that threads share; the least recently used entries go when all together exceed `budget_bytes`."""

    def __init__(self, codec: Codec, budget_bytes: int | None = None) -> None:
        require_budget(budget_bytes)
        self._codec = codec
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[ChunkKey, MemoryEntry] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._descriptions: dict[str, dict[str, str]] = {}
        self._artifacts: dict[str, bytes] = {}
        self._writing = threading.Lock()
        self._generation = 0

    def open(self, key: ChunkKey) -> MemoryReader | None:
        """The entry, which becomes the most recently used one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        return MemoryReader(entry)

    def put(self, key: ChunkKey, cache: ChunkCache) -> None:
        """Encode a copy, then evict."""
        require_sound(cache)
        layers = tuple(self._codec.encode(keys, values) for keys, values in zip(cache.keys, cache.values, strict=True))
        entry = MemoryEntry(layers, self._codec, cache.keys[0].dtype, cache.tokens, cache.start)
        require_budget(self._budget, entry.nbytes)
        with self._lock:
            self._remove(key)
            self._entries[key] = entry
            self._used_bytes += entry.nbytes
            while self._budget is not None and self._used_bytes > self._budget:
                self._remove(next(iter(self._entries)))

    def delete(self, key: ChunkKey) -> None:
        """Drop the entry; open readers keep it."""
        with self._lock:
            self._remove(key)

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """Keys as of now; the store may change while they are gone through."""
        with self._lock:
            found = [key for key in self._entries if namespace in (None, key.namespace)]
        return iter(found)

    def stats(self) -> StoreStats:
        """Entries and the bytes of their encoded tensors."""
        with self._lock:
            return StoreStats(len(self._entries), self._used_bytes)

    def describe(self, namespace: str, description: Mapping[str, str]) -> None:
        """Keep a copy of the description."""
        with self._lock:
            self._descriptions[namespace] = dict(description)

    def namespaces(self) -> dict[str, dict[str, str]]:
        """Described namespaces and those that have entries."""
        with self._lock:
            listed: dict[str, dict[str, str]] = {key.namespace: {} for key in self._entries}
            return {**listed, **{name: dict(words) for name, words in self._descriptions.items()}}

    @property
    def generation(self) -> str:
        """A count."""
        return str(self._generation)

    def advance(self) -> None:
        """Count on."""
        with self._lock:
            self._generation += 1

    def read_artifact(self, name: str) -> bytes | None:
        """What was put there."""
        return self._artifacts.get(require_artifact_name(name))

    def write_artifact(self, name: str, content: bytes) -> None:
        """Keep the bytes."""
        self._artifacts[require_artifact_name(name)] = bytes(content)
        self.advance()

    def delete_artifact(self, name: str) -> None:
        """Drop the bytes."""
        if self._artifacts.pop(require_artifact_name(name), None) is not None:
            self.advance()

    def artifacts(self) -> Iterator[str]:
        """Names as of now."""
        return iter(tuple(self._artifacts))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock of this process."""
        with self._writing:
            yield

    def _remove(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.nbytes
