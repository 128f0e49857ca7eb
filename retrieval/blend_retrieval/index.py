"""The index: chunks and their vectors, searched with FAISS, kept on disk and updated incrementally.

`CurrentIndex` follows an index that another process writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import Embedder, Progress
from blend_retrieval.embedders.base import Floats
from blend_retrieval.errors import ChunkIndexError, IndexDamagedError, IndexMismatchError, IndexMissingError
from blend_retrieval.generations import Generation, manifest_digest, read_generation, write_generation, write_lock
from blend_retrieval.lexical import LexicalIndex

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ScoredRow(NamedTuple):
    """A chunk's place in the index and its inner product with the query."""

    row: int
    score: float


class IndexUpdate(NamedTuple):
    """The result of an update, in chunks. `reason` says why an existing index was rebuilt, or is empty."""

    added: int
    kept: int
    removed: int
    reason: str = ""


class ChunkIndex:
    """Chunks of a corpus and their unit vectors, in memory, searched exactly. Threads may search it concurrently."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        vectors: Floats,
        embedder: str,
    ) -> None:
        """chunks[i] has the vector vectors[i], float32 `[chunks, dimension]`; embedder: the identity of their embedder."""
        import faiss

        self.chunks = tuple(chunks)
        self.embedder = embedder
        self.dimension = int(vectors.shape[1])
        self.faiss_index: faiss.Index = faiss.IndexFlatIP(self.dimension)
        self.faiss_index.add(vectors)

    @classmethod
    def load(cls, directory: str | Path, embedder: Embedder | None = None) -> ChunkIndex:
        """Read the index in a directory.

        Raises `IndexMissingError`, `IndexDamagedError`, or `IndexMismatchError` if `embedder` did not make it.
        """
        index = _decode(read_generation(Path(directory)), Path(directory))
        if embedder and not (embedder.made(index.embedder) and embedder.dimension == index.dimension):
            raise IndexMismatchError(
                f"the index in {directory} was made with the embedding model {index.embedder}, not {embedder.identity}; "
                f"choose that one, or run `blend precompute` again"
            )
        return index

    def __len__(self) -> int:
        return len(self.chunks)

    def search(self, vector: Floats, k: int) -> list[ScoredRow]:
        """The `k` best chunks (all, if there are fewer) for a unit vector `[dimension]`, best first, ties by row."""
        if k <= 0 or not self.chunks:
            return []
        scores, rows = self.faiss_index.search(vector.reshape(1, -1), min(k, len(self.chunks)))
        hits = [ScoredRow(int(row), float(score)) for row, score in zip(rows[0], scores[0], strict=True) if row >= 0]
        return sorted(hits, key=lambda hit: (-hit.score, hit.row))

    @cached_property
    def lexical(self) -> LexicalIndex:
        """The words of the chunks, made at the first search."""
        return LexicalIndex([passage_text(chunk) for chunk in self.chunks])

    def similarities(self, vector: Floats, rows: npt.NDArray[np.int64]) -> Floats:
        """Inner products of a vector `[dimension]` with those of these chunks, `[rows]`."""
        products: Floats = self.faiss_index.reconstruct_batch(rows) @ vector
        return products

    def vectors(self) -> Floats:
        """All vectors, float32 `[chunks, dimension]`."""
        vectors: Floats = self.faiss_index.reconstruct_n(0, len(self.chunks))
        return vectors


def update_index(
    directory: str | Path,
    chunks: Sequence[Chunk],
    embedder: Embedder,
    progress: Progress | None = None,
    embedded: Mapping[str, Floats] | None = None,
) -> IndexUpdate:
    """Make the index in a directory hold exactly these chunks, and embed only new ones.

    A damaged index, or one of another embedder, is rebuilt. A crash leaves the old or the new index, and readers may go
    on meanwhile.

    Args:
        directory: of the index.
        chunks: all that the index is to hold.
        embedder: makes the vectors of new chunks.
        progress: called as they are embedded.
        embedded: vectors of new chunks that are known already, by chunk id.

    Raises:
        ChunkIndexError: the index cannot be written.
    """
    import numpy as np

    path = Path(directory)
    chunks = tuple({chunk.id: chunk for chunk in chunks}.values())
    with write_lock(path):
        old, reason = _usable(path, embedder)
        rows = {chunk.id: row for row, chunk in enumerate(old.chunks)} if old else {}
        new = [place for place, chunk in enumerate(chunks) if chunk.id not in rows]
        unchanged = [place for place, chunk in enumerate(chunks) if chunk.id in rows]
        update = IndexUpdate(len(new), len(unchanged), len(rows) - len(unchanged), reason)
        if old and old.chunks == chunks:
            return update
        vectors = np.zeros((len(chunks), embedder.dimension), np.float32)
        if old and unchanged:
            vectors[unchanged] = old.vectors()[[rows[chunks[place].id] for place in unchanged]]
        embedded = embedded or {}
        for place in new:
            vectors[place] = embedded.get(chunks[place].id, 0)
        missing = [place for place in new if chunks[place].id not in embedded]
        if missing:
            vectors[missing] = embedder.embed([passage_text(chunks[place]) for place in missing], progress)
        write_generation(path, _encode(ChunkIndex(chunks, vectors, embedder.identity)))
    return update


def passage_text(chunk: Chunk) -> str:
    """The text that is embedded for a chunk."""
    return f"{chunk.title}\n{chunk.text}"


def _usable(path: Path, embedder: Embedder) -> tuple[ChunkIndex | None, str]:
    """The existing index, or why it cannot be used."""
    try:
        return ChunkIndex.load(path, embedder), ""
    except IndexMissingError:
        return None, ""
    except (IndexDamagedError, IndexMismatchError) as error:
        return None, str(error).partition(";")[0]


def _encode(index: ChunkIndex) -> Generation:
    import faiss

    lines = "".join(json.dumps(asdict(chunk)) + "\n" for chunk in index.chunks)
    vectors = faiss.serialize_index(index.faiss_index).tobytes()
    return Generation(index.embedder, index.dimension, lines.encode(), vectors)


def _decode(generation: Generation, directory: Path) -> ChunkIndex:
    import faiss
    import numpy as np

    index = ChunkIndex.__new__(ChunkIndex)
    index.embedder = generation.embedder
    index.dimension = generation.dimension
    try:
        index.chunks = tuple(Chunk(**json.loads(line)) for line in generation.chunks.splitlines())
        index.faiss_index = faiss.deserialize_index(np.frombuffer(generation.vectors, np.uint8))
    except Exception as error:  # the checksum is right, so this is another format
        raise ChunkIndexError(
            f"the index in {directory} cannot be understood ({error}); run `blend precompute` again"
        ) from error
    if index.faiss_index.ntotal != len(index.chunks) or index.faiss_index.d != index.dimension:
        raise IndexDamagedError(f"the index in {directory} contradicts itself; run `blend precompute` again")
    return index


class CurrentIndex:
    """The index in a directory, read again after a writer replaced it. Threads may share it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._lock = Lock()
        self._current: tuple[str, ChunkIndex] | None = None

    def get(self) -> ChunkIndex:
        """The current index, after reading one small file if it is unchanged. Raises what `ChunkIndex.load` raises."""
        with self._lock:
            digest = manifest_digest(self.directory)  # read first, so that the next call notices later writes
            if self._current is None or self._current[0] != digest:
                self._current = digest, ChunkIndex.load(self.directory)
            return self._current[1]
