"""A question to the chunks that may answer it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import Embedder
from blend_retrieval.errors import IndexMismatchError, QueryError
from blend_retrieval.index import ChunkIndex

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_DECAY = 0.5
_MOST_ASKED = 4  # what is earlier counts too little to be embedded


class RankedChunk(NamedTuple):
    """A chunk and its similarity to the question, between -1 and 1."""

    chunk: Chunk
    score: float


Hidden = Callable[[str], bool]
"""Whether a document of this id is to be passed over."""
RankedChunks = tuple[RankedChunk, ...]
"""Best first."""


class Retriever:
    """Searches an index with the embedder that made it. Raises `IndexMismatchError` when that is another one.

    min_score: chunks below it are passed over; 0 passes over none.
    """

    def __init__(self, index: ChunkIndex, embedder: Embedder, min_score: float = 0.0) -> None:
        if (index.embedder, index.dimension) != (embedder.name, embedder.dimension):
            raise IndexMismatchError(
                f"the index was made with {index.embedder}, not {embedder.name}; load that embedder"
            )
        self.index, self._embedder, self._floor = index, embedder, min_score or -math.inf

    def search(self, query: str, k: int, hidden: Hidden | None = None, before: Sequence[str] = ()) -> RankedChunks:
        """The `k` chunks most similar to the question, best first: fewer where no more are there or score enough.

        before: questions earlier in the conversation, which a follow-up may leave unsaid; each counts half as much as the next.
        Chunks of hidden documents are passed over. Raises `QueryError` for an empty question or a `k` below 1.
        """
        if not query.strip():
            raise QueryError("the question is empty; ask something")
        if k < 1:
            raise QueryError(f"{k} chunks were asked for; ask for at least 1")
        if not len(self.index):
            return ()
        chunks = self.index.chunks
        gone = (
            {name for name in {chunk.document_id for chunk in chunks} if hidden(name)} if hidden is not None else set()
        )
        more = sum(chunk.document_id in gone for chunk in chunks) if gone else 0
        found = self.index.search(self._embedded(query, before), k + more)
        ranked = (RankedChunk(chunks[row], score) for row, score in found)
        return tuple(one for one in ranked if one.chunk.document_id not in gone and one.score >= self._floor)[:k]

    def _embedded(self, query: str, before: Sequence[str]) -> npt.NDArray[np.float32]:
        """The weighted sum of the embeddings, of length 1."""
        asked = [text.strip() for text in (query, *reversed(before)) if text.strip()][:_MOST_ASKED]
        vector: npt.NDArray[np.float32] = self._embedder.embed_query(asked[0])
        for number, text in enumerate(asked[1:], 1):
            vector = vector + _DECAY**number * self._embedder.embed_query(text)
        if len(asked) > 1:
            vector = vector / max(float(vector @ vector) ** 0.5, 1e-12)
        return vector
