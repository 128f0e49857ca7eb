"""Text that requests brought: its pieces, their caches within a budget, and caches that must stay removed.

Pieces that recur stay within the budget; novel text does not evict them. The policy is W-TinyLFU (Einziger, Friedman and
Manes, 2017, "TinyLFU: a highly efficient cache admission policy"). A new piece enters a small window with
least-recently-used eviction. A piece that leaves the window stays only if it was used more often than the piece that it
would evict. A sketch of bounded size counts uses, and halves its counts from time to time.
"""

from __future__ import annotations

import json
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from hashlib import blake2b
from itertools import islice
from math import inf
from pathlib import Path
from threading import Lock, RLock
from time import monotonic
from typing import TYPE_CHECKING, Generic
from weakref import WeakKeyDictionary

import numpy as np
from cachetools import TTLCache

from blend.corpora import complete_sources
from blend.errors import StoreError
from blend.files import make_private_folder
from blend.model.outline import operator_sizes
from blend.plan import entry_bytes
from blend.serve.passages import Name, TokenIndex
from blend.store.backend import pinned
from blend.types import CacheKey, CacheKind, ChunkKey, Tokens

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.store import ChunkStore
    from blend.types import ChunkCache

KEEP_S = 3600.0

_TABLE = "CREATE TABLE IF NOT EXISTS pieces (name BLOB PRIMARY KEY, tokens BLOB, caches TEXT, used INTEGER)"
_BEFORE = ".json"  # of the list in earlier versions, which held no text

_WINDOW_SHARE = 5  # one byte in so many belongs to the window
_ROWS, _WIDTH = 4, 1 << 14  # of the sketch: 64 KiB
_MOST = 15  # of a counter
_COMPARED = 32  # oldest names, of which the least used is evicted
_HALVED_EVERY = 10 * _WIDTH  # uses


class FrequencySketch:
    """Counts uses approximately (a count-min sketch). Before it halves, a count is never too low."""

    def __init__(self) -> None:
        self._counters = np.zeros((_ROWS, _WIDTH), np.uint8)
        self._uses = 0

    def add(self, name: Hashable) -> None:
        """Count a use."""
        places = self._places(name)
        mine = self._counters[places]
        self._counters[places] = np.where((mine == mine.min()) & (mine < _MOST), mine + 1, mine)
        self._uses += 1
        if self._uses == _HALVED_EVERY:
            self._counters >>= 1
            self._uses //= 2

    def count(self, name: Hashable) -> int:
        """About how often it was used lately."""
        return int(self._counters[self._places(name)].min())

    def _places(self, name: Hashable) -> tuple[np.ndarray, np.ndarray]:
        mixed = hash(name)  # 64 bits of text or bytes; every row takes its own
        return np.arange(_ROWS), np.array([(mixed >> 16 * row) % _WIDTH for row in range(_ROWS)])


class Budget(Generic[Name]):
    """Names with sizes in bytes that together stay within a budget."""

    def __init__(self, nbytes: int) -> None:
        self.most = nbytes
        self._sketch = FrequencySketch()
        self._window: OrderedDict[Name, int] = OrderedDict()
        self._main: OrderedDict[Name, int] = OrderedDict()
        self.nbytes = self._window_bytes = 0

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def __contains__(self, name: object) -> bool:
        return name in self._window or name in self._main

    def use(self, name: Name, nbytes: int) -> list[Name]:
        """Note a use of a name, known or new. Returns the names to evict for it; it may be among them itself."""
        self._sketch.add(name)
        if nbytes > self.most:
            self.forget(name)
            return [name]
        if self._window.get(name, self._main.get(name)) != nbytes:
            self.forget(name)
        if name in self._main:
            self._main.move_to_end(name)
            return []
        if name not in self._window:
            self.nbytes += nbytes
            self._window_bytes += nbytes
        self._window[name] = nbytes
        self._window.move_to_end(name)
        return list(self._shrunk())

    def forget(self, name: Name) -> None:
        """Remove a name."""
        if (size := self._window.pop(name, None)) is not None:
            self._window_bytes -= size
        elif (size := self._main.pop(name, None)) is None:
            return
        self.nbytes -= size

    def _shrunk(self) -> Iterator[Name]:
        """Move what falls out of the window, and evict what does not fit."""
        while self._window and (self._window_bytes > self.most // _WINDOW_SHARE or self.nbytes > self.most):
            name, size = self._window.popitem(last=False)
            self._window_bytes -= size
            self._main[name] = size  # as the most recent one, and evicted at once if it is used less than the oldest
            while self._main and self.nbytes > self.most:
                oldest = [*islice(self._main, _COMPARED)]
                if name in self._main and name not in oldest:
                    oldest.append(name)
                victim = min(oldest, key=self._sketch.count)  # the oldest among the least used
                self.nbytes -= self._main.pop(victim)
                yield victim


class LearnedCaches:
    """Pieces of text that requests brought, and the sizes of their caches, within a budget. Thread-safe.

    path: a SQLite file in the store's folder, private to its owner. A damaged one counts as empty. index: finds the pieces in
    prompts; their digests are its names.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.index: TokenIndex[bytes] = TokenIndex()
        self._path, self._lock = path, RLock()
        self._budget: Budget[bytes] = Budget(budget_bytes)
        self._caches: dict[bytes, dict[ChunkKey, int]] = {}
        self._overdue: set[bytes] = set()  # beyond the budget when they were read, or without a text
        self._used = 0
        self._read()

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            return any(key in caches for caches in self._caches.values())

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def budget(self) -> int:
        """Most bytes of all caches."""
        return self._budget.most

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return self._budget.nbytes

    def admitted(self, library: ChunkLibrary, variants: Iterable[CacheKey]) -> set[Tokens]:
        """Count a use of the texts of these caches; returns the texts whose caches may be stored, or stay stored.

        Deletes less used caches to make room, but none of a corpus and no pinned ones. Raises `StoreError`. If it is unknown
        which caches belong to a corpus, it raises before it changes anything.
        """
        store, pieces = library.store, dict[Tokens, dict[ChunkKey, int]]()
        for one in variants:
            pieces.setdefault(one.chunk, {})[library.key(one)] = _entry_bytes(library, one)
        with self._lock:
            _ = store.generation  # raises while the store is away: nothing may be written in its place
            found = {
                _digest(chunk): (chunk, self._caches.get(_digest(chunk), {}) | own) for chunk, own in pieces.items()
            }
            sizes = {name: sum(caches.values()) for name, (_, caches) in found.items()}
            more = sum(sizes.values()) - sum(sum(self._caches.get(name, {}).values()) for name in found)
            full = self._overdue or self.nbytes + more > self.budget
            kept = self._kept(store) if full else frozenset()
            removed_from(store).allow(key for caches in pieces.values() for key in caches)
            self._caches |= {name: caches for name, (_, caches) in found.items()}
            gone = {other for name, size in sizes.items() for other in self._budget.use(name, size)} | self._overdue
            gone, self._overdue = {name for name in gone if name not in self._budget}, set()
            self._evict(store, gone, kept)
            new = {name: chunk for name, (chunk, _) in found.items() if name not in gone and name not in self.index}
            self.index.update(gone, new)
            self._write([name for name in found if name not in gone], gone)
            return {chunk for name, (chunk, _) in found.items() if name not in gone}

    def _kept(self, store: ChunkStore) -> frozenset[str]:
        """Digests of the caches that always stay: a corpus's, and pinned ones."""
        sources = complete_sources(store, self._path.parent, "nothing more is learned")
        return frozenset(sources.documents) | pinned(store.backend)

    def keep(
        self, library: ChunkLibrary, brought: Mapping[Tokens, ChunkCache | None], begun: float
    ) -> Sequence[CacheKey]:
        """Store the KV of texts out of the prompt that brought them; None only counts a use of the stored cache.

        Returns the caches that are still to be computed: those of models with recurrent layers, because a prompt's rows give no
        operators.

        begun: when the prompt arrived, by `time.monotonic`. Raises `StoreError`.
        """
        alone = bool(library.decoder.recurrent)
        from_prompts = [CacheKey(chunk, CacheKind.FROM_PROMPT) for chunk in brought]
        variants = library.variants(list(brought)) if alone else from_prompts
        admitted = self.admitted(library, variants)
        missing = library.missing_of([one for one in variants if one.chunk in admitted])
        if alone:
            return missing
        for one in missing:
            cache = brought[one.chunk]
            if cache is not None:
                keep = partial(library.keep, one, cache)
                removed_from(library.store).unless_removed(library.key(one), begun, keep)
        lost = {_digest(one.chunk) for one in missing if brought[one.chunk] is None}
        if lost:  # the prompt holds only part of a piece whose cache was evicted: its text is new again
            with self._lock:
                self._drop(library.store, lost & self._caches.keys())
        return ()

    def forget(self, store: ChunkStore, texts: Iterable[Tokens]) -> None:
        """Delete the pieces in which one of these texts stands, whole or in part. Raises `StoreError`."""
        with self._lock:
            asked = list(texts)
            # A search finds only some of many copies.
            while gone := {run.name for text in asked for run in self.index.runs(text)}:
                self._drop(store, gone)

    def _drop(self, store: ChunkStore, names: set[bytes]) -> None:
        for name in names:
            self._budget.forget(name)
        self._evict(store, names, frozenset())
        self.index.update(names, {})
        self._write((), names)

    def _evict(self, store: ChunkStore, gone: Iterable[bytes], kept: frozenset[str]) -> None:
        keys = [key for name in gone for key in self._caches.pop(name, ())]  # () after a deletion that failed
        unused = [key for key in keys if key.digest not in kept]
        removed_from(store).add(unused)
        for key in unused:
            store.delete(key)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The file; changes are committed together. Raises `StoreError`."""
        try:
            make_private_folder(self._path.parent)
            self._path.touch(mode=0o600)
            with closing(sqlite3.connect(self._path)) as file, file:
                file.execute("PRAGMA synchronous = OFF")  # text that a crash of the machine loses is learned again
                file.execute(_TABLE)
                yield file
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the list of learned texts {self._path} cannot be used: {error}") from error

    def _write(self, used: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """Write the changes. Call it after caches are deleted: if the process dies in between, the file names too many."""
        rows = []
        for name in used:
            self._used += 1
            caches = json.dumps([(*key, nbytes) for key, nbytes in self._caches[name].items()])
            rows.append((name, self.index.tokens(name).tobytes(), caches, self._used))
        with self._opened() as file:
            file.executemany("DELETE FROM pieces WHERE name = ?", [(name,) for name in gone])
            file.executemany("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?, ?)", rows)

    def _read(self) -> None:
        """Read the file. Caches of the list before it are evicted first: nothing finds them any more."""
        if not (self._path.exists() or self._path.with_suffix(_BEFORE).exists()):
            return
        rows = list[tuple[bytes, bytes, str, int]]()
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            old = json.loads(self._path.with_suffix(_BEFORE).read_bytes())["caches"]
            rows = [(bytes.fromhex(digest), b"", json.dumps([(space, digest, size)]), 0) for space, digest, size in old]
        try:
            with self._opened() as file:
                file.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?, ?, ?)", rows)
                rows = file.execute("SELECT name, tokens, caches, used FROM pieces ORDER BY used").fetchall()
            self._path.with_suffix(_BEFORE).unlink(missing_ok=True)
            caches = {
                name: {ChunkKey(space, digest): int(size) for space, digest, size in json.loads(held)}
                for name, _, held, _ in rows
            }
            texts = {name: np.frombuffer(tokens, np.int32) for name, tokens, *_ in rows if tokens}
        except (StoreError, OSError, ValueError, TypeError, RecursionError) as error:
            locked = isinstance(error.__cause__, OSError | sqlite3.OperationalError)
            if not locked:  # it is damaged
                with suppress(OSError):
                    self._path.unlink()
            return
        self._caches, self._used = caches, rows[-1][-1] if rows else 0
        for name, sizes in caches.items():
            self._overdue.update(self._budget.use(name, sum(sizes.values())) if name in texts else [name])
        self.index.update((), texts)


class LearnedTexts:
    """The texts in another process's list, as they are now. path: of its `LearnedCaches`. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._index: TokenIndex[bytes] = TokenIndex()
        self._path, self._lock = path, Lock()
        self._seen, self._used = 0, -1

    @property
    def index(self) -> TokenIndex[bytes]:
        """Finds them in prompts. If the list cannot be read, it is empty or stays as it was."""
        with self._lock, suppress(OSError, sqlite3.Error, ValueError):
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                with closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)) as file:
                    names = {name for (name,) in file.execute("SELECT name FROM pieces")}
                    new = file.execute("SELECT name, tokens, used FROM pieces WHERE used > ?", (self._used,)).fetchall()
                texts = {name: np.frombuffer(tokens, np.int32) for name, tokens, _ in new if name not in self._index}
                self._index.update(set(self._index.names) - names, texts)
                self._seen, self._used = changed, max([self._used, *(used for *_, used in new)])
        return self._index


def _digest(chunk: Tokens) -> bytes:
    return blake2b(np.array(chunk, np.int32).tobytes(), digest_size=16).digest()


def _entry_bytes(library: ChunkLibrary, one: CacheKey) -> int:
    decoder = library.decoder
    keys, values = zip(*((layer.key_shape, layer.value_shape) for layer in decoder.rotations), strict=True)
    operators = operator_sizes(decoder.recurrent, len(decoder.rotations))
    return entry_bytes(
        keys, values, len(one.chunk), library.start(one), library.store.codec.name, decoder.kept_as, operators
    )


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
