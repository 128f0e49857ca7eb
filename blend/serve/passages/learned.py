"""The book of learned passages: which caches came of passages in messages, what each takes, which go when it is too much."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock

from blend.errors import StoreError
from blend.files import make_private_folder, write_atomically
from blend.types import ChunkKey

_VERSION = 1
_HEX = re.compile(r"[0-9a-f]{8,128}")


class Learned:
    """Keys of the caches of learned passages, within a budget, the least recently seen first. Threads may share one.

    path: a file that holds digests and sizes, nobody's text; what a damaged one held is unknown until it is seen again.
    budget_bytes: what the caches may take together. decided: whether a surrogate context was chosen of what was learned.
    The caller removes caches from the store: those that `seen` returns,
    unless they are of use as chunks of a corpus too.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self._path, self._budget = path, budget_bytes
        held = _held(path)
        self._sizes, self.decided = dict(_read(held)), _decided(held)
        self._written = self.decided, list(self._sizes.items())
        self._lock = Lock()

    def seen(self, caches: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        """These caches, with the bytes each takes in the store, were used or made; which ones are to be forgotten for them.

        Of these themselves only when nothing else is left. What it returns is out of the book.
        """
        with self._lock:
            for key, nbytes in caches.items():
                self._sizes.pop(key, None)
                self._sizes[key] = nbytes
            surplus, gone = sum(self._sizes.values()) - self._budget, []
            while surplus > 0:
                key = next(iter(self._sizes))
                surplus -= self._sizes.pop(key)
                gone.append(key)
            return gone

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """The store holds these no more, or for other reasons."""
        with self._lock:
            for key in keys:
                self._sizes.pop(key, None)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def budget(self) -> int:
        """Bytes that the caches may take."""
        return self._budget

    @property
    def nbytes(self) -> int:
        """Bytes of all caches in the book."""
        with self._lock:
            return sum(self._sizes.values())

    def save(self) -> None:
        """Write the file, if anything has changed. Raises `StoreError` when that fails; the old one is then still there.

        Call it after the caches that `seen` returned are removed: should the process end in between, the book names too many.
        """
        with self._lock:
            content = self.decided, list(self._sizes.items())
            if content == self._written:
                return
            caches = [[*key, nbytes] for key, nbytes in content[1]]
            told = json.dumps({"version": _VERSION, "decisions": int(content[0]), "caches": caches}).encode()
            try:
                make_private_folder(self._path.parent)
                write_atomically(self._path, [told], durable=False)
            except OSError as error:
                raise StoreError(f"the book of learned passages {self._path} cannot be written: {error}") from error
            self._written = content


def _held(path: Path) -> dict[str, object]:
    """What the file holds; nothing of a damaged one."""
    found: object = None
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) and found.get("version") == _VERSION else {}


def _decided(held: Mapping[str, object]) -> bool:
    found = held.get("decisions")
    return type(found) is int and found > 0


def _read(held: Mapping[str, object]) -> Iterator[tuple[ChunkKey, int]]:
    """The caches, the least recently seen first."""
    entries = held.get("caches")
    if isinstance(entries, list) and all(map(_is_entry, entries)):
        yield from ((ChunkKey(namespace, digest), nbytes) for namespace, digest, nbytes in entries)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    *digests, nbytes = entry
    named = all(isinstance(digest, str) and _HEX.fullmatch(digest) for digest in digests)
    return named and type(nbytes) is int and nbytes > 0
