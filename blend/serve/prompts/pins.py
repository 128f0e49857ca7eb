"""Which sessions use a learned text, and until when requests keep it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

PINS_TABLE = """
CREATE TABLE IF NOT EXISTS pins (
    user TEXT, name BLOB, session TEXT, until REAL, nbytes INTEGER, PRIMARY KEY (user, name, session)
);
"""
ALL_PINS = "SELECT user, name, session, until, nbytes FROM pins ORDER BY until DESC"
WRITE_PIN = "INSERT OR REPLACE INTO pins VALUES (?, ?, ?, ?, ?)"
DELETE_PIN = "DELETE FROM pins WHERE user = ? AND name = ? AND session = ?"
DELETE_PINS = "DELETE FROM pins WHERE user = ? AND name = ?"
PinRow = tuple[str, bytes, str, float, int]


class Piece(NamedTuple):
    """A learned text of an end user, by its digest. user: "" for all who name none."""

    user: str
    digest: bytes


class Wish(NamedTuple):
    """How long a request wants to keep a text, and the bytes of its caches."""

    seconds: float
    nbytes: int


class Pins:
    """The sessions that use each text, and until when each of them keeps it. The caller holds a lock.

    A session keeps the texts of its requests. The session "" stands for all requests that name none; a text without any row
    is theirs alone. Pinned texts together take at most `most` bytes. What does not fit is used, and not pinned.

    Args:
        most: bytes of the caches of all pinned texts.
        clock: gives seconds since 1970, the same in all processes.

    """

    def __init__(self, most: int, clock: Callable[[], float] = time.time) -> None:
        self.most = most
        self.nbytes = 0
        self._clock = clock
        self._ends: dict[Piece, dict[str, float]] = {}  # of each session's pin, 0 without
        self._sizes: dict[Piece, int] = {}  # of pinned texts

    def __contains__(self, piece: object) -> bool:
        return piece in self._sizes

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._sizes)

    @property
    def sessions(self) -> bool:
        """Whether any text has been noted."""
        return bool(self._ends)

    def is_owned(self, piece: Piece) -> bool:
        """Whether only sessions use a text."""
        return "" not in self._ends.get(piece, {"": 0.0})

    def read(self, rows: Iterable[PinRow]) -> None:
        """Take over what a file lists, those that last longest first."""
        self.nbytes = 0
        self._ends = {}
        self._sizes = {}
        now = self._clock()
        for user, digest, session, until, nbytes in rows:
            piece = Piece(user, digest)
            fits = until > now and self._fit(piece, nbytes)
            self._ends.setdefault(piece, {})[session] = until if fits else 0.0

    def rows(self, pieces: Iterable[Piece]) -> Iterator[PinRow]:
        """What the file lists of these texts."""
        for piece in pieces:
            for session, until in self._ends.get(piece, {}).items():
                yield (*piece, session, until, self._sizes.get(piece, 0))

    def note(self, pieces: Iterable[Piece], session: str, learned: Container[Piece]) -> set[Piece]:
        """Note that a session's request has these texts. Returns those for which that is new.

        learned: texts that are learned already. Those of no session stay so, too.
        """
        new = set[Piece]()
        for piece in pieces:
            if not (session or piece in self._ends):
                continue
            ends = self._ends.setdefault(piece, {"": 0.0} if piece in learned else {})
            if session not in ends:
                ends[session] = 0.0
                new.add(piece)
        return new

    def add(
        self,
        wishes: Mapping[Piece, Wish],
        session: str,
        learned: Container[Piece],
    ) -> set[Piece]:
        """The same, and pin the texts that fit, in this order. Returns the pinned ones."""
        now = self._clock()
        self.note(wishes, session, learned)
        pinned = set[Piece]()
        for piece, wish in wishes.items():
            if self._fit(piece, wish.nbytes):
                ends = self._ends.setdefault(piece, {})
                ends[session] = max(now + wish.seconds, ends.get(session, 0.0))
                pinned.add(piece)
        return pinned

    def resize(self, piece: Piece, nbytes: int) -> None:
        """The caches of a text take so many bytes. A pinned text that has grown beyond the bound is let go."""
        if piece in self and not self._fit(piece, nbytes):
            self._unpin(piece)

    def end(self) -> set[Piece]:
        """Let go the texts whose time is over, and return them."""
        now = self._clock()
        ended = {piece for piece in self._sizes if max(self._ends[piece].values()) <= now}
        for piece in ended:
            self._unpin(piece)
        return ended

    def strays(self, learned: Container[Piece]) -> set[Piece]:
        """Texts that are neither learned nor pinned any more."""
        return {piece for piece in self._ends if piece not in self._sizes and piece not in learned}

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Forget these texts."""
        for piece in pieces:
            if piece in self:
                self._unpin(piece)
            self._ends.pop(piece, None)

    def of(self, user: str, session: str) -> tuple[set[Piece], set[Piece]]:
        """The texts that only this session of a user uses, and those that others use too."""
        texts = defaultdict[bool, set[Piece]](set)
        for piece, ends in self._ends.items():
            if piece.user == user and session in ends:
                texts[len(ends) == 1].add(piece)
        return texts[True], texts[False]

    def leave(self, pieces: Iterable[Piece], session: str) -> None:
        """A session does not use these texts any more, which others use."""
        for piece in pieces:
            del self._ends[piece][session]

    def _fit(self, piece: Piece, nbytes: int) -> bool:
        """Pin a text, if there is room. A pin that exists never shrinks: the caches of a text may be added one by one."""
        size = self._sizes.get(piece, 0)
        growth = max(0, nbytes - size)
        if self.nbytes + growth > self.most:
            return False
        self.nbytes += growth
        self._sizes[piece] = size + growth
        return True

    def _unpin(self, piece: Piece) -> None:
        self.nbytes -= self._sizes.pop(piece)
        self._ends[piece] = dict.fromkeys(self._ends[piece], 0.0)
