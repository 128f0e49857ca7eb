"""Text that requests brought: its pieces, and their caches within a budget."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blend.corpora import complete_sources
from blend.layout import Tokens
from blend.serve.prompts.learned_list import PIECE, LearnedList, Piece
from blend.serve.reasons import EVICTED, NEW, REFUSED, Word
from blend.serve.removed import removed_from
from blend.serve.request import ANYONE, RequestOrigin
from blend.serve.shares import ACTIVE_S, Holder, Shares
from blend.serve.token_index import digest_of
from blend.store.backend import pinned
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.store import ChunkStore

# Pieces with the bytes of their caches, those that leave first in front.
_BY_WORTH = """
SELECT user, name, coalesce(sum(nbytes), 0), coalesce(client, ''), coalesce(used_at, 0), EXISTS (
    SELECT 1 FROM pins WHERE pins.user = pieces.user AND pins.name = pieces.name AND until > ?
) AS pinned
FROM pieces LEFT JOIN caches USING (user, name) LEFT JOIN holders USING (user, name)
GROUP BY user, name ORDER BY pinned, recurs, used
"""
# Those that end first in front.
_PINNED = """
SELECT user, name, max(max(nbytes), (
    SELECT coalesce(sum(nbytes), 0) FROM caches WHERE caches.user = pins.user AND caches.name = pins.name
)), coalesce(client, '') FROM pins LEFT JOIN holders USING (user, name)
WHERE until > ? GROUP BY user, name ORDER BY max(until)
"""
_PINNED_DIGESTS = "SELECT digest FROM caches JOIN pins USING (user, name) WHERE until > ?"
_MOST_SESSIONS = 64  # of a text; beyond them it counts as that of all
_REMEMBERED = 1 << 14  # texts that left


class _Usage(NamedTuple):
    """Bytes of a piece's caches, whom they count for, and when it was used last."""

    nbytes: int
    holder: Holder
    used_at: float = 0.0
    pinned: bool = True


class Wish(NamedTuple):
    """How long a request wants to keep a text, and the bytes of its caches."""

    seconds: float
    nbytes: int


class Forgotten(NamedTuple):
    """What was deleted: texts, and bytes of their caches."""

    texts: int = 0
    nbytes: int = 0


class LearnedCaches(LearnedList):
    """Pieces of text that requests brought, and the sizes of their caches, within a budget.

    Threads may share it, and processes of one machine: the file is what holds, and only the tokens are in memory, too. Each end
    user has their own pieces. Prompts look up only the pieces of their user. The caches are functions of the tokens alone, so
    equal pieces of several users share them, and no user notices.

    The least recently used piece leaves first, and pieces that were used once leave before those that recur. Pinned ones stay.
    First of all leaves what a client or an end user has beyond its share (see `Shares`), of pins, too.

    Args:
        path: a SQLite file in the store's folder, private to its owner. A damaged one is set aside, and a new list begins.
        budget_bytes: most bytes of all caches. Pinned texts take at most half of them.
        clock: gives seconds since 1970, the same in all processes.

    """

    def __init__(self, path: Path, budget_bytes: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, clock)
        self.budget = budget_bytes
        self._past: dict[Piece, Word] = {}  # why texts are not here any more, the latest last

    def __len__(self) -> int:
        return self._figures[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, those of several users once for each."""
        return self._figures[1]

    @property
    def _figures(self) -> tuple[int, int]:
        with suppress(OSError, sqlite3.Error), self._reading() as file:
            pieces = file.execute("SELECT count(*) FROM pieces").fetchone()
            caches = file.execute("SELECT coalesce(sum(nbytes), 0) FROM caches").fetchone()
            return pieces[0], caches[0]
        return 0, 0

    @property
    def pinned(self) -> frozenset[str]:
        """Digests of the caches of pinned texts."""
        with suppress(OSError, sqlite3.Error), self._reading() as file:
            return frozenset(digest for (digest,) in file.execute(_PINNED_DIGESTS, (self._clock(),)))
        return frozenset()

    def admitted(self, library: ChunkLibrary, texts: Iterable[Tokens], origin: RequestOrigin = ANYONE) -> set[Tokens]:
        """Count a use of these texts by a request; returns those whose caches may be stored, or stay stored.

        Deletes less used caches to make room, but none of a corpus and no pinned ones. Raises `StoreError`. If it is unknown
        which caches belong to a corpus, it raises before it changes anything.
        """
        store = library.store
        sizes = defaultdict[Tokens, dict[ChunkKey, int]](dict)
        for variant in library.variants(list(texts)):
            sizes[variant.chunk][library.key(variant)] = library.entry_bytes(variant)
        pieces = {Piece(origin.user, digest_of(text)): text for text in sizes}
        with self._lock:
            if origin.ended():  # under the lock: `end_session` comes later, or came before
                return set()
            _ = store.generation  # raises while the store is away: nothing may be written in its place
            with self._changing() as file:
                for piece, text in pieces.items():
                    self._note(file, piece, origin.session)
                    self._use(file, piece, text, sizes[text])
                    self._count_for(file, piece, origin)
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
        again = "ON CONFLICT (user, name) DO UPDATE SET tokens = excluded.tokens, used = excluded.used, recurs = 1"
        file.execute(f"INSERT INTO pieces VALUES (?, ?, ?, ?, ?) {again}", row)
        rows = [(*piece, *key, nbytes) for key, nbytes in caches.items()]
        file.executemany("INSERT OR REPLACE INTO caches VALUES (?, ?, ?, ?, ?)", rows)

    def _count_for(self, file: sqlite3.Connection, piece: Piece, origin: RequestOrigin) -> None:
        """Count a piece for whom used or pinned it last."""
        file.execute("INSERT OR REPLACE INTO holders VALUES (?, ?, ?, ?)", (*piece, origin.client, self._clock()))

    def _evicted(self, file: sqlite3.Connection, used: Collection[Piece]) -> list[Piece]:
        """The pieces that leave so that the others fit, but never the last of those that were just used, if it fits at all."""
        now = self._clock()
        pieces = dict[Piece, _Usage]()
        for user, name, nbytes, client, used_at, is_pinned in file.execute(_BY_WORTH, (now,)):
            pieces[Piece(user, name)] = _Usage(nbytes, Holder(client, user), used_at, bool(is_pinned))
        *_, last = (None, *used)
        excess = sum(usage.nbytes for usage in pieces.values()) - self.budget
        evicted = [piece for piece, usage in pieces.items() if usage.nbytes > self.budget]
        excess -= sum(pieces.pop(piece).nbytes for piece in evicted)
        if excess <= 0:
            return evicted
        shares = self._shares(pieces.values(), now)
        for must_exceed in (True, False):
            for piece, usage in list(pieces.items()):
                if excess <= 0:
                    return evicted
                if piece == last or (must_exceed and (usage.pinned or not shares.exceeded_by(usage.holder))):
                    continue
                evicted.append(piece)
                del pieces[piece]
                shares.remove(usage.holder, usage.nbytes)
                excess -= usage.nbytes
        return evicted

    def _shares(self, pieces: Iterable[_Usage], now: float) -> Shares:
        """The shares of those who used a text lately, of the room that pinned texts leave."""
        room = self.budget
        sizes = Counter[Holder]()
        active = set[Holder]()
        for usage in pieces:
            if usage.pinned:
                room -= usage.nbytes
            else:
                sizes[usage.holder] += usage.nbytes
            if usage.used_at > now - ACTIVE_S:
                active.add(usage.holder)
        return Shares(room, sizes, active)

    def _remember(self, learned: Iterable[Piece], gone: Mapping[Piece, Word]) -> None:
        """Note why texts are gone; those that are learned are here again."""
        for piece in (*learned, *gone):
            self._past.pop(piece, None)
        self._past.update(gone)
        for piece in list(islice(self._past, max(0, len(self._past) - _REMEMBERED))):
            del self._past[piece]

    def pin(self, wishes: Mapping[Tokens, Wish], origin: RequestOrigin = ANYONE) -> set[Tokens]:
        """Pin the texts of a request that fit, in this order, learned or not. Raises `StoreError`.

        Where they do not fit, the pins of those end who have more than their share, for one who has less.

        Returns the pinned texts. A text that is not learned in time is pinned for nothing.
        """
        now = self._clock()
        fitting = set[Tokens]()
        with self._lock, self._changing() as file:
            if origin.ended():
                return fitting
            pins = {Piece(*row[:2]): _Usage(row[2], Holder(row[3], row[0])) for row in file.execute(_PINNED, (now,))}
            for text, wish in wishes.items():
                piece = Piece(origin.user, digest_of(text))
                session = self._note(file, piece, origin.session)
                before = pins.pop(piece, None)
                nbytes = max(wish.nbytes, before.nbytes if before is not None else 0)
                losers = self._losers(pins, origin.holder, nbytes)
                if losers is None:
                    if before is not None:
                        pins[piece] = before
                    continue
                for loser in losers:
                    file.execute(f"UPDATE pins SET until = 0, nbytes = 0 WHERE {PIECE}", loser)
                    del pins[loser]
                fitting.add(text)
                pins[piece] = _Usage(nbytes, origin.holder)
                self._count_for(file, piece, origin)
                longer = "UPDATE SET until = max(until, excluded.until), nbytes = excluded.nbytes"
                row = (*piece, session, now + wish.seconds, nbytes)
                file.execute(
                    f"INSERT INTO pins VALUES (?, ?, ?, ?, ?) ON CONFLICT (user, name, session) DO {longer}", row
                )
        return fitting

    def _losers(self, pins: Mapping[Piece, _Usage], holder: Holder, nbytes: int) -> list[Piece] | None:
        """The pins that end so that a holder can pin so many bytes more; None if there is no room for it."""
        room = self.budget // 2
        excess = sum(usage.nbytes for usage in pins.values()) + nbytes - room
        if excess <= 0:
            return []
        sizes = Counter({holder: nbytes})
        for usage in pins.values():
            sizes[usage.holder] += usage.nbytes
        shares = Shares(room, sizes, sizes)
        if shares.exceeded_by(holder):
            return None
        losers = list[Piece]()
        for piece, usage in pins.items():
            if excess > 0 and shares.exceeded_by(usage.holder):
                losers.append(piece)
                shares.remove(usage.holder, usage.nbytes)
                excess -= usage.nbytes
        return losers if excess <= 0 else None

    def share(self, texts: Iterable[Tokens], user: str) -> None:
        """Note that a user's request without a session has these texts. Raises `StoreError`.

        `admitted` does so for those that are computed or blended; these may have come from memory.
        """
        pieces = [Piece(user, digest_of(text)) for text in texts]
        of_sessions = f"SELECT 1 FROM pins WHERE {PIECE} GROUP BY name HAVING min(session) > ''"
        with suppress(OSError, sqlite3.Error), self._reading() as file:
            pieces = [piece for piece in pieces if file.execute(of_sessions, piece).fetchone()]
        if pieces and self._path.exists():
            with self._lock, self._changing() as file:
                for piece in pieces:
                    self._note(file, piece, "")

    def _note(self, file: sqlite3.Connection, piece: Piece, session: str) -> str:
        """Note that a session's request has this text. A text that was learned without one stays that of all, too.

        Returns the session that has it now: "", which is all, if too many have it.
        """
        noted = {name for (name,) in file.execute(f"SELECT session FROM pins WHERE {PIECE}", piece)}
        if session not in noted and len(noted) >= _MOST_SESSIONS:
            session = ""
        if session and not noted:
            file.execute(f"INSERT INTO pins SELECT user, name, '', 0, 0 FROM pieces WHERE {PIECE}", piece)
        if session or noted:
            file.execute("INSERT OR IGNORE INTO pins VALUES (?, ?, ?, 0, 0)", (*piece, session))
        return session

    def end_session(self, store: ChunkStore, user: str, session: str) -> Forgotten:
        """Delete the texts that only this session of a user brought or used. Raises `StoreError`."""
        alone = "SELECT user, name FROM pins WHERE user = ? GROUP BY name HAVING min(session) = ? AND count(*) = 1"
        with self._lock:
            _ = store.generation
            with self._changing(durable=True) as file:
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
        query = f"SELECT namespace FROM caches WHERE {PIECE}"
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
            for *key, nbytes in file.execute(f"SELECT namespace, digest, nbytes FROM caches WHERE {PIECE}", piece):
                sizes[ChunkKey(*key)] = nbytes
            texts += file.execute(f"DELETE FROM pieces WHERE {PIECE}", piece).rowcount
            file.execute(f"DELETE FROM caches WHERE {PIECE}", piece)
            file.execute(f"DELETE FROM pins WHERE {PIECE}", piece)
            file.execute(f"DELETE FROM holders WHERE {PIECE}", piece)
        in_use = "SELECT 1 FROM caches WHERE namespace = ? AND digest = ?"
        unused = [key for key in sizes if key.digest not in permanent and not file.execute(in_use, key).fetchone()]
        removed_from(store).add(unused)
        for key in unused:
            store.delete(key)
        return Forgotten(texts, sum(sizes[key] for key in unused))
