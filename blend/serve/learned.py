"""Bookkeeping of one store's caches: learned within a budget, recently brought texts, and caches that must stay removed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from threading import Lock, RLock
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal
from weakref import WeakKeyDictionary

from cachetools import TTLCache
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from blend.chunks.library import LARGEST_SHARE, Tokens
from blend.corpora import corpora, in_words, published
from blend.errors import StoreError
from blend.files import make_private_folder, write_atomically
from blend.plan import entry_bytes
from blend.store.addresses import root_of
from blend.store.admin import read_sources
from blend.store.backend import pinned
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary, Variant
    from blend.store import ChunkStore

SHARE = LARGEST_SHARE  # a surrogate context of n tokens can be chosen out of n times so many
KEEP_S = 3600.0

_Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{8,128}$")]
_Bytes = Annotated[int, Field(strict=True, gt=0)]


class _Content(BaseModel):
    """The file of `LearnedCaches`. caches: namespace, digest and size, least recently used first."""

    version: Literal[1]
    caches: list[tuple[_Digest, _Digest, _Bytes]]
    decisions: int = 0


class LearnedCaches:
    """Keys and sizes of the caches of learned passages, least recently used first, within a budget. Thread-safe.

    path: a file of digests and sizes in the store's folder. A damaged one counts as empty.
    decided: whether a surrogate context was chosen from learned texts.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.budget = budget_bytes
        self._path, self._lock = path, RLock()
        try:
            held = _Content.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            held = _Content(version=1, caches=[])
        self._sizes = {ChunkKey(namespace, digest): nbytes for namespace, digest, nbytes in held.caches}
        self.decided = bool(held.decisions)

    def use(self, caches: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        """Note that these caches, with their sizes in bytes, were used or made. Returns the keys to evict for them.

        The caller deletes those from the store, unless a corpus needs them. Keys of `caches` themselves go last.
        """
        with self._lock:
            for key, nbytes in caches.items():
                self._sizes.pop(key, None)
                self._sizes[key] = nbytes
            surplus, evicted = sum(self._sizes.values()) - self.budget, []
            while surplus > 0:
                key = next(iter(self._sizes))
                surplus -= self._sizes.pop(key)
                evicted.append(key)
            return evicted

    def admitted(self, library: ChunkLibrary, chunks: Sequence[Tokens]) -> set[Tokens]:
        """Clients brought these chunks: those whose caches may all be stored, or stay stored.

        Deletes the least recently used caches to make room, but no corpus's and no pinned ones. Raises `StoreError`; before
        anything has changed if it is unknown which caches belong to a corpus.
        """
        store, variants = library.store, {library.key(one): one for one in library.variants(chunks)}
        removed = removed_from(store)
        with self._lock:
            new = {key: _entry_bytes(library, one) for key, one in variants.items() if key not in self}
            kept = _kept(store, self._path.parent) if self.nbytes + sum(new.values()) > self.budget else frozenset()
            removed.allow(variants)
            gone = self.use({key: new.get(key) or self._sizes[key] for key in variants})
            unused = [key for key in gone if key.digest not in kept]
            removed.add(unused)
            for key in unused:
                store.delete(key)
            if gone or new:  # a new order alone is not worth a file
                self.save()
            return set(chunks) - {one.chunk for key, one in variants.items() if key not in self}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        with self._lock:
            return sum(self._sizes.values())

    def save(self) -> None:
        """Write the file. Raises `StoreError` if that fails; the old file then remains.

        Call it after the evicted caches are deleted: if the process dies in between, the file names too many.
        """
        with self._lock:
            caches = [(*key, nbytes) for key, nbytes in self._sizes.items()]
            content = _Content(version=1, caches=caches, decisions=int(self.decided)).model_dump_json()
            try:
                make_private_folder(self._path.parent)
                write_atomically(self._path, [content.encode()], durable=False)
            except OSError as error:
                raise StoreError(f"the list of learned passages {self._path} cannot be written: {error}") from error


def _entry_bytes(library: ChunkLibrary, one: Variant) -> int:
    rotations, encoder = library.decoder.rotations, library.encoder(contextual=one.contextual)
    keys, values = tuple(layer.key_shape for layer in rotations), tuple(layer.value_shape for layer in rotations)
    start, codec = len(encoder.prefix_tokens), library.store.codec.name
    return entry_bytes(keys, values, len(one.chunk), start, codec, encoder.identity.dtype)


def _kept(store: ChunkStore, root: Path) -> frozenset[str]:
    """Digests of the caches that always stay: a corpus's, and pinned ones. root: the store's folder."""
    sources = read_sources(store)
    if sources.unread:
        raise StoreError(f"{sources.unread[0]}, the note of a corpus's caches, cannot be read: nothing more is learned")
    held = set(corpora(root)) if root_of(root) is None else published(store)
    for name in sorted(held - sources.corpora):
        raise StoreError(
            f"the store does not say which caches the corpus ({in_words(name)}) uses: nothing more is learned; "
            "run `blend precompute` for it again"
        )
    return frozenset(sources.documents) | pinned(store.backend)


class RecentTexts:
    """The texts that questions brought last, as token ids, each once. Thread-safe.

    most: tokens to keep, up to the length of the oldest text.
    """

    def __init__(self, most: int) -> None:
        self.tokens = 0
        self._most, self._lock = most, Lock()
        self._chunks: OrderedDict[Tokens, None] = OrderedDict()

    def add(self, chunks: Iterable[Tokens]) -> None:
        """Add texts of a question."""
        with self._lock:
            for chunk in chunks:
                self.tokens += len(chunk) if chunk not in self._chunks else 0
                self._chunks[chunk] = None
                self._chunks.move_to_end(chunk)
            while self._chunks and self.tokens - len(next(iter(self._chunks))) >= self._most:
                self.tokens -= len(self._chunks.popitem(last=False)[0])

    def latest(self) -> list[Tokens]:
        """The texts, latest first."""
        with self._lock:
            return list(reversed(self._chunks))


class RemovedKeys:
    """Keys of deleted caches that running prompts must not write again. Thread-safe.

    A prompt from before a deletion may find the cache missing and compute it for later prompts. A key is forgotten after
    `KEEP_S`: nothing is stored any more for prompts of that age. clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._keys: TTLCache[ChunkKey, None] = TTLCache(inf, KEEP_S, clock)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Refuse these keys from now on. Call it before deleting their caches."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))

    def allow(self, keys: Iterable[ChunkKey]) -> None:
        """Accept these keys again: a document or a question brought their chunks."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def unless_removed(self, key: ChunkKey, begun: float, keep: Callable[[], object]) -> None:
        """Call `keep`, which stores this cache, unless its key is refused.

        begun: when the prompt began, by the clock; `KEEP_S` later nothing is stored for it.
        """
        with self._lock:  # while it is written a removal waits, and deletes it then
            if key not in self._keys and begun >= self._clock() - KEEP_S:
                keep()


_REMOVED: WeakKeyDictionary[ChunkStore, RemovedKeys] = WeakKeyDictionary()
_REMOVED_LOCK = Lock()


def removed_from(store: ChunkStore) -> RemovedKeys:
    """The removed keys of a store, shared by all of this process that write to it."""
    with _REMOVED_LOCK:
        return _REMOVED.setdefault(store, RemovedKeys())
