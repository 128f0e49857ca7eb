"""The contract of a store: chunk caches under content addresses, readable one layer at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError, EntryDamagedError, StoreError
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

        The tensors are decoded to the dtype that was put in and must not be written to: a store may hand out its own
        memory.
        Raises `EntryDamagedError` when the bytes are not those that were written.
        """

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """Copy one layer, verified, into two `[kv_heads, tokens, head_dim]` tensors of any floating dtype and device.

        The cheapest way into a larger cache: pass slices of it. Raises `EntryDamagedError`, and writes nothing, when
        the bytes are not those that were written or their shapes are not those of the destination.
        """
        copy_layer(index, self.layer(index), (keys_out, values_out))

    def close(self) -> None:  # noqa: B027 - most readers hold nothing
        """Release what the reader holds; idempotent."""

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def copy_layer(index: int, stored: tuple[torch.Tensor, torch.Tensor], out: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Copy keys and values of layer `index`, converting the dtype.

    Raises `EntryDamagedError`, and writes nothing, unless the shapes are the same: a plain copy would broadcast.
    """
    found, needed = [list(t.shape) for t in stored], [list(t.shape) for t in out]
    if found != needed:
        raise EntryDamagedError(
            f"layer {index} of a store entry has shapes {found}, needed are {needed}: compute it again"
        )
    for source, destination in zip(stored, out, strict=True):
        destination.copy_(source)


def require_budget(budget_bytes: int | None, nbytes: int = 0) -> None:
    """Raise `ConfigError` for a budget that is not positive, `StoreError` for an entry of `nbytes` that exceeds it."""
    if budget_bytes is None:
        return
    if budget_bytes <= 0:
        raise ConfigError(f"the store's budget is {budget_bytes} bytes; it must be positive")
    if nbytes > budget_bytes:
        raise StoreError(
            f"one chunk cache takes {nbytes} bytes, the store's budget is {budget_bytes}: "
            "raise the budget or use smaller chunks"
        )


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

    def prune(self, keep: Collection[ChunkKey], namespace: str) -> int:
        """Delete the entries of `namespace` that are not in `keep`; returns how many went."""
        wanted = set(keep)
        gone = [key for key in self.keys(namespace) if key not in wanted]
        for key in gone:
            self.delete(key)
        return len(gone)

    def describe(self, namespace: str, description: Mapping[str, str]) -> None:  # noqa: B027 - a store need not remember
        """Remember in words what a namespace stands for, such as {"model": "...", "dtype": "float32"}.

        Replaces the last description; a store that does not remember returns empty ones from `namespaces`.
        Raises `StoreError` when it cannot be written.
        """

    def namespaces(self) -> dict[str, dict[str, str]]:
        """Every namespace that has entries or a description, with its description (empty when there is none)."""
        return {key.namespace: {} for key in self.keys()}

    @property
    @abstractmethod
    def generation(self) -> str:
        """Changes whenever any process calls `advance`: what was read of artifacts before may be out of date then.

        Cheap enough to be asked before every prompt. Raises `StoreError` when the store cannot be read.
        """

    @abstractmethod
    def advance(self) -> None:
        """Begin a new generation. Raises `StoreError` when the store cannot be written."""

    @abstractmethod
    def read_artifact(self, name: str) -> bytes | None:
        """The small named thing that was last written under `name`, or None when there is none.

        Raises `EntryDamagedError` when the bytes are not those that were written.
        """

    @abstractmethod
    def write_artifact(self, name: str, content: bytes) -> None:
        """Keep a small named thing, replacing the last one of that name, and begin a new generation.

        Artifacts are what chunk caches depend on and what is measured once. They are kept as they are: no codec touches
        them, they do not count towards the budget and are never evicted. name: lower-case letters, digits and dashes.
        Raises `StoreError` when it cannot be written; the old one is then still there.
        """

    @abstractmethod
    def delete_artifact(self, name: str) -> None:
        """Remove an artifact, and begin a new generation; nothing happens when there is none."""

    @abstractmethod
    def artifacts(self) -> Iterator[str]:
        """Names of all artifacts, in no particular order."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """Held while artifacts are chosen and written, by one thread of one process at a time; not nested.

        Read again inside what was read before: another process may have written it meanwhile. Raises `StoreError` when
        another one holds it for too long.
        """

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether there is an entry that can be used. A store that cannot be read raises `StoreError`: that is no answer."""
        try:
            reader = self.open(key)
        except EntryDamagedError:
            return False
        if reader is None:
            return False
        reader.close()
        return True


_ARTIFACT_NAME = re.compile(r"[0-9a-z-]{1,128}")


def require_artifact_name(name: str) -> str:
    """The name, if it can name an artifact; raises `StoreError`."""
    if not _ARTIFACT_NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name an artifact: use lower-case letters, digits and dashes")
    return name
