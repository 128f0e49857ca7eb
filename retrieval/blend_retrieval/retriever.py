"""Finds the chunks for a question: by meaning and by words, each text once, in an order that a reranker may mend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import Embedder
from blend_retrieval.embedders.base import Floats
from blend_retrieval.errors import IndexMismatchError, QueryError
from blend_retrieval.index import ChunkIndex, passage_text
from blend_retrieval.rerank import Reranker

_DECAY = 0.5
_MOST_QUESTIONS = 4  # earlier ones count too little
_CANDIDATES = 100  # by meaning and by words each; of more chunks asked for, as many
_SAMPLE = 1000  # chunks that show how similar to a question chunks are by chance
_WORDS_WEIGHT = 6.0  # standard deviations of similarity that all of a question's words are worth; docs/retrieval.md
_RERANKED = 4  # times as many chunks as are asked for


class RankedChunk(NamedTuple):
    """A chunk and its similarity to the question, between -1 and 1."""

    chunk: Chunk
    score: float


Hidden = Callable[[str], bool]
"""Whether a document of this id is to be passed over."""
RankedChunks = tuple[RankedChunk, ...]
"""Best first."""


class Retriever:
    """Searches an index with the embedder that made it.

    Args:
        index: the chunks.
        embedder: the one that made their vectors.
        min_score: least similarity of a result; 0 sets none, None takes the embedder's own.
        reranker: orders the best ones anew, if given.

    Raises:
        IndexMismatchError: another embedder made the index.

    """

    def __init__(
        self, index: ChunkIndex, embedder: Embedder, min_score: float | None = None, reranker: Reranker | None = None
    ) -> None:
        if not index.made_by(embedder):
            raise IndexMismatchError(
                f"the index was made with {index.embedder}, not {embedder.identity}; load that embedder"
            )
        self.index = index
        self._embedder = embedder
        self._reranker = reranker
        floor = embedder.floor if min_score is None else min_score
        self._floor = floor or -math.inf

    def search(self, query: str, k: int, hidden: Hidden | None = None, before: Sequence[str] = ()) -> RankedChunks:
        """The `k` best chunks for the question, best first: fewer where no more are there or are similar enough.

        Chunks with equal texts count as one.

        Args:
            query: the question.
            k: how many chunks.
            hidden: documents whose chunks are passed over.
            before: questions earlier in the conversation, which a follow-up may leave unsaid; each counts half as much as
                the next.

        Raises:
            QueryError: an empty question, or a `k` below 1.
        """
        if not query.strip():
            raise QueryError("the question is empty; ask something")
        if k < 1:
            raise QueryError(f"{k} chunks were asked for; ask for at least 1")
        if not len(self.index):
            return ()
        latest_first = map(str.strip, (query, *reversed(before)))
        questions = list(filter(None, latest_first))[:_MOST_QUESTIONS]
        needed = k if self._reranker is None else _RERANKED * k
        count = min(len(self.index), max(_CANDIDATES, needed))
        while True:
            candidates = self._ranked(questions, count)
            best = self._best(candidates, needed, hidden)
            if len(best) == needed or count == len(self.index):
                break
            count = min(len(self.index), 4 * count)  # copies and hidden chunks took the places
        if self._reranker is not None:
            best = _reranked(self._reranker, questions[0], best)
        return tuple(best[:k])

    def _best(self, candidates: Sequence[RankedChunk], needed: int, hidden: Hidden | None) -> list[RankedChunk]:
        """The first ones with different texts."""
        best: dict[str, RankedChunk] = {}
        for candidate in candidates:
            chunk = candidate.chunk
            is_hidden = hidden is not None and hidden(chunk.document_id)
            if candidate.score >= self._floor and not is_hidden:
                text = " ".join(chunk.text.split())
                best.setdefault(text.casefold(), candidate)
            if len(best) == needed:
                break
        return list(best.values())

    def _ranked(self, questions: Sequence[str], count: int) -> list[RankedChunk]:
        """The best chunks by similarity and by words, each at least `count`, in the order of both together.

        Similarity counts in standard deviations over the corpus, because embedders differ in what is usual. Words add to it in
        proportion to their coverage: a convex combination, as Bruch et al. 2023 find better than ranks ("An Analysis of Fusion
        Functions for Hybrid Retrieval").
        """
        import numpy as np

        index = self.index
        vector = self._embedded(questions)
        coverage = np.zeros(len(index), np.float32)
        for age, question in enumerate(questions):
            coverage += _DECAY**age * index.lexical.coverage(question)
        least = np.partition(coverage, -count)[-count]  # sorting all of a million takes longer than the search
        candidates = np.flatnonzero((coverage >= least) & (coverage > 0))
        order_by_words = np.argsort(-coverage[candidates], kind="stable")[:count]
        by_words = candidates[order_by_words]
        by_meaning = [hit.row for hit in index.search(vector, count)]
        rows = np.union1d(by_words, by_meaning).astype(np.int64)
        similarity = index.similarities(vector, rows)
        spread_rows = np.linspace(0, len(index) - 1, _SAMPLE, dtype=np.int64)
        sample = index.similarities(vector, np.unique(spread_rows))
        deviation = max(float(sample.std()), 1e-6)
        together = similarity / deviation + _WORDS_WEIGHT * coverage[rows]
        order = np.lexsort((rows, -together))
        chunks = [index.chunks[row] for row in rows[order]]
        return list(map(RankedChunk, chunks, similarity[order].tolist()))

    def _embedded(self, questions: Sequence[str]) -> Floats:
        """The weighted sum of the questions' embeddings, of length 1."""
        vector: Floats = self._embedder.embed_query(questions[0])
        for age, question in enumerate(questions[1:], 1):
            vector = vector + _DECAY**age * self._embedder.embed_query(question)
        if len(questions) > 1:
            vector = vector / max(float(vector @ vector) ** 0.5, 1e-12)
        return vector


def _reranked(reranker: Reranker, query: str, chunks: Sequence[RankedChunk]) -> list[RankedChunk]:
    """The chunks in the reranker's order."""
    texts = [passage_text(ranked.chunk) for ranked in chunks]
    scores = reranker.scores(query, texts)
    order = (-scores).argsort(kind="stable")
    return [chunks[place] for place in order]
