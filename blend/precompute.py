"""Documents -> chunks -> index and chunk caches: incremental, and resumable after a stop at any point.

The index is replaced first and the caches follow one by one, so a stop leaves an index whose missing caches are recomputed on
use, and a next run that computes only those.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from blend.chunks.deciding import in_copies, remove_spare, with_given_surrogate, with_surrogate, without_surrogate
from blend.chunks.library import ChunkLibrary, KeysInUse
from blend.config import CorpusConfig
from blend.prompt import PromptTemplate, render_chunk
from blend.store.base import ChunkStore
from blend.timing import Progress, no_progress
from blend.types import ChunkKey
from retrieval import (
    Chunk,
    ChunkIndex,
    LoadedDocuments,
    RetrievalError,
    SkippedDocument,
    chunk_documents,
    update_index,
)
from retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from retrieval import Embedder


@dataclass(frozen=True)
class Precomputed:
    """What a run did.

    documents, chunks: in the corpus now. added, removed: chunks that are new to the index, and gone from it. computed,
    reused: caches computed now, and found stored; most chunks have two, isolated and contextual, unless one copy is kept.
    evicted: caches of the corpus that the store's budget has no room for. tokens, seconds: of the forward passes and the
    writing of their caches. skipped: documents that could not be read, with the reason. rebuilt: why an index that was there
    could not be built upon, or empty.
    """

    documents: int
    chunks: int
    added: int
    removed: int
    computed: int
    reused: int
    evicted: int
    tokens: int
    seconds: float
    skipped: tuple[SkippedDocument, ...]
    rebuilt: str = ""


@dataclass(frozen=True)
class TitledText:
    """A chunk as a prompt needs it."""

    title: str
    text: str


def precompute(
    loaded: LoadedDocuments,
    *,
    decoder: Decoder,
    template: PromptTemplate,
    embedder: Embedder,
    store: ChunkStore,
    index_dir: Path,
    config: CorpusConfig,
    others: Mapping[str, Path] | None = None,
    add: bool = False,
    quick: bool = False,
    progress: Progress = no_progress,
) -> Precomputed:
    """Make the corpus hold exactly these documents; with `add`, those and what it held before.

    others: name and index directory of the store's other corpora: caches that they use as well are not removed.
    quick: only one cache a chunk, the isolated one where there is none; whether one copy or two are kept stays as it is. The
    next run without it computes the rest; with `config.one_copy` the isolated caches go when the contextual ones are there.

    Raises `RetrievalError` when nothing can be indexed, or when there is an index to add to that cannot be read, and
    `StoreError` when the store cannot be written.
    """
    held = _held(index_dir, required=add)
    given = {document.id for document in loaded.documents}
    kept = [chunk for chunk in held if add and chunk.document_id not in given]
    chunks = (*kept, *_chunks(loaded, template, config, progress))
    library = ChunkLibrary(decoder, store, template.prefix, config.batch_tokens, corpus=config.name)
    keep = cache(partial(_keys_of_others, decoder, store, template, others or {}))
    ids = list(dict.fromkeys(template.chunk_ids(chunk) for chunk in chunks))
    words = describe_namespace(decoder, template)
    store.describe(library.isolated.identity.namespace, words)
    # Before the index forgets them; only its own entries go, a report's stay.
    for gone in {template.chunk_ids(chunk) for chunk in held}.difference(ids):
        library.forget(gone, keep)
    update = update_index(index_dir, chunks, embedder, progress)
    if not quick:
        library = in_copies(_with_surrogate(library, ids, template, config, keep), one=config.one_copy)
    if library.contextual:
        store.describe(library.contextual.identity.namespace, {**words, "contextual": "surrogate context"})
    wanted = library.quickest(ids) if quick else library.wanted(ids)
    missing = library.lacking(wanted)
    begin = time.perf_counter()
    tokens = library.compute(missing, progress)
    seconds = time.perf_counter() - begin
    remove_spare(library, ids, keep)
    return Precomputed(
        documents=len({chunk.document_id for chunk in chunks}),
        chunks=len(chunks),
        added=update.added,
        removed=update.removed,
        computed=len(missing),
        reused=len(wanted) - len(missing),
        evicted=len(library.lacking(wanted)),
        tokens=tokens,
        seconds=seconds,
        skipped=loaded.skipped,
        rebuilt=update.reason,
    )


def _with_surrogate(
    library: ChunkLibrary,
    ids: list[tuple[int, ...]],
    template: PromptTemplate,
    config: CorpusConfig,
    keep: KeysInUse,
) -> ChunkLibrary:
    if not config.surrogate_tokens:
        return without_surrogate(library, keep)
    if config.surrogate_text:
        given = tuple(template.encode(config.surrogate_text)[: config.surrogate_tokens])
        return with_given_surrogate(library, given, keep)
    return with_surrogate(library, ids, config.surrogate_tokens)


def _keys_of_others(
    decoder: Decoder, store: ChunkStore, template: PromptTemplate, others: Mapping[str, Path]
) -> frozenset[ChunkKey]:
    """The caches that other corpora of the store use. One whose index cannot be read answers nothing, and uses none."""
    keys: set[ChunkKey] = set()
    for name, directory in others.items():
        library = ChunkLibrary(decoder, store, template.prefix, corpus=name)
        keys |= library.keys([template.chunk_ids(chunk) for chunk in _held(directory, required=False)])
    return frozenset(keys)


def _chunks(loaded: LoadedDocuments, template: PromptTemplate, config: CorpusConfig, progress: Progress) -> list[Chunk]:
    """The documents divided, each on its own: none depends on another."""
    chunks: list[Chunk] = []
    for number, document in enumerate(loaded.documents, 1):
        chunks += chunk_documents(
            [document],
            template.encode,
            config.chunk_tokens,
            render=lambda title, text: render_chunk(TitledText(title, text)),
        )
        progress("chunk", number, len(loaded.documents))
    return chunks


def describe_namespace(decoder: Decoder, template: PromptTemplate) -> dict[str, str]:
    """Words for a group of entries, so that a store made with another model can be named."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    return {"model": decoder.name, "dtype": dtype, "prefix_tokens": str(len(template.prefix))}


def _held(index_dir: Path, *, required: bool) -> tuple[Chunk, ...]:
    """What the index holds before it is replaced. One that cannot be read holds nothing, unless it is required."""
    try:
        return ChunkIndex.load(index_dir).chunks
    except IndexMissingError:
        return ()
    except RetrievalError:
        if required:
            raise
        return ()
