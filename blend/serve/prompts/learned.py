"""Text that requests brought: its pieces, and their caches within a budget."""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blend.corpora import complete_sources
from blend.errors import StoreError
from blend.files import make_private_folder
from blend.layout import Tokens
from blend.serve.reasons import EVICTED, NEW, REFUSED, Word
from blend.serve.removed import removed_from
from blend.serve.token_index import Ids, TokenIndex, digest_of
from blend.store.backend import pinned
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.store import ChunkStore

# pins: the sessions that use a text, each with the time until which it keeps the text, 0 for none. The session "" stands for
# all requests that name none; a text without a row here is theirs alone.
_TABLES = """
CREATE TABLE IF NOT EXISTS pieces (user TEXT, name BLOB, tokens BLOB, used INTEGER, recurs INTEGER, PRIMARY KEY (user, name));
CREATE INDEX IF NOT EXISTS pieces_used ON pieces (used);
CREATE TABLE IF NOT EXISTS caches (
    user TEXT, name BLOB, namespace TEXT, digest TEXT, nbytes INTEGER, PRIMARY KEY (user, name, namespace, digest)
);
CREATE INDEX IF NOT EXISTS caches_digest ON caches (digest);
CREATE TABLE IF NOT EXISTS pins (
    user TEXT, name BLOB, session TEXT, until REAL, nbytes INTEGER, PRIMARY KEY (user, name, session)
);
"""
# Files of kvblend before 2026-11-28 list a piece's caches as JSON.
_IS_OLD = "SELECT 1 FROM sqlite_master WHERE name = 'texts'"
_CONVERT = (
    "INSERT OR IGNORE INTO pieces SELECT user, name, tokens, used, 0 FROM texts",
    "INSERT OR IGNORE INTO caches SELECT user, name, json_extract(value, '$[0]'), json_extract(value, '$[1]'), "
    "json_extract(value, '$[2]') FROM texts, json_each(caches)",
    "DROP TABLE texts",
)
# Pieces with the bytes of their caches, those that leave first in front.
_BY_WORTH = """
SELECT user, name, coalesce(sum(nbytes), 0), EXISTS (
    SELECT 1 FROM pins WHERE pins.user = pieces.user AND pins.name = pieces.name AND until > ?
) AS pinned FROM pieces LEFT JOIN caches USING (user, name) GROUP BY user, name ORDER BY pinned, recurs, used
"""
_PINNED_BYTES = """
SELECT user, name, max(max(nbytes), (
    SELECT coalesce(sum(nbytes), 0) FROM caches WHERE caches.user = pins.user AND caches.name = pins.name
)) FROM pins WHERE until > ? GROUP BY user, name
"""
_PINNED_DIGESTS = "SELECT digest FROM caches JOIN pins USING (user, name) WHERE until > ?"
_PIECE = "user = ? AND name = ?"
_CHANGE = slice(24, 28)  # of a SQLite file: counts its changes
_BUSY_S = 60.0  # how long another process may delete caches
_REMEMBERED = 1 << 14  # texts that left


class Piece(NamedTuple):
    """A learned text of an end user, by its digest. user: "" for all who name none."""

    user: str
    digest: bytes


class Wish(NamedTuple):
    """How long a request wants to keep a text, and the bytes of its caches."""

    seconds: float
    nbytes: int


class Forgotten(NamedTuple):
    """What was deleted: texts, and bytes of their caches."""

    texts: int = 0
    nbytes: int = 0


class LearnedTexts:
    """The texts in a list of `LearnedCaches`, as they are now: other processes change it. Thread-safe.

    path: a SQLite file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = RLock()
        # Of users that have a text; threads may search while one changes.
        self._indexes: dict[str, TokenIndex[bytes]] = {}
        self._change = 0  # of the file, as it was read last

    def index(self, user: str = "") -> TokenIndex[bytes]:
        """Finds a user's texts in prompts; their digests are its names. If the list cannot be read, it stays as it was."""
        if self._lock.acquire(blocking=False):  # else it is being changed, which may wait for the store
            try:
                self._follow()
            finally:
                self._lock.release()
        return self._indexes.get(user) or TokenIndex()

    def _follow(self) -> None:
        """Take over what has changed in the file, if it can be read."""
        with suppress(OSError, sqlite3.Error, ValueError):
            change = _change_of(self._path)
            if change != self._change:
                self._read_changes()
                self._change = change

    def _read_changes(self) -> None:
        indexed = {Piece(user, name) for user, index in self._indexes.items() for name in index.names}
        # Of each user: texts that are gone, and new ones.
        changes = defaultdict[str, tuple[list[bytes], dict[bytes, Ids]]](lambda: ([], {}))
        with self._reading() as file:
            # In one order everywhere: of equal runs in several texts a search prefers the latest.
            listed = [Piece(*row) for row in file.execute("SELECT user, name FROM pieces ORDER BY used")]
            for piece in listed:
                if piece not in indexed:
                    row = file.execute(f"SELECT tokens FROM pieces WHERE {_PIECE}", piece).fetchone()
                    changes[piece.user][1][piece.digest] = np.frombuffer(row[0], np.int32)
        for piece in indexed.difference(listed):
            changes[piece.user][0].append(piece.digest)
        for user, (removed, new) in changes.items():
            index = self._indexes.setdefault(user, TokenIndex())
            index.update(removed, new)
            if not index:
                del self._indexes[user]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)) as file:
            file.execute("BEGIN")  # one state of it
            yield file


class LearnedCaches(LearnedTexts):
    """Pieces of text that requests brought, and the sizes of their caches, within a budget.

    Threads may share it, and processes of one machine: the file is what holds, and only the tokens are in memory, too. Each end
    user has their own pieces. Prompts look up only the pieces of their user. The caches are functions of the tokens alone, so
    equal pieces of several users share them, and no user notices.

    The least recently used piece leaves first, and pieces that were used once leave before those that recur. Pinned ones stay.

    Args:
        path: a SQLite file in the store's folder, private to its owner. A damaged one counts as empty.
        budget_bytes: most bytes of all caches. Pinned texts take at most half of them.
        clock: gives seconds since 1970, the same in all processes.

    """

    def __init__(self, path: Path, budget_bytes: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self.budget = budget_bytes
        self._clock = clock
        self._past: dict[Piece, Word] = {}  # why texts are not here any more, the latest last
        if path.exists():
            self._open()

    def _open(self) -> None:
        """Read the file, in whichever form it is, or remove a damaged one."""
        try:
            with self._changing() as file:
                if file.execute(_IS_OLD).fetchone():
                    for statement in _CONVERT:
                        file.execute(statement)
            self._read_changes()
        except (StoreError, sqlite3.Error, ValueError) as error:
            if not isinstance(error.__cause__ or error, OSError | sqlite3.OperationalError):  # else it is locked
                self._indexes = {}
                with suppress(OSError):
                    self._path.unlink()

    def __len__(self) -> int:
        return self._figures[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, those of several users once for each."""
        return self._figures[1]

    @property
    def _figures(self) -> tuple[int, int]:
        if not self._path.exists():
            return 0, 0
        with self._reading() as file:
            pieces = file.execute("SELECT count(*) FROM pieces").fetchone()
            caches = file.execute("SELECT coalesce(sum(nbytes), 0) FROM caches").fetchone()
        return pieces[0], caches[0]

    @property
    def pinned(self) -> frozenset[str]:
        """Digests of the caches of pinned texts."""
        with suppress(OSError, sqlite3.Error), self._reading() as file:
            return frozenset(digest for (digest,) in file.execute(_PINNED_DIGESTS, (self._clock(),)))
        return frozenset()

    def admitted(
        self, library: ChunkLibrary, texts: Iterable[Tokens], user: str = "", session: str = ""
    ) -> set[Tokens]:
        """Count a use of these texts by a user's session; returns those whose caches may be stored, or stay stored.

        Deletes less used caches to make room, but none of a corpus and no pinned ones. Raises `StoreError`. If it is unknown
        which caches belong to a corpus, it raises before it changes anything.
        """
        store = library.store
        sizes = defaultdict[Tokens, dict[ChunkKey, int]](dict)
        for variant in library.variants(list(texts)):
            sizes[variant.chunk][library.key(variant)] = library.entry_bytes(variant)
        pieces = {Piece(user, digest_of(text)): text for text in sizes}
        with self._lock:
            _ = store.generation  # raises while the store is away: nothing may be written in its place
            with self._changing() as file:
                self._note(file, pieces, session)
                for piece, text in pieces.items():
                    self._use(file, piece, text, sizes[text])
                removed_from(store).allow(key for caches in sizes.values() for key in caches)
                evicted = self._evicted(file, list(pieces))
                self._remove(file, store, evicted)
            self._remember(pieces, {piece: REFUSED if piece in pieces else EVICTED for piece in evicted})
            self._follow()
            return {text for piece, text in pieces.items() if piece not in evicted}

    def _use(self, file: sqlite3.Connection, piece: Piece, text: Tokens, caches: Mapping[ChunkKey, int]) -> None:
        """Count a use of a piece, known or new."""
        (last,) = file.execute("SELECT coalesce(max(used), 0) FROM pieces").fetchone()
        tokens = np.array(text, np.int32).tobytes()
        row = (*piece, tokens, last + 1, piece in self._past)
        again = "ON CONFLICT (user, name) DO UPDATE SET used = excluded.used, recurs = 1"
        file.execute(f"INSERT INTO pieces VALUES (?, ?, ?, ?, ?) {again}", row)
        rows = [(*piece, *key, nbytes) for key, nbytes in caches.items()]
        file.executemany("INSERT OR REPLACE INTO caches VALUES (?, ?, ?, ?, ?)", rows)

    def _evicted(self, file: sqlite3.Connection, used: Collection[Piece]) -> list[Piece]:
        """The pieces that leave so that the others fit, but never the last of those that were just used, if it fits at all."""
        pieces = {Piece(*row[:2]): row[2] for row in file.execute(_BY_WORTH, (self._clock(),))}
        *_, last = (None, *used)
        excess = sum(pieces.values()) - self.budget
        evicted = [piece for piece, nbytes in pieces.items() if nbytes > self.budget]
        excess -= sum(pieces.pop(piece) for piece in evicted)
        for piece, nbytes in pieces.items():
            if excess <= 0:
                break
            if piece != last:
                evicted.append(piece)
                excess -= nbytes
        return evicted

    def _remember(self, learned: Iterable[Piece], gone: Mapping[Piece, Word]) -> None:
        """Note why texts are gone; those that are learned are here again."""
        for piece in (*learned, *gone):
            self._past.pop(piece, None)
        self._past.update(gone)
        for piece in list(islice(self._past, max(0, len(self._past) - _REMEMBERED))):
            del self._past[piece]

    def pin(self, wishes: Mapping[Tokens, Wish], user: str, session: str) -> set[Tokens]:
        """Pin the texts of a request that fit, in this order, learned or not. Raises `StoreError`.

        Returns the pinned texts. A text that is not learned in time is pinned for nothing.
        """
        now = self._clock()
        pieces = {text: Piece(user, digest_of(text)) for text in wishes}
        fitting = set[Tokens]()
        with self._lock, self._changing() as file:
            self._note(file, pieces.values(), session)
            sizes = {Piece(*row[:2]): row[2] for row in file.execute(_PINNED_BYTES, (now,))}
            for text, wish in wishes.items():
                piece = pieces[text]
                pinned_bytes = sum(nbytes for pinned, nbytes in sizes.items() if pinned != piece)
                nbytes = max(wish.nbytes, sizes.get(piece, 0))
                if pinned_bytes + nbytes > self.budget // 2:
                    continue
                fitting.add(text)
                sizes[piece] = nbytes
                longer = "UPDATE SET until = max(until, excluded.until), nbytes = excluded.nbytes"
                row = (*piece, session, now + wish.seconds, nbytes)
                file.execute(
                    f"INSERT INTO pins VALUES (?, ?, ?, ?, ?) ON CONFLICT (user, name, session) DO {longer}", row
                )
        return fitting

    def share(self, texts: Iterable[Tokens], user: str) -> None:
        """Note that a user's request without a session has these texts. Raises `StoreError`.

        `admitted` does so for those that are computed or blended; these may have come from memory.
        """
        pieces = [Piece(user, digest_of(text)) for text in texts]
        of_sessions = f"SELECT 1 FROM pins WHERE {_PIECE} GROUP BY name HAVING min(session) > ''"
        with suppress(OSError, sqlite3.Error), self._reading() as file:
            pieces = [piece for piece in pieces if file.execute(of_sessions, piece).fetchone()]
        if pieces and self._path.exists():
            with self._lock, self._changing() as file:
                self._note(file, pieces, "")

    def _note(self, file: sqlite3.Connection, pieces: Iterable[Piece], session: str) -> None:
        """Note that a session's request has these texts. A text that was learned without one stays that of all, too."""
        for piece in pieces:
            noted = file.execute(f"SELECT 1 FROM pins WHERE {_PIECE}", piece).fetchone()
            if session and not noted:
                file.execute(f"INSERT INTO pins SELECT user, name, '', 0, 0 FROM pieces WHERE {_PIECE}", piece)
            if session or noted:
                file.execute("INSERT OR IGNORE INTO pins VALUES (?, ?, ?, 0, 0)", (*piece, session))

    def end_session(self, store: ChunkStore, user: str, session: str) -> Forgotten:
        """Delete the texts that only this session of a user brought or used. Raises `StoreError`."""
        alone = "SELECT user, name FROM pins WHERE user = ? GROUP BY name HAVING min(session) = ? AND count(*) = 1"
        with self._lock:
            _ = store.generation
            with self._changing() as file:
                pieces = [Piece(*row) for row in file.execute(alone, (user, session))]
                forgotten = self._remove(file, store, pieces)
                file.execute("DELETE FROM pins WHERE user = ? AND session = ?", (user, session))
            self._forget_past(pieces)
            return forgotten

    def past(self, user: str, digest: bytes) -> Word:
        """Why a prompt finds this text not learned, if this process remembers it; else `NEW`."""
        return self._past.get(Piece(user, digest), NEW)

    def namespaces(self, user: str, texts: Iterable[Tokens]) -> dict[Tokens, set[str]]:
        """The namespaces of the caches of texts: those of the models that learned them."""
        query = f"SELECT namespace FROM caches WHERE {_PIECE}"
        namespaces = dict[Tokens, set[str]]()
        with suppress(OSError, sqlite3.Error), self._reading() as file:
            for text in texts:
                namespaces[text] = {row[0] for row in file.execute(query, (user, digest_of(text)))}
        return namespaces

    def forget(self, store: ChunkStore, texts: Collection[Tokens]) -> None:
        """Delete every user's pieces in which one of these texts stands, whole or in part. Raises `StoreError`."""
        with self._lock:
            self._follow()
            # A search finds only some of many copies.
            while pieces := {piece for text in texts for piece in self._pieces_in(text)}:
                self._delete(store, pieces)

    def _pieces_in(self, text: Tokens) -> Iterator[Piece]:
        """Pieces, of any user, that share a run of tokens with a text."""
        for user, index in self._indexes.items():
            yield from (Piece(user, run.name) for run in index.runs(text))

    def drop(self, store: ChunkStore, texts: Iterable[Tokens], user: str = "") -> None:
        """Delete these pieces of a user. Raises `StoreError`."""
        with self._lock:
            self._delete(store, {Piece(user, digest_of(text)) for text in texts})

    def _delete(self, store: ChunkStore, pieces: Collection[Piece]) -> None:
        with self._changing() as file:
            self._remove(file, store, pieces)
        self._forget_past(pieces)

    def _forget_past(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._past.pop(piece, None)
        self._follow()

    def _remove(self, file: sqlite3.Connection, store: ChunkStore, pieces: Collection[Piece]) -> Forgotten:
        """Delete these pieces, and those of their caches that no other piece, no corpus and no pin of the operator has.

        A process that dies meanwhile leaves the file as it was: it then names too many.
        """
        if not pieces:
            return Forgotten()
        sources = complete_sources(store, self._path.parent, "nothing more is learned")
        permanent = {*sources.documents, *pinned(store.backend)}
        sizes = dict[ChunkKey, int]()
        texts = 0
        for piece in pieces:
            for *key, nbytes in file.execute(f"SELECT namespace, digest, nbytes FROM caches WHERE {_PIECE}", piece):
                sizes[ChunkKey(*key)] = nbytes
            texts += file.execute(f"DELETE FROM pieces WHERE {_PIECE}", piece).rowcount
            file.execute(f"DELETE FROM caches WHERE {_PIECE}", piece)
            file.execute(f"DELETE FROM pins WHERE {_PIECE}", piece)
        in_use = "SELECT 1 FROM caches WHERE namespace = ? AND digest = ?"
        unused = [key for key in sizes if key.digest not in permanent and not file.execute(in_use, key).fetchone()]
        removed_from(store).add(unused)
        for key in unused:
            store.delete(key)
        return Forgotten(texts, sum(sizes[key] for key in unused))

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the file. Pins that have ended for texts that are not learned are gone behind it.

        Raises `StoreError` if the file cannot be used.
        """
        try:
            make_private_folder(self._path.parent)
            self._path.touch(mode=0o600)
            with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as file, file:
                file.execute("PRAGMA synchronous = OFF")  # text that a crash of the machine loses is learned again
                file.executescript(_TABLES)
                file.execute("BEGIN IMMEDIATE")
                yield file
                stray = "(user, name) NOT IN (SELECT user, name FROM pieces)"
                file.execute(f"DELETE FROM pins WHERE until <= ? AND {stray}", (self._clock(),))
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the list of learned texts {self._path} cannot be used: {error}") from error


def _change_of(path: Path) -> int:
    """Counts the changes of a SQLite file. Raises `OSError` without one."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(_CHANGE.stop)[_CHANGE])
