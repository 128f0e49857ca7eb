"""Gives the places of a result to chunks that say different things, from different documents.

Near-equal chunks of a log or a table would fill all places behind a few good ones. So each place goes to the chunk that is
best after two deductions: for repeating a chunk that has a place, and for a document that has its share of the places. This
is maximal marginal relevance (Carbonell and Goldstein 1998), where the deduction grows with the distance to the best chunk:
chunks that are nearly as good as the best one keep their places, also if they are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from blend_retrieval.embedders.base import Floats, Integers

if TYPE_CHECKING:
    from blend_retrieval.index import ChunkIndex

# docs/retrieval.md says what these were measured on.
_SHARE = 0.5  # of the places, for one document
_FAR = 0.5  # standard deviations that a chunk beyond the share is ranked lower
_ALIKE = 0.7  # similarity from which chunks repeat each other: 0 is usual in the corpus, 1 equal
_REPETITION = 4.0  # by how much more a repetition without relevance is away from the best
_BLOCK = 128  # candidates that are looked at together


class RankedRow(NamedTuple):
    """A chunk's row in the index and its relevance, in standard deviations over the corpus."""

    row: int
    relevance: float


class FairChoice:
    """Chooses the chunks of one result.

    Args:
        index: holds the chunks.
        ranked: all candidates, most relevant first. Only as many are taken as can win a place.
        places: how many chunks to choose.
        irrelevant: relevance of chunks that have nothing to do with the question.

    """

    def __init__(self, index: ChunkIndex, ranked: Iterator[RankedRow], places: int, irrelevant: float) -> None:
        self._index = index
        self._ranked = ranked
        self._places = places
        self._share = max(1, -int(-places * _SHARE // 1))
        self._irrelevant = irrelevant
        self._taken: Counter[int] = Counter()
        self._chosen: list[int] = []
        self._pool = _Pool.empty(index.dimension)
        self._least = float("inf")  # relevance of the last candidate in the pool: of later ones at most

    def choose(self) -> list[int]:
        """The rows of the chosen chunks, best first: fewer than `places` if there are no more candidates."""
        while len(self._chosen) < self._places:
            ranks = self._ranks()
            best = int(ranks.argmax()) if len(ranks) else -1
            is_settled = best >= 0 and ranks[best] >= self._least
            if not is_settled and self._look_further():
                continue
            if best < 0 or ranks[best] == -float("inf"):
                break
            self._choose(best)
        return self._chosen

    def _look_further(self) -> bool:
        """Add candidates to the pool. False if there are no more."""
        block = list(islice(self._ranked, _BLOCK))
        if block:
            self._pool = self._pool.with_rows(self._index, block, self._chosen)
            self._least = block[-1].relevance
        return bool(block)

    def _ranks(self) -> Floats:
        """What the pool's chunks are worth for the next place; minus infinity for those that have one."""
        import numpy as np

        pool = self._pool
        if not len(pool.rows):
            return pool.relevance
        best = pool.relevance[0]
        distance = best - pool.relevance
        irrelevance = np.clip(distance / max(best - self._irrelevant, 1e-6), 0, 1)
        usual = self._index.profile.similarity
        alike = (pool.similarity - usual) / max(1 - usual, 1e-6)
        repetition = np.clip((alike - _ALIKE) / (1 - _ALIKE), 0, 1)
        full = [document for document, count in self._taken.items() if count >= self._share]
        is_beyond_share = np.isin(pool.documents, full)
        ranks: Floats = best - distance * (1 + _REPETITION * repetition * irrelevance**2) - _FAR * is_beyond_share
        ranks[np.isin(pool.rows, self._chosen)] = -np.inf
        return ranks

    def _choose(self, place: int) -> None:
        import numpy as np

        pool = self._pool
        self._chosen.append(int(pool.rows[place]))
        self._taken[int(pool.documents[place])] += 1
        similarity = np.maximum(pool.similarity, pool.vectors @ pool.vectors[place])
        self._pool = pool._replace(similarity=similarity)


class _Pool(NamedTuple):
    """Candidates, most relevant first. similarity: of each to the chosen chunk that is most similar to it."""

    rows: Integers
    relevance: Floats
    documents: Integers
    vectors: Floats
    similarity: Floats

    @classmethod
    def empty(cls, dimension: int) -> _Pool:
        import numpy as np

        no_rows = np.zeros(0, np.int64)
        no_values = np.zeros(0, np.float32)
        return cls(no_rows, no_values, no_rows, np.zeros((0, dimension), np.float32), no_values)

    def with_rows(self, index: ChunkIndex, ranked: Sequence[RankedRow], chosen: Sequence[int]) -> _Pool:
        """With these candidates at the end."""
        import numpy as np

        rows = np.array([candidate.row for candidate in ranked], np.int64)
        relevance = np.array([candidate.relevance for candidate in ranked], np.float32)
        vectors = index.vectors(rows)
        chosen_rows = np.array(chosen, np.int64)
        similarity = np.full(len(rows), -1, np.float32)
        if chosen:
            similarity = (vectors @ index.vectors(chosen_rows).T).max(axis=1)
        return _Pool(
            rows=np.append(self.rows, rows),
            relevance=np.append(self.relevance, relevance),
            documents=np.append(self.documents, index.profile.documents[rows]),
            vectors=np.concatenate([self.vectors, vectors]),
            similarity=np.append(self.similarity, similarity),
        )
