"""Text that requests brought: its pieces, and their caches within a budget."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blend.corpora import complete_sources
from blend.errors import StoreError
from blend.files import make_private_folder
from blend.serve.prompts.budget import Budget
from blend.serve.prompts.pins import (
    ALL_PINS,
    DELETE_PIN,
    DELETE_PINS,
    PINS_TABLE,
    WRITE_PIN,
    Piece,
    PinRow,
    Pins,
    Wish,
)
from blend.serve.reasons import EVICTED, NEW, REFUSED, Word
from blend.serve.removed import removed_from
from blend.serve.token_index import Ids, TokenIndex, digest_of
from blend.store.backend import pinned
from blend.types import ChunkKey, Tokens

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.store import ChunkStore

Row = tuple[str, bytes, bytes, str, int]

_TABLE = """
CREATE TABLE IF NOT EXISTS texts (user TEXT, name BLOB, tokens BLOB, caches TEXT, used INTEGER, PRIMARY KEY (user, name));
CREATE INDEX IF NOT EXISTS texts_used ON texts (used);
"""
_IS_TABLE = "SELECT 1 FROM sqlite_master WHERE name = ?"
_ROWS_OF_TEXTS = "SELECT user, name, tokens, caches, used FROM texts"
_CHANGE = slice(24, 28)  # of a SQLite file: counts its changes
_REMEMBERED = 1 << 14  # texts that left


class LearnedTexts:
    """The texts in a list of `LearnedCaches`, as they are now: other processes change it. Thread-safe.

    path: a SQLite file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = RLock()
        self._indexes = UserIndexes()
        self._change = 0  # of the file, as it was read last
        self._used = -1

    def index(self, user: str = "") -> TokenIndex[bytes]:
        """Finds a user's texts in prompts; their digests are its names. If the list cannot be read, it stays as it was."""
        if self._lock.acquire(blocking=False):  # else it is being changed, which may wait for the store
            try:
                self._follow()
            finally:
                self._lock.release()
        return self._indexes.of(user)

    def _follow(self) -> None:
        """Take over what other processes have changed, if the file can be read."""
        with suppress(OSError, sqlite3.Error, ValueError, TypeError, RecursionError):
            if _change_of(self._path) != self._change:
                self._read_changes()

    def _read_changes(self) -> None:
        change = _change_of(self._path)
        with closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)) as file:
            listed = {Piece(*row) for row in file.execute("SELECT user, name FROM texts")}
            rows = file.execute(f"{_ROWS_OF_TEXTS} WHERE used > ? ORDER BY used", (self._used,)).fetchall()
            has_pins = file.execute(_IS_TABLE, ("pins",)).fetchone()  # older files have none
            pins = file.execute(ALL_PINS).fetchall() if has_pins else []
        self._take_pins(pins)
        self._take_over(listed, rows)
        self._change = change
        self._used = rows[-1][-1] if rows else self._used

    def _take_pins(self, rows: Sequence[PinRow]) -> None:
        """Change the pins to these; a reader needs none."""

    def _take_over(self, listed: set[Piece], rows: Sequence[Row]) -> None:
        """Change all to these pieces, of which the rows are new or were used lately."""
        unknown = dict[Piece, Ids]()
        for user, name, tokens, *_ in rows:
            piece = Piece(user, name)
            if tokens and piece not in self._indexes:
                unknown[piece] = np.frombuffer(tokens, np.int32)
        self._indexes.update(self._indexes.names() - listed, unknown)


class Forgotten(NamedTuple):
    """What was deleted: texts, and bytes of their caches."""

    texts: int = 0
    nbytes: int = 0


class LearnedCaches(LearnedTexts):
    """Pieces of text that requests brought, and the sizes of their caches, within a budget.

    Threads may share it, and processes of one machine. Each end user has their own pieces. Prompts look up only the pieces
    of their user. The caches are functions of the tokens alone, so equal pieces of several users share them, and no user
    notices.

    Args:
        path: a SQLite file in the store's folder, private to its owner. A damaged one counts as empty.
        budget_bytes: most bytes of all caches. Pinned texts take at most half of them.
        clock: gives seconds since 1970, the same in all processes.

    Attributes:
        pinned: digests of the caches of pinned texts. A read takes no lock.

    """

    def __init__(
        self,
        path: Path,
        budget_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path)
        self._pins = Pins(budget_bytes // 2, clock)
        self.pinned: frozenset[str] = frozenset()
        self._past: dict[Piece, Word] = {}  # why texts are not here any more, the latest last
        self._budget: Budget[Piece] = Budget(budget_bytes)
        self._caches: dict[Piece, dict[ChunkKey, int]] = {}
        self._uses: Counter[ChunkKey] = Counter()  # pieces of each cache
        self._overdue: set[Piece] = set()  # beyond the budget when they were read, or without a text
        self._own_numbers = range(0)  # under which this process noted its last uses in the file
        self._read()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def budget(self) -> int:
        """Most bytes of all caches."""
        return self._budget.most

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, those of several users once for each."""
        return self._budget.nbytes

    def admitted(
        self,
        library: ChunkLibrary,
        texts: Iterable[Tokens],
        user: str = "",
        session: str = "",
    ) -> set[Tokens]:
        """Count a use of these texts by a user's session; returns those whose caches may be stored, or stay stored.

        Deletes less used caches to make room, but none of a corpus and no pinned ones. Raises `StoreError`. If it is unknown
        which caches belong to a corpus, it raises before it changes anything.
        """
        store = library.store
        new_caches = dict[Tokens, dict[ChunkKey, int]]()
        for variant in library.variants(list(texts)):
            entries = new_caches.setdefault(variant.chunk, {})
            entries[library.key(variant)] = library.entry_bytes(variant)
        pieces = {Piece(user, digest_of(text)): text for text in new_caches}
        with self._lock:
            _ = store.generation  # raises while the store is away: nothing may be written in its place
            self._follow()
            strays = self._end_pins()
            noted = self._pins.note(pieces, session, self._caches)
            caches = {piece: self._entries(piece) | new_caches[text] for piece, text in pieces.items()}
            sizes = {piece: sum(entries.values()) for piece, entries in caches.items()}
            sizes_before = [sum(self._entries(piece).values()) for piece in pieces]
            growth = sum(sizes.values()) - sum(sizes_before)
            full = self._overdue or self.nbytes + growth > self.budget
            permanent = self._kept(store) if full else frozenset()
            removed_from(store).allow(key for entries in new_caches.values() for key in entries)
            self._take(caches)
            evicted = self._overdue
            for piece, size in sizes.items():
                self._pins.resize(piece, size)
                evicted.update(self._budget.use(piece, size, pinned=piece in self._pins))
            removed = {piece for piece in evicted if piece not in self._budget}
            self._overdue = set()
            self._evict(store, removed, permanent)
            stay = {piece: text for piece, text in pieces.items() if piece not in removed}
            new_texts = {piece: text for piece, text in stay.items() if piece not in self._indexes}
            self._indexes.update(removed, new_texts)
            self._pins.forget(removed)
            self._remember(stay, {piece: REFUSED if piece in pieces else EVICTED for piece in removed})
            self._write(stay, removed | strays, noted | {piece for piece in stay if piece in self._pins})
            return set(stay.values())

    def _remember(self, learned: Iterable[Piece], gone: Mapping[Piece, Word]) -> None:
        """Note why texts are gone; those that are learned are here again."""
        for piece in (*learned, *gone):
            self._past.pop(piece, None)
        self._past.update(gone)
        for piece in list(islice(self._past, max(0, len(self._past) - _REMEMBERED))):
            del self._past[piece]

    def pin(
        self,
        wishes: Mapping[Tokens, Wish],
        user: str,
        session: str,
    ) -> set[Tokens]:
        """Pin the texts of a request that fit, learned or not. Raises `StoreError`.

        Returns the pinned texts. A text that is not learned in time is pinned for nothing.
        """
        pieces = {Piece(user, digest_of(text)): text for text in wishes}
        with self._lock:
            self._follow()
            strays = self._end_pins()
            fitting = self._pins.add({piece: wishes[text] for piece, text in pieces.items()}, session, self._caches)
            for piece in fitting:
                self._budget.pin(piece)
            self._write((), strays - pieces.keys(), pieces)
            return {pieces[piece] for piece in fitting}

    def share(self, texts: Iterable[Tokens], user: str) -> None:
        """Note that a user's request without a session has these texts. Raises `StoreError`.

        `admitted` does so for those that are computed or blended; these may have come from memory.
        """
        if not self._pins.sessions:
            return
        pieces = {Piece(user, digest_of(text)) for text in texts}
        if not any(self._pins.is_owned(piece) for piece in pieces):
            return
        with self._lock:
            self._follow()
            self._write((), (), self._pins.note(pieces, "", self._caches))

    def end_session(self, store: ChunkStore, user: str, session: str) -> Forgotten:
        """Delete the texts that only this session of a user brought or used. Raises `StoreError`."""
        with self._lock:
            _ = store.generation
            self._follow()
            alone, shared = self._pins.of(user, session)
            learned = alone & self._caches.keys()
            nbytes = self._drop(store, alone)
            self._pins.leave(shared, session)
            strays = self._end_pins()
            self._write((), strays, left=[(*piece, session) for piece in shared])
            return Forgotten(len(learned), nbytes)

    def past(self, user: str, digest: bytes) -> Word:
        """Why a prompt finds this text not learned, if this process remembers it; else `NEW`."""
        return self._past.get(Piece(user, digest), NEW)

    def namespaces(self, user: str, text: Tokens) -> set[str]:
        """The namespaces of a text's caches: those of the models that learned it."""
        return {key.namespace for key in self._entries(Piece(user, digest_of(text)))}

    def _end_pins(self) -> set[Piece]:
        """Let go what was pinned and is not any more. Returns pieces that the file need not list."""
        for piece in self._pins.end():
            self._budget.unpin(piece)
        strays = self._pins.strays(self._caches)
        self._pins.forget(strays)
        return strays

    def _entries(self, piece: Piece) -> dict[ChunkKey, int]:
        """The caches of a piece with their sizes; none of an unknown one."""
        return self._caches.get(piece, {})

    def _take(self, caches: Mapping[Piece, dict[ChunkKey, int]]) -> None:
        for piece, entries in caches.items():
            self._uses.update(entries.keys() - self._entries(piece).keys())
            self._caches[piece] = entries

    def _kept(self, store: ChunkStore) -> frozenset[str]:
        """Digests of the caches that always stay: a corpus's, and pinned ones."""
        sources = complete_sources(store, self._path.parent, "nothing more is learned")
        return frozenset(sources.documents) | pinned(store.backend)

    def forget(self, store: ChunkStore, texts: Iterable[Tokens]) -> None:
        """Delete every user's pieces in which one of these texts stands, whole or in part. Raises `StoreError`."""
        with self._lock:
            self._follow()
            texts = list(texts)
            # A search finds only some of many copies.
            while pieces := {piece for text in texts for piece in self._indexes.pieces_in(text)}:
                self._drop(store, pieces)

    def drop(
        self,
        store: ChunkStore,
        texts: Iterable[Tokens],
        user: str = "",
    ) -> None:
        """Delete these pieces of a user. Raises `StoreError`."""
        with self._lock:
            self._follow()
            pieces = {Piece(user, digest_of(text)) for text in texts}
            self._drop(store, pieces & self._caches.keys())

    def _drop(self, store: ChunkStore, pieces: set[Piece]) -> int:
        """Delete these pieces; returns the bytes of the deleted caches."""
        permanent = self._kept(store) if pieces else frozenset()
        for piece in pieces:
            self._budget.forget(piece)
            self._past.pop(piece, None)
        nbytes = self._evict(store, pieces, permanent)
        self._indexes.update(pieces, {})
        self._pins.forget(pieces)
        self._write((), pieces)
        return nbytes

    def _evict(
        self,
        store: ChunkStore,
        pieces: Iterable[Piece],
        permanent: frozenset[str],
    ) -> int:
        """Forget these pieces and delete their caches; returns the bytes of these."""
        sizes = {key: nbytes for piece in pieces for key, nbytes in self._entries(piece).items()}
        deleted = [key for key in self._forgotten(pieces) if key.digest not in permanent]
        removed_from(store).add(deleted)
        for key in deleted:
            store.delete(key)
        return sum(sizes[key] for key in deleted)

    def _forgotten(self, pieces: Iterable[Piece]) -> set[ChunkKey]:
        """Forget the caches of these pieces; returns those that no other piece has."""
        keys = [key for piece in pieces for key in self._caches.pop(piece, ())]  # () after a deletion that failed
        self._uses.subtract(keys)
        unused = {key for key in keys if not self._uses[key]}
        for key in unused:
            del self._uses[key]
        return unused

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The file; changes are committed together. Raises `StoreError`."""
        try:
            make_private_folder(self._path.parent)
            self._path.touch(mode=0o600)
            with closing(sqlite3.connect(self._path)) as file, file:
                file.execute("PRAGMA synchronous = OFF")  # text that a crash of the machine loses is learned again
                file.executescript(_TABLE + PINS_TABLE)
                yield file
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the list of learned texts {self._path} cannot be used: {error}") from error

    def _write(
        self,
        used: Iterable[Piece],
        removed: Iterable[Piece],
        pinned: Iterable[Piece] = (),
        left: Iterable[tuple[str, bytes, str]] = (),
    ) -> None:
        """Write the changes. Call it after caches are deleted: if the process dies in between, the file names too many.

        pinned: pieces whose pins have changed. left: uses by sessions that have ended.
        """
        removed = list(removed)
        with self._opened() as file:
            file.execute("BEGIN IMMEDIATE")
            change = _change_of(self._path)
            (last,) = file.execute("SELECT coalesce(max(used), 0) FROM texts").fetchone()
            rows = []
            for number, piece in enumerate(used, last + 1):
                caches = json.dumps([(*key, nbytes) for key, nbytes in self._caches[piece].items()])
                tokens = self._indexes.tokens(piece).tobytes()
                rows.append((*piece, tokens, caches, number))
            file.executemany("DELETE FROM texts WHERE user = ? AND name = ?", removed)
            file.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?)", rows)
            file.executemany(DELETE_PINS, removed)
            file.executemany(DELETE_PIN, left)
            file.executemany(WRITE_PIN, self._pins.rows(pinned))
            changes = file.total_changes
        self._spare()
        self._own_numbers = range(last + 1, last + 1 + len(rows))
        if change == self._change:  # else others have changed it, too
            self._change = change + (changes > 0)
            self._used = last + len(rows)

    def _spare(self) -> None:
        keys = (key for piece in self._pins for key in self._entries(piece))
        self.pinned = frozenset(key.digest for key in keys)

    def _read(self) -> None:
        """Read the file."""
        if not self._path.exists():
            return
        try:
            self._read_changes()
        except (StoreError, OSError, sqlite3.Error, ValueError, TypeError, RecursionError) as error:
            locked = isinstance(error.__cause__ or error, OSError | sqlite3.OperationalError)
            if not locked:  # it is damaged
                with suppress(OSError):
                    self._path.unlink()

    def _take_pins(self, rows: Sequence[PinRow]) -> None:
        for piece in self._pins:
            self._budget.unpin(piece)
        self._pins.read(rows)
        for piece in self._pins:
            self._budget.pin(piece)

    def _take_over(self, listed: set[Piece], rows: Sequence[Row]) -> None:
        caches = dict[Piece, dict[ChunkKey, int]]()
        for user, name, _, encoded, _ in rows:
            entries = {ChunkKey(space, digest): int(size) for space, digest, size in json.loads(encoded)}
            caches[Piece(user, name)] = entries
        super()._take_over(listed, rows)
        unlisted = self._caches.keys() - listed
        for piece in unlisted:
            self._budget.forget(piece)
        self._forgotten(unlisted)
        caches = {piece: self._entries(piece) | sizes for piece, sizes in caches.items()}
        self._take(caches)
        for user, name, *_, number in rows:
            piece = Piece(user, name)
            if piece not in self._indexes:
                self._overdue.add(piece)
            elif number not in self._own_numbers:
                size = sum(caches[piece].values())
                self._overdue.update(self._budget.use(piece, size, pinned=piece in self._pins))
        self._spare()


def _change_of(path: Path) -> int:
    """Counts the changes of a SQLite file. Raises `OSError` without one."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(_CHANGE.stop)[_CHANGE])


class UserIndexes:
    """A `TokenIndex` for each end user, which exists as long as it has a text. Threads may search while one updates."""

    def __init__(self) -> None:
        self._indexes: dict[str, TokenIndex[bytes]] = {}

    def __contains__(self, piece: Piece) -> bool:
        return piece.digest in self.of(piece.user)

    def of(self, user: str) -> TokenIndex[bytes]:
        """The user's index."""
        return self._indexes.get(user) or TokenIndex()

    def tokens(self, piece: Piece) -> Ids:
        """The ids of a text. Raises KeyError for an unknown one."""
        return self.of(piece.user).tokens(piece.digest)

    def pieces_in(self, text: Tokens) -> Iterator[Piece]:
        """Pieces, of any user, that share a run of tokens with a text."""
        for user, index in self._indexes.items():
            yield from (Piece(user, run.name) for run in index.runs(text))

    def names(self) -> set[Piece]:
        """The pieces of all users."""
        return {Piece(user, name) for user, index in self._indexes.items() for name in index.names}

    def update(self, removed: Iterable[Piece], new: Mapping[Piece, Tokens | Ids]) -> None:
        """Forget some texts and add others."""
        changes = defaultdict[str, tuple[list[bytes], dict[bytes, Tokens | Ids]]](lambda: ([], {}))
        for piece in removed:
            changes[piece.user][0].append(piece.digest)
        for piece, text in new.items():
            changes[piece.user][1][piece.digest] = text
        for user, (names, texts) in changes.items():
            index = self.of(user)
            index.update(names, texts)
            if index:
                self._indexes[user] = index
            else:
                self._indexes.pop(user, None)
