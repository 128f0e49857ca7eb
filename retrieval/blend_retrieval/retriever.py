"""Finds the chunks for a question: by meaning and by words, each text once, in an order that a reranker may mend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unicodedata import normalize

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import Embedder
from blend_retrieval.embedders.base import Floats, Integers
from blend_retrieval.errors import IndexMismatchError, QueryError
from blend_retrieval.fairness import FairChoice, RankedRow
from blend_retrieval.index import ChunkIndex, passage_text
from blend_retrieval.rerank import Reranker
from blend_retrieval.words import composed

_DECAY = 0.5
_MOST_QUESTIONS = 4  # earlier ones count too little
_BLOCK, _BLOCK_GROWTH = 1000, 8  # chunks that are sorted first; how many more the next time
_OF_A_DOCUMENT = 4  # candidates for each place
WORDS_WEIGHT = 6.0  # standard deviations of similarity that all of a question's words are worth; docs/retrieval.md
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
        min_score: least similarity of a result; 0: any. None takes the embedder's own: 0.15 with minilm, one common word
            with words, else any.
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

        Chunks with equal texts count as one. Near-equal chunks that are much less relevant than the best one give their places
        to others, and so do those of a document that has half of the places, to others that are nearly as relevant.

        Args:
            query: the question.
            k: how many chunks.
            hidden: documents whose chunks are passed over.
            before: questions earlier in the conversation, which a follow-up may leave unsaid; each counts half as much as
                the next.

        Raises:
            QueryError: an empty question, or a `k` below 1.
        """
        question = composed(query).strip()
        if not question:
            raise QueryError("the question is empty; ask something")
        if k < 1:
            raise QueryError(f"{k} chunks were asked for; ask for at least 1")
        if not len(self.index):
            return ()
        earlier = (composed(text).strip() for text in reversed(before))
        questions = [question, *filter(None, earlier)][:_MOST_QUESTIONS]
        similarity, relevance, irrelevant = self._relevance(questions)
        needed = k if self._reranker is None else _RERANKED * k
        candidates = self._candidates(relevance, needed, hidden)
        rows = FairChoice(self.index, candidates, needed, irrelevant).choose()
        if self._reranker is not None and rows:
            rows = self._reranked(self._reranker, questions[0], rows, k)
        return tuple(RankedChunk(self.index.chunks[row], float(similarity[row])) for row in rows)

    def _relevance(self, questions: Sequence[str]) -> tuple[Floats, Floats, float]:
        """Similarity and relevance of all chunks, and the relevance of chunks that have nothing to do with the questions.

        Similarity counts in standard deviations over the corpus, because embedders differ in what is usual. Words add to it in
        proportion to their coverage: a convex combination, as Bruch et al. 2023 find better than ranks ("An Analysis of Fusion
        Functions for Hybrid Retrieval"). Without an embedder that knows meaning, coverage is the similarity. Chunks that are
        not similar enough have a relevance of minus infinity.
        """
        import numpy as np

        index = self.index
        coverage = np.zeros(len(index), np.float32)
        for age, question in enumerate(questions):
            coverage += _DECAY**age * index.lexical.coverage(question)
        sample = index.profile.sample
        relevance = WORDS_WEIGHT * coverage
        if self._embedder.knows_meaning:
            similarity = index.similarities(self._embedded(questions))
            deviation = max(float(similarity[sample].std()), 1e-6)
            relevance += similarity / deviation
        else:
            similarity = np.minimum(coverage, 1)
        irrelevant = float(relevance[sample].mean())
        relevance[~(similarity >= self._floor)] = -np.inf
        return similarity, relevance, irrelevant

    def _candidates(self, relevance: Floats, places: int, hidden: Hidden | None) -> Iterator[RankedRow]:
        """The chunks that may be chosen, most relevant first: each text once, and a limited number of each document."""
        import numpy as np

        documents = self.index.profile.documents
        is_full = np.zeros(documents.max() + 1, bool)
        counts: Counter[int] = Counter()
        texts: set[str] = set()
        for rows in _best_first(relevance):
            rows_of_others = rows[~is_full[documents[rows]]]
            for row in rows_of_others.tolist():
                chunk = self.index.chunks[row]
                document = int(documents[row])
                text = _comparable(chunk.text)
                if is_full[document] or text in texts or (hidden is not None and hidden(chunk.document_id)):
                    continue
                yield RankedRow(row, float(relevance[row]))
                texts.add(text)
                counts[document] += 1
                is_full[document] = counts[document] == _OF_A_DOCUMENT * places

    def _reranked(self, reranker: Reranker, query: str, rows: Sequence[int], places: int) -> list[int]:
        """The best of these chunks by the reranker's scores."""
        texts = [passage_text(self.index.chunks[row]) for row in rows]
        scores = reranker.scores(query, texts)
        relevance = scores / max(float(scores.std()), 1e-6)
        order = (-scores).argsort(kind="stable")
        ranked = (RankedRow(rows[place], float(relevance[place])) for place in order)
        return FairChoice(self.index, ranked, places, float(relevance.min())).choose()

    def _embedded(self, questions: Sequence[str]) -> Floats:
        """The weighted sum of the questions' embeddings, of length 1."""
        vector: Floats = self._embedder.embed_query(questions[0])
        for age, question in enumerate(questions[1:], 1):
            vector = vector + _DECAY**age * self._embedder.embed_query(question)
        if len(questions) > 1:
            vector = vector / max(float(vector @ vector) ** 0.5, 1e-12)
        return vector


def _best_first(relevance: Floats) -> Iterator[Integers]:
    """The rows of chunks in blocks, most relevant first, ties by row; without those whose relevance is minus infinity.

    Sorting all of a million takes longer than the search, so few are sorted if few are needed.
    """
    import numpy as np

    count = _BLOCK
    above = np.inf
    while above > -np.inf:
        is_last = count >= len(relevance)
        least = -np.inf if is_last else np.partition(relevance, -count)[-count]
        rows = np.flatnonzero((relevance >= least) & (relevance < above) & (relevance > -np.inf))
        rows = rows[np.argsort(-relevance[rows], kind="stable")]
        for start in range(0, len(rows), _BLOCK):
            yield rows[start : start + _BLOCK]
        above = least
        count *= _BLOCK_GROWTH


def _comparable(text: str) -> str:
    """The text in the form in which equal texts are recognised."""
    composed = normalize("NFC", text)
    return " ".join(composed.split()).casefold()
