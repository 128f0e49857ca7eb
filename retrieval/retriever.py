"""A question to the chunks that may answer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from retrieval.chunking import Chunk
from retrieval.embedders import Embedder
from retrieval.errors import IndexMismatchError, QueryError
from retrieval.index import ChunkIndex


class RankedChunk(NamedTuple):
    """A chunk and its similarity to the question, between -1 and 1."""

    chunk: Chunk
    score: float


Hidden = Callable[[str], bool]
"""Whether a document of this id is to be passed over."""
RankedChunks = tuple[RankedChunk, ...]
"""Best first."""


class Retriever:
    """Searches an index with the embedder that made it. Raises `IndexMismatchError` when that is another one."""

    def __init__(self, index: ChunkIndex, embedder: Embedder) -> None:
        if (index.embedder, index.dimension) != (embedder.name, embedder.dimension):
            raise IndexMismatchError(
                f"the index was made with {index.embedder}, not {embedder.name}; load that embedder"
            )
        self.index, self._embedder = index, embedder

    def search(self, query: str, k: int, hidden: Hidden | None = None) -> RankedChunks:
        """The `k` chunks most similar to the question, best first: all of them when the index holds fewer.

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
        found = self.index.search(self._embedder.embed_query(query.strip()), k + more)
        ranked = (RankedChunk(chunks[row], score) for row, score in found)
        return tuple(one for one in ranked if one.chunk.document_id not in gone)[:k]
