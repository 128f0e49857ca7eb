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
from typing import NamedTuple

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import Embedder, Progress
from blend_retrieval.embedders.base import Floats, Integers
from blend_retrieval.errors import ChunkIndexError, IndexDamagedError, IndexMismatchError, IndexMissingError
from blend_retrieval.generations import (
    Generation,
    manifest_digest,
    read_generation,
    salvaged_chunks,
    set_index_aside,
    write_generation,
    write_lock,
)
from blend_retrieval.lexical import LexicalIndex
from blend_retrieval.profile import CorpusProfile, profile_of
from blend_retrieval.words import FORM, composed


class ScoredRow(NamedTuple):
    """A chunk's place in the index and its inner product with the query."""

    row: int
    score: float


class IndexUpdate(NamedTuple):
    """The result of an update, in chunks. `reason` says why an existing index, or a part, was rebuilt, or is empty."""

    added: int
    kept: int
    removed: int
    reason: str = ""


class ChunkIndex:
    """Chunks of a corpus and their unit vectors, in memory, searched exactly. Threads may search it concurrently."""

    def __init__(self, chunks: Sequence[Chunk], vectors: Floats, embedder: str) -> None:
        """chunks[i] has the vector vectors[i], float32 `[chunks, dimension]`; embedder: the identity of their embedder."""
        import faiss

        self.chunks = tuple(chunks)
        self.embedder = embedder
        self.form = FORM
        self.dimension = int(vectors.shape[1])
        self.faiss_index: faiss.IndexFlat = faiss.IndexFlatIP(self.dimension)
        self.faiss_index.add(vectors)

    @classmethod
    def load(cls, directory: str | Path, embedder: Embedder | None = None) -> ChunkIndex:
        """Read the index in a directory.

        Raises `IndexMissingError`, `IndexDamagedError`, or `IndexMismatchError` if `embedder` did not make it.
        """
        path = Path(directory)
        index = _decode(read_generation(path), path)
        if embedder and not index.made_by(embedder):
            raise IndexMismatchError(
                f"the index in {directory} was made with the embedding model {index.embedder}, not {embedder.identity}; "
                f"choose that one, or run `blend precompute` again"
            )
        return index

    def made_by(self, embedder: Embedder) -> bool:
        """Whether this embedder made its vectors."""
        return embedder.made(self.embedder) and embedder.dimension == self.dimension

    def __len__(self) -> int:
        return len(self.chunks)

    def search(self, vector: Floats, k: int) -> list[ScoredRow]:
        """The `k` best chunks (all, if there are fewer) for a unit vector `[dimension]`, best first, ties by row."""
        if k <= 0 or not self.chunks:
            return []
        count = min(k, len(self.chunks))
        scores, rows = self.faiss_index.search(vector.reshape(1, -1), count)
        pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        hits = [ScoredRow(row, score) for row, score in pairs if row >= 0]
        return sorted(hits, key=lambda hit: (-hit.score, hit.row))

    @cached_property
    def lexical(self) -> LexicalIndex:
        """The words of the chunks, made at the first search."""
        return LexicalIndex([passage_text(chunk) for chunk in self.chunks])

    @cached_property
    def profile(self) -> CorpusProfile:
        """What is usual among the chunks, made at the first search. The index is not empty."""
        return profile_of(self.chunks, self._stored_vectors())

    def similarities(self, vector: Floats) -> Floats:
        """Inner products of a vector `[dimension]` with those of all chunks, `[chunks]`. The index is not empty."""
        products: Floats = self._stored_vectors() @ vector
        return products

    def vectors(self, rows: Integers | None = None) -> Floats:
        """The vectors of these chunks, float32 `[rows, dimension]`; by default of all."""
        if rows is None:
            vectors: Floats = self.faiss_index.reconstruct_n(0, len(self.chunks))
        else:
            vectors = self.faiss_index.reconstruct_batch(rows)
        return vectors

    def _stored_vectors(self) -> Floats:
        """All vectors without a copy."""
        import faiss

        shape = (len(self.chunks), self.dimension)
        vectors: Floats = faiss.rev_swig_ptr(self.faiss_index.get_xb(), shape[0] * shape[1]).reshape(shape)
        return vectors


def update_index(
    directory: str | Path,
    chunks: Sequence[Chunk],
    embedder: Embedder,
    progress: Progress | None = None,
    embedded: Mapping[str, Floats] | None = None,
) -> IndexUpdate:
    """Make the index in a directory hold exactly these chunks, and embed only new ones.

    A damaged index, or one of another embedder, is rebuilt; the files of a damaged one are moved aside. Chunks that an
    earlier version embedded in another form are embedded anew. A crash leaves the old or the new index, and readers may go
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
        old, reason, is_damaged = _usable(path, embedder)
        old_chunks = old.chunks if old else ()
        old_ids = [chunk.id for chunk in old_chunks]
        unchanged = len({chunk.id for chunk in chunks}.intersection(old_ids))
        outdated = _outdated_ids(old) if old else set()
        if outdated:
            reason = (
                f"{len(outdated):,} of {len(old_ids):,} chunks were embedded as they were typed, by an earlier version"
            )
        update = IndexUpdate(
            added=len(chunks) - unchanged, kept=unchanged, removed=len(old_ids) - unchanged, reason=reason
        )
        if old and old_chunks == chunks and old.form == FORM:
            return update
        vector_of = dict(embedded or {})
        if old:
            old_vectors = zip(old_ids, old.vectors(), strict=True)
            vector_of.update(pair for pair in old_vectors if pair[0] not in outdated)
        new = [chunk for chunk in chunks if chunk.id not in vector_of]
        if new:
            texts = [passage_text(chunk) for chunk in new]
            new_vectors = embedder.embed(texts, progress)
            for chunk, vector in zip(new, new_vectors, strict=True):
                vector_of[chunk.id] = vector
        vectors = np.array([vector_of[chunk.id] for chunk in chunks], np.float32)
        vectors = vectors.reshape(-1, embedder.dimension)
        index = ChunkIndex(chunks, vectors, embedder.identity)
        if is_damaged:
            set_index_aside(path)
        write_generation(path, _encode(index))
    return update


def passage_text(chunk: Chunk) -> str:
    """The text that is embedded for a chunk."""
    return composed(_typed_text(chunk))


def _typed_text(chunk: Chunk) -> str:
    return f"{chunk.title}\n{chunk.text}"


def _outdated_ids(index: ChunkIndex) -> set[str]:
    """The ids of chunks that an earlier version embedded in another form."""
    if index.form == FORM:
        return set()
    return {chunk.id for chunk in index.chunks if passage_text(chunk) != _typed_text(chunk)}


def salvaged(directory: Path) -> tuple[Chunk, ...]:
    """The chunks of a damaged index, if they are as they were written. Raises `IndexDamagedError`."""
    content = salvaged_chunks(directory)
    if content is None:
        raise IndexDamagedError(
            f"the index in {directory} is damaged, and so are its texts: run `blend precompute` again, or restore a backup"
        )
    return _chunks_in(content)


def _chunks_in(content: bytes) -> tuple[Chunk, ...]:
    rows = map(json.loads, content.splitlines())
    return tuple(Chunk(**row) for row in rows)


def _usable(path: Path, embedder: Embedder) -> tuple[ChunkIndex | None, str, bool]:
    """The existing index, or why it cannot be used, and whether it is damaged."""
    try:
        return ChunkIndex.load(path, embedder), "", False
    except IndexMissingError:
        return None, "", False
    except (IndexDamagedError, IndexMismatchError) as error:
        reason = str(error).partition(";")[0]
        return None, reason, isinstance(error, IndexDamagedError)


def _encode(index: ChunkIndex) -> Generation:
    import faiss

    lines = [json.dumps(asdict(chunk)) + "\n" for chunk in index.chunks]
    chunks = "".join(lines).encode()
    vectors = faiss.serialize_index(index.faiss_index).tobytes()
    return Generation(index.embedder, index.dimension, chunks, vectors, index.form)


def _decode(generation: Generation, directory: Path) -> ChunkIndex:
    import faiss
    import numpy as np

    index = ChunkIndex.__new__(ChunkIndex)
    index.embedder = generation.embedder
    index.dimension = generation.dimension
    index.form = generation.form
    try:
        index.chunks = _chunks_in(generation.chunks)
        vectors = np.frombuffer(generation.vectors, np.uint8)
        vector_index = faiss.deserialize_index(vectors)
    except Exception as error:  # the checksum is right, so this is another format
        raise ChunkIndexError(
            f"the index in {directory} cannot be understood ({error}); run `blend precompute` again"
        ) from error
    contradicts = vector_index.ntotal != len(index.chunks) or vector_index.d != index.dimension
    if contradicts or not isinstance(vector_index, faiss.IndexFlat):
        raise IndexDamagedError(f"the index in {directory} contradicts itself; run `blend precompute` again")
    index.faiss_index = vector_index
    return index


class CurrentIndex:
    """The index in a directory, read again after a writer replaced it. Threads may share it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._lock = Lock()
        self._digest = ""
        self._index: ChunkIndex | None = None

    def get(self) -> ChunkIndex:
        """The current index, after reading one small file if it is unchanged. Raises what `ChunkIndex.load` raises."""
        with self._lock:
            digest = manifest_digest(self.directory)  # read first, so that the next call notices later writes
            if self._index is None or digest != self._digest:
                self._index = ChunkIndex.load(self.directory)
                self._digest = digest
            return self._index
