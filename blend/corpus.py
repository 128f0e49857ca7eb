"""Documents -> chunks -> index and chunk caches: incremental, and resumable after a stop at any point.

    plan_change -> CorpusChange -> prepare -> PreparedCorpus -> caches

`plan_change` writes nothing. `prepare` replaces the index; from then on the chunks can be retrieved, and an answer computes the
caches that are missing. A run that was stopped leaves such an index, and the next run computes only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.library import ChunkLibrary
from blend.chunks.probe import leave_probe
from blend.chunks.surrogate import with_given_surrogate, with_surrogate, without_surrogate
from blend.config import WHOLE, CorpusConfig, Share
from blend.corpora import Sharing, indexes_named, name_store
from blend.errors import StoreChangedError
from blend.layout import Tokens
from blend.prompt_template import PromptTemplate, render_chunk
from blend.stopwatch import Progress, no_progress
from blend.store.admin import write_sources
from blend.store.base import ChunkStore
from blend.types import CacheKey, CacheKind, ChunkKey
from blend_retrieval import (
    Chunk,
    ChunkIndex,
    Document,
    IndexUpdate,
    LoadedDocuments,
    RetrievalError,
    SkippedDocument,
    chunk_documents,
    update_index,
)
from blend_retrieval.errors import IndexBusyError, IndexDamagedError, IndexMissingError
from blend_retrieval.index import salvaged

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from blend.model.decoder import Decoder
    from blend_retrieval import Embedder

Compute = Callable[[ChunkLibrary, Sequence[CacheKey], Progress], int]
"""Computes and stores these caches; returns how many tokens they have."""


class TitledText(NamedTuple):
    """A chunk as a prompt needs it."""

    title: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A corpus and everything that it is kept with, for the time of one change.

    embedder: loads it. sharing: publishes its index. others: name and index directory of the store's other corpora.
    known: token ids of chunks by chunk id, filled as they are asked for.
    """

    decoder: Decoder
    template: PromptTemplate
    embedder: Callable[[], Embedder]
    store: ChunkStore
    index_dir: Path
    config: CorpusConfig
    sharing: Sharing
    others: Mapping[str, Path] = field(default_factory=dict)
    known: dict[str, Tokens] = field(default_factory=dict)

    @cached_property
    def library(self) -> ChunkLibrary:
        """The corpus's chunk caches as the store held them before the change."""
        config = self.config
        return ChunkLibrary(self.decoder, self.store, self.template.prefix, config.batch_tokens, corpus=config.name)

    def token_ids(self, chunk: Chunk) -> Tokens:
        """Token ids of a chunk as it stands in prompts."""
        if chunk.id not in self.known:
            self.known[chunk.id] = self.template.chunk_ids(chunk)
        return self.known[chunk.id]

    @cached_property
    def _other_libraries(self) -> dict[str, ChunkLibrary]:
        """Of the other corpora. The corpus without a name may have learned texts, even if it has no documents."""
        names = {"", *self.others}.difference((self.config.name,))
        return {name: ChunkLibrary(self.decoder, self.store, self.template.prefix, corpus=name) for name in names}

    @cached_property
    def used_elsewhere(self) -> frozenset[ChunkKey]:
        """The caches that other corpora use. A corpus whose index cannot be read uses none."""
        keys = set[ChunkKey]()
        for name, directory in self.others.items():
            ids = [self.template.chunk_ids(chunk) for chunk in _indexed_chunks(directory, required=False)]
            keys |= self._other_libraries[name].keys(ids)
        return frozenset(keys)

    def spare(self, gone: Sequence[Tokens]) -> frozenset[ChunkKey]:
        """The caches of chunks that left the corpus, unless other corpora use them.

        Includes caches made for another corpus: a question may have brought a chunk's text there.
        """
        if not gone:
            return frozenset()
        libraries = (self.library, *self._other_libraries.values())
        return frozenset(key for library in libraries for key in library.keys(gone)).difference(self.used_elsewhere)


class DividedDocuments(NamedTuple):
    """Documents, by their ids, and their chunks.

    vectors, tokens: known embeddings and token ids of chunks, by chunk id.
    """

    ids: frozenset[str] = frozenset()
    chunks: Sequence[Chunk] = ()
    vectors: Mapping[str, npt.NDArray[np.float32]] = {}
    tokens: Mapping[str, Tokens] = {}


@dataclass(frozen=True)
class CorpusChange:
    """The chunks that a corpus is to hold; nothing is written yet.

    ids: token ids of the chunks, each once. gone: chunks that the corpus holds now and loses. began: the published index that
    the change begins with. vectors: of new chunks that are embedded already, by chunk id.
    """

    corpus: Corpus
    chunks: tuple[Chunk, ...]
    ids: tuple[Tokens, ...]
    gone: tuple[Tokens, ...]
    began: bytes | None
    vectors: Mapping[str, npt.NDArray[np.float32]]


class PreparedCorpus(NamedTuple):
    """A corpus with its new index. variants: the caches that it should have; missing: those to compute.

    update: what changed in the index; None if another share was writing it.
    """

    library: ChunkLibrary
    variants: list[CacheKey]
    missing: list[CacheKey]
    update: IndexUpdate | None


def plan_change(
    corpus: Corpus,
    documents: DividedDocuments,
    *,
    stays: Callable[[str], bool] | None = None,
    unread: Callable[[str], bool] | None = None,
) -> CorpusChange:
    """Plan a corpus of these documents, plus the documents it held under other ids that stay.

    Args:
        corpus: the corpus.
        documents: the new documents.
        stays: whether the document with this id stays; by default none does.
        unread: whether the document with this id exists, but could not be read now; it stays as well.

    Raises:
        RetrievalError: some are to stay and the index cannot be read.
    """
    began = corpus.sharing.begun_with(corpus.config.name)
    with indexes_named(corpus.index_dir):
        before = _indexed_chunks(corpus.index_dir, required=stays is not None)
    conditions = [condition for condition in (stays, unread) if condition is not None]
    absent = {chunk.document_id for chunk in before} - documents.ids
    staying = {document for document in absent if any(condition(document) for condition in conditions)}
    chunks = (*(chunk for chunk in before if chunk.document_id in staying), *documents.chunks)
    corpus.known.update(documents.tokens)
    ids = dict.fromkeys(map(corpus.token_ids, chunks))
    removed = dict.fromkeys(chunk_ids for chunk_ids in map(corpus.token_ids, before) if chunk_ids not in ids)
    return CorpusChange(corpus, chunks, tuple(ids), tuple(removed), began, documents.vectors)


def prepare(
    change: CorpusChange, *, quick: bool = False, share: Share = WHOLE, progress: Progress = no_progress
) -> PreparedCorpus:
    """Update the index, choose the surrogate context, and list the missing caches.

    Args:
        change: the planned change.
        quick: see `Rag.precompute`.
        share: see `Rag.precompute`.
        progress: called with stage, done and total.

    Raises:
        RetrievalError: the index cannot be written.
        StoreError: the store cannot be written.
    """
    try:
        update = _write_index(change, progress)
    except (IndexBusyError, StoreChangedError):
        if share.of == 1:
            raise
        update = None  # another share is writing it; all shares write the same
    library = _decide(change, quick=quick)
    variants = library.variants(change.ids, contextual=not quick)
    missing = library.missing_of([variant for variant in variants if share.holds(library.key(variant))])
    return PreparedCorpus(library, variants, library.restore(missing, progress), update)


def _write_index(change: CorpusChange, progress: Progress) -> IndexUpdate:
    corpus = change.corpus
    embedder = corpus.embedder()
    with indexes_named(corpus.index_dir):
        update = update_index(corpus.index_dir, change.chunks, embedder, progress, change.vectors)
    corpus.sharing.publish(corpus.config.name, change.began)
    return update._replace(reason=name_store(update.reason, corpus.index_dir))


def _decide(change: CorpusChange, *, quick: bool) -> ChunkLibrary:
    """The corpus's caches with a surrogate context: the one that was chosen before, or one chosen now. quick: choose none."""
    corpus = change.corpus
    library = corpus.library
    namespace = library.isolated.identity.namespace
    words = corpus.store.namespaces().get(namespace, {})
    corpus.store.describe(namespace, {**words, **library.words(CacheKind.ISOLATED)})
    if not quick:
        library = _with_surrogate(change, library)
    if library.contextual:
        corpus.store.describe(library.contextual.identity.namespace, library.words(CacheKind.CONTEXTUAL))
    write_sources(corpus.store, corpus.config.name, namespace, _sources(library, change))
    return library


def _sources(library: ChunkLibrary, change: CorpusChange) -> dict[str, dict[str, str]]:
    """The document of each cache, by namespace; one of them if several hold the same chunk."""
    documents = {change.corpus.token_ids(chunk): chunk.document_id for chunk in change.chunks}
    sources: dict[str, dict[str, str]] = {library.isolated.identity.namespace: {}}
    for variant in library.variants(change.ids):
        key = library.key(variant)
        sources.setdefault(key.namespace, {})[key.digest] = documents[variant.chunk]
    return sources


def _with_surrogate(change: CorpusChange, library: ChunkLibrary) -> ChunkLibrary:
    """The caches with the configured surrogate context: none, a given one, or one chosen before or now."""
    corpus = change.corpus
    config = corpus.config
    if not config.surrogate_tokens:
        return without_surrogate(library, lambda: corpus.used_elsewhere)
    if config.surrogate_text:
        tokens = tuple(corpus.template.encode(config.surrogate_text)[: config.surrogate_tokens])
        return with_given_surrogate(library, tokens, lambda: corpus.used_elsewhere)
    return with_surrogate(library, change.ids, config.surrogate_tokens)


def divided(
    documents: Sequence[Document], template: PromptTemplate, config: CorpusConfig, progress: Progress = no_progress
) -> DividedDocuments:
    """Divide documents, each independently of the others. Raises `RetrievalError`."""
    chunks: list[Chunk] = []
    for number, document in enumerate(documents, 1):
        chunks += chunk_documents([document], template.encode, config.chunk_tokens, render_passage)
        progress("chunk", number, len(documents))
    return DividedDocuments(frozenset(document.id for document in documents), chunks)


def render_passage(title: str, text: str) -> str:
    """A passage as it stands in prompts, to count its tokens."""
    return render_chunk(TitledText(title, text))


def _indexed_chunks(index_dir: Path, *, required: bool) -> tuple[Chunk, ...]:
    """The chunks of an index, a damaged one included if its texts are sound. Others hold nothing, unless it is required."""
    try:
        return ChunkIndex.load(index_dir).chunks
    except IndexMissingError:
        return ()
    except IndexDamagedError:
        if required:
            return salvaged(index_dir)
        with suppress(IndexDamagedError):
            return salvaged(index_dir)
    except RetrievalError:
        if required:
            raise
    return ()


@dataclass(frozen=True)
class Precomputed:
    """What a precompute did.

    Attributes:
        documents: Documents of the corpus now.
        chunks: Chunks of the corpus now.
        added: Chunks that are new to the index.
        removed: Chunks that left the index.
        computed: Caches that were computed. Most chunks have two, isolated and contextual.
        reused: Caches that were stored already.
        evicted: Caches that the store's budget has no room for.
        tokens: Tokens of the computed caches.
        seconds: Time to compute and store them.
        skipped: Documents that could not be read, with the reason.
        unread: Skipped documents that the corpus keeps as they were.
        rebuilt: Why the existing index could not be extended, or empty.
        shares_left: Of a share: numbers of the shares whose caches are still missing.

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
    unread: int = 0
    rebuilt: str = ""
    shares_left: tuple[int, ...] = ()


def compute_here(library: ChunkLibrary, missing: Sequence[CacheKey], progress: Progress) -> int:
    """Compute and store caches in this process; returns their tokens."""
    return library.compute(missing, progress)


def precompute(
    corpus: Corpus,
    loaded: LoadedDocuments,
    *,
    add: bool = False,
    quick: bool = False,
    share: Share = WHOLE,
    compute: Compute = compute_here,
    progress: Progress = no_progress,
) -> Precomputed:
    """Make the corpus hold exactly these documents; see `Rag.precompute`.

    A document that exists but could not be read this time stays as it was.
    """
    unread = loaded.unread()
    stays = (lambda document: True) if add else None
    documents = divided(loaded.documents, corpus.template, corpus.config, progress)
    change = plan_change(corpus, documents, stays=stays, unread=unread)
    for key in corpus.spare(change.gone):  # before the index forgets them
        corpus.store.delete(key)
    library, variants, missing, update = prepare(change, quick=quick, share=share, progress=progress)
    begin = time.perf_counter()
    tokens = compute(library, missing, progress)
    seconds = time.perf_counter() - begin
    leave_probe(corpus.store, corpus.decoder)
    missing_keys = [library.key(variant) for variant in library.missing_of(variants)]
    # All shares are done; another process wrote the index, or was stopped at it.
    if update is None and not missing_keys:
        update = _write_index(replace(change, began=corpus.sharing.begun_with(corpus.config.name)), progress)
    ids = {chunk.document_id for chunk in change.chunks}
    return Precomputed(
        documents=len(ids),
        chunks=len(change.chunks),
        added=update.added if update else 0,
        removed=update.removed if update else 0,
        computed=len(missing),
        reused=sum(share.holds(library.key(variant)) for variant in variants) - len(missing),
        evicted=sum(map(share.holds, missing_keys)),
        tokens=tokens,
        seconds=seconds,
        skipped=loaded.skipped,
        unread=sum(map(unread, ids - documents.ids)),
        rebuilt=update.reason if update else "",
        shares_left=() if share.of == 1 else tuple(sorted({share.number_of(key) for key in missing_keys})),
    )
