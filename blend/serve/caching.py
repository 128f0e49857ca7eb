"""The chunk caches that a corpus lacks: handed to whoever computes them, piece by piece, and counted document by document."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, Protocol

from blend.chunks.library import ChunkLibrary, Tokens, Variant
from blend.serve.reasons import reason_of

PIECE = 32  # caches that are handed over at a time: what is computed in vain when a document goes

OnDone = Callable[[Variant, Exception | None], None]
DocumentState = Literal["queued", "reading", "indexing", "computing", "ready", "failed"]


class Computing(Protocol):
    """Caches on their way."""

    def cancel(self) -> None:
        """Compute no more than has begun. Any thread may call it, any number of times."""


Compute = Callable[[ChunkLibrary, Sequence[Variant], OnDone], Computing]
"""Computes and stores caches, here or in another thread, and tells of each when it is stored or why it is not."""


class Finished:
    """Nothing is on its way."""

    def cancel(self) -> None:
        """Nothing to do."""


def compute_here(library: ChunkLibrary, variants: Sequence[Variant], on_done: OnDone) -> Computing:
    """One after another, in the caller's thread."""
    for one in variants:
        try:
            library.compute([one])
        except Exception as error:  # as an engine does: one cache's failure is told and harms no other
            on_done(one, error)
        else:
            on_done(one, None)
    return Finished()


class CacheProgress(NamedTuple):
    """How far a document's caches are, in tokens; reason: why one could not be computed, or empty."""

    state: DocumentState
    done: int
    total: int
    reason: str = ""


class LackingCaches:
    """The caches of a corpus and which of them are lacking. Used under its owner's lock.

    A document that was ready stays so as long as its chunks stay, also where its chunks are to have further caches.
    """

    def __init__(self) -> None:
        self.library: ChunkLibrary | None = None
        self._of: dict[str, frozenset[Variant]] = {}
        self._chunks: dict[str, frozenset[Tokens]] = {}
        self._owners: dict[Tokens, list[str]] = {}
        self._all: frozenset[Variant] = frozenset()
        self._lacking: dict[Variant, None] = {}
        self._refused: dict[Variant, str] = {}
        self._ready: set[str] = set()
        self._under_way: set[Variant] = set()

    def replace(
        self,
        library: ChunkLibrary,
        chunks: Mapping[str, frozenset[Tokens]],
        variants: Sequence[Variant],
        missing: Sequence[Variant],
    ) -> bool:
        """The corpus has changed. chunks: of each document. variants, missing: caches, see `blend.corpus.PreparedCorpus`.

        Returns whether caches are under way that nobody wants any more.
        """
        of_chunk: dict[Tokens, list[Variant]] = {}
        for one in variants:
            of_chunk.setdefault(one.chunk, []).append(one)
        self._ready = {name for name in self._ready if self._chunks[name] == chunks.get(name)}
        self.library, self._chunks, self._all = library, dict(chunks), frozenset(variants)
        self._of = {
            name: frozenset(one for ids in mine for one in of_chunk.get(ids, ())) for name, mine in chunks.items()
        }
        self._owners = {}
        for name, mine in chunks.items():
            for ids in mine:
                self._owners.setdefault(ids, []).append(name)
        self._lacking, self._refused = dict.fromkeys(missing), {}
        self._settle(self._of)
        if self._under_way <= self._all:
            return False
        self._under_way = set()
        return True

    def piece(self) -> list[Variant]:
        """The next caches to compute, which are then under way; none while others are."""
        if self._under_way:
            return []
        found = list(islice(self._lacking, PIECE))
        self._under_way = set(found)
        return found

    def done(self, one: Variant, error: Exception | None) -> bool:
        """A cache is stored, or could not be. False where its chunk is none of the corpus any more."""
        self._under_way.discard(one)
        if one not in self._all:
            return one.chunk in self._owners
        self._lacking.pop(one, None)
        if error is not None:
            self._refused[one] = reason_of(error)
        self._settle(self._owners.get(one.chunk, ()))
        return True

    def retry(self) -> None:
        """Those that could not be computed are lacking again."""
        self._lacking |= dict.fromkeys(self._refused)
        self._refused = {}

    @property
    def chunks(self) -> list[Tokens]:
        """Of all documents, each once."""
        return list(self._owners)

    @property
    def count(self) -> int:
        """Caches that the corpus should have."""
        return len(self._all)

    @property
    def refused(self) -> bool:
        """Whether some could not be computed."""
        return bool(self._refused)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    @property
    def complete(self) -> bool:
        """Whether nothing is lacking and nothing under way."""
        return not (self._lacking or self._under_way)

    def knows(self, documents: Collection[str]) -> bool:
        """Whether these are the documents."""
        return self._of.keys() == set(documents)

    def progress(self, document: str) -> CacheProgress | None:
        """Of a document; None for one that is not known."""
        mine = self._of.get(document)
        if mine is None:
            return None
        total = sum(len(one.chunk) for one in mine)
        if document in self._ready:
            return CacheProgress("ready", total, total)
        done = sum(len(one.chunk) for one in mine if one not in self._lacking and one not in self._refused)
        reason = next((self._refused[one] for one in mine if one in self._refused), "")
        return CacheProgress("failed" if reason else "computing", done, total, reason)

    def _settle(self, documents: Iterable[str]) -> None:
        for name in documents:
            if not any(one in self._lacking or one in self._refused for one in self._of[name]):
                self._ready.add(name)
