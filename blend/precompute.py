"""Documents -> chunks -> index and chunk caches: incremental, and resumable after a stop at any point.

The index is replaced first and the caches follow one by one, so a stop leaves an index whose missing caches are recomputed on
use, and a next run that computes only those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blend.config import CorpusConfig
from blend.encode import ChunkEncoder
from blend.prompt import PromptTemplate, render_chunk
from blend.store.base import ChunkStore
from retrieval import Chunk, ChunkIndex, RetrievalError, SkippedDocument, chunk_documents, load_documents, update_index

if TYPE_CHECKING:
    from blend.decoder import Decoder
    from retrieval import Embedder

Progress = Callable[[str, int, int], None]
"""Called with a stage ("embed" in chunks, "encode" in tokens), how much is done, and how much there is in all."""


@dataclass(frozen=True)
class Precomputed:
    """What a run did. Chunks: in the corpus now, new to the index, gone from it; caches: computed now, and found stored.

    tokens, seconds: of the forward passes alone. skipped: documents that could not be read, with the reason.
    """

    documents: int
    chunks: int
    added: int
    removed: int
    computed: int
    reused: int
    tokens: int
    seconds: float
    skipped: tuple[SkippedDocument, ...]


@dataclass(frozen=True)
class TitledText:
    """A chunk as a prompt needs it."""

    title: str
    text: str


def precompute(
    paths: Iterable[str | Path],
    *,
    decoder: Decoder,
    template: PromptTemplate,
    embedder: Embedder,
    store: ChunkStore,
    index_dir: Path,
    config: CorpusConfig,
    add: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Precomputed:
    """Make the corpus hold exactly the documents under `paths`; with `add`, those and what it held before.

    Raises `RetrievalError` when nothing can be read or indexed, `StoreError` when the store cannot be written.
    """
    loaded = load_documents(paths)
    chunks: Sequence[Chunk] = chunk_documents(
        loaded.documents,
        template.encode,
        config.chunk_tokens,
        render=lambda title, text: render_chunk(TitledText(title, text)),
    )
    held = _held(index_dir)
    if add:
        given = {document.id for document in loaded.documents}
        chunks = (*(c for c in held if c.document_id not in given), *chunks)
    encoder = ChunkEncoder(decoder, template.prefix, config.batch_tokens)
    ids = list(dict.fromkeys(template.chunk_ids(chunk) for chunk in chunks))
    # Before the index forgets them; only its own entries go, a report's stay.
    for gone in {template.chunk_ids(chunk) for chunk in held}.difference(ids):
        store.delete(encoder.identity.key(gone))
    update = update_index(index_dir, chunks, embedder, lambda done, total: progress("embed", done, total))
    store.describe(encoder.identity.namespace, describe_namespace(decoder, template))
    missing = [i for i in ids if encoder.identity.key(i) not in store]
    begin = time.perf_counter()
    tokens = encode_missing(encoder, store, missing, lambda done, total: progress("encode", done, total))
    seconds = time.perf_counter() - begin
    return Precomputed(
        documents=len(loaded.documents),
        chunks=len(chunks),
        added=update.added,
        removed=update.removed,
        computed=len(missing),
        reused=len(ids) - len(missing),
        tokens=tokens,
        seconds=seconds,
        skipped=loaded.skipped,
    )


def encode_missing(
    encoder: ChunkEncoder,
    store: ChunkStore,
    missing: Sequence[tuple[int, ...]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Compute and store these chunks, each as soon as it is there; the number of their tokens."""
    total, done = sum(map(len, missing)), 0
    progress(0, total)
    for index, cache in encoder.encode(missing):
        store.put(encoder.identity.key(missing[index]), cache)
        done += len(missing[index])
        progress(done, total)
    return total


def describe_namespace(decoder: Decoder, template: PromptTemplate) -> dict[str, str]:
    """Words for a group of entries, so that a store made with another model can be named."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    return {"model": decoder.name, "dtype": dtype, "prefix_tokens": str(len(template.prefix))}


def _held(index_dir: Path) -> tuple[Chunk, ...]:
    """What the index holds before it is replaced; an unusable one holds nothing."""
    with suppress(RetrievalError):
        return ChunkIndex.load(index_dir).chunks
    return ()
