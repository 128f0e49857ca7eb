"""The contract of a store: chunk caches under content addresses, readable one layer at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from blend.types import ChunkCache, ChunkKey

if TYPE_CHECKING:
    import torch


class StoreStats(NamedTuple):
    """What a store holds: entries and their bytes as stored."""

    entries: int
    nbytes: int


class ChunkReader(ABC):
    """One open entry. Layers may be read in any order and independently; close it, or use it in a `with`."""

    tokens: int
    layers: int
    start: int

    @abstractmethod
    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[kv_heads, tokens, head_dim]`, verified.

        The tensors are decoded to the dtype that was put in and must not be written to: a store may hand out its own memory.
        Raises `EntryDamagedError` when the bytes are not those that were written.
        """

    def close(self) -> None:  # noqa: B027 - most readers hold nothing
        """Release what the reader holds; idempotent."""

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ChunkStore(ABC):
    """Content-addressed chunk caches. Implementations are safe to share between threads and processes."""

    @abstractmethod
    def open(self, key: ChunkKey) -> ChunkReader | None:
        """The entry under `key`, or None when there is none. Raises `EntryDamagedError` when it must not be used."""

    @abstractmethod
    def put(self, key: ChunkKey, cache: ChunkCache) -> None:
        """Write an entry, replacing one of the same key; a reader sees either nothing, the old or the new one.

        Raises `StoreError` when it cannot be written; the store is then as it was.
        """

    @abstractmethod
    def delete(self, key: ChunkKey) -> None:
        """Remove an entry; nothing happens when there is none."""

    @abstractmethod
    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """Keys of all entries, or of those in one namespace, in no particular order."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """What the store holds now."""

    def __contains__(self, key: ChunkKey) -> bool:
        try:
            reader = self.open(key)
        except Exception:  # a damaged entry counts as absent
            return False
        if reader is None:
            return False
        reader.close()
        return True
