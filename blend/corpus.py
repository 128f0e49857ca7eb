"""Documents -> chunks -> index and chunk caches: incremental, and resumable after a stop at any point.

    plan_change -> CorpusChange -> prepare -> PreparedCorpus -> caches

`plan_change` writes nothing. `prepare` replaces the index; from then on the chunks can be retrieved, and an answer computes the
caches that are missing. A run that was stopped leaves such an index, and the next run computes only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.encode import leave_probe
from blend.chunks.library import ChunkLibrary, Tokens, Variant, with_given_surrogate, with_surrogate, without_surrogate
from blend.config import CorpusConfig
from blend.corpora import sharing_of
from blend.errors import StoreChangedError
from blend.prompt import PromptTemplate, render_chunk
from blend.store.admin import write_sources
from blend.store.base import ChunkStore
from blend.types import ChunkKey, Progress, no_progress
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
from blend_retrieval.errors import IndexBusyError, IndexMissingError

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.shards import Share
    from blend_retrieval import Embedder

RATE = "tokens_per_s"  # in a namespace's description: tokens of isolated and contextual caches together
RATE_TOKENS = 4_000  # a shorter run says nothing about the rate

Compute = Callable[[ChunkLibrary, Sequence[Variant], Progress], int]
"""Computes and stores these caches; returns how many tokens they have."""


@dataclass(frozen=True)
class TitledText:
    """A chunk as a prompt needs it."""

    title: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A corpus and everything that it is kept with.

    others: name and index directory of the store's other corpora; caches that they use are not removed. known: token ids of
    chunks by chunk id, filled as they are asked for.
    """

    decoder: Decoder
    template: PromptTemplate
    embedder: Embedder
    store: ChunkStore
    index_dir: Path
    config: CorpusConfig
    others: Mapping[str, Path] = field(default_factory=dict)
    known: dict[str, Tokens] = field(default_factory=dict)

    def library(self) -> ChunkLibrary:
        """The corpus's chunk caches as the store holds them now."""
        config = self.config
        return ChunkLibrary(self.decoder, self.store, self.template.prefix, config.batch_tokens, corpus=config.name)

    def token_ids(self, chunk: Chunk) -> Tokens:
        """Token ids of a chunk as it stands in prompts."""
        ids = self.known.get(chunk.id)
        if ids is None:
            self.known[chunk.id] = ids = self.template.chunk_ids(chunk)
        return ids

    def begun_with(self) -> bytes | None:
        """The published index that a change begins with; None if the store is not shared."""
        sharing, name = sharing_of(self.index_dir, self.store)
        return sharing.begun_with(name)

    def publish(self, was: bytes | None) -> None:
        """Publish the index in place of `was`. Raises `StoreError`."""
        sharing, name = sharing_of(self.index_dir, self.store)
        sharing.publish(name, was)


@dataclass(frozen=True)
class OtherCorpora:
    """The other corpora of a store and the caches that they use.

    library: of the corpus at hand. indexes: name and index directory of each other corpus.
    """

    library: ChunkLibrary
    template: PromptTemplate
    indexes: Mapping[str, Path]

    @cached_property
    def used(self) -> frozenset[ChunkKey]:
        """The caches that they use. A corpus whose index cannot be read uses none."""
        keys = set[ChunkKey]()
        for name, directory in self.indexes.items():
            held = [self.template.chunk_ids(chunk) for chunk in _held(directory, required=False)]
            keys |= self._libraries[name].keys(held)
        return frozenset(keys)

    def spare(self, gone: Sequence[Tokens]) -> frozenset[ChunkKey]:
        """The caches of chunks that left the corpus, unless other corpora use them.

        Includes caches made for another corpus: a question may have brought a chunk's text there.
        """
        if not gone:
            return frozenset()
        libraries = (self.library, *self._libraries.values())
        keys = {library.key(one) for library in libraries for one in library.variants(gone)}
        return frozenset(keys.difference(self.used))

    @cached_property
    def _libraries(self) -> dict[str, ChunkLibrary]:
        """Of the other corpora. The corpus without a name may have learned texts, even if it has no documents."""
        mine = self.library
        names = {"", *self.indexes}.difference((mine.corpus,))
        return {name: ChunkLibrary(mine.decoder, mine.store, mine.prefix, corpus=name) for name in names}


@dataclass(frozen=True)
class CorpusChange:
    """The chunks that a corpus is to hold; nothing is written yet.

    library: the caches before the change. ids: token ids of the chunks, each once. gone: chunks that the corpus holds now and
    loses. began: the published index, see `Corpus.begun_with`.
    """

    corpus: Corpus
    library: ChunkLibrary
    chunks: tuple[Chunk, ...]
    ids: tuple[Tokens, ...]
    gone: tuple[Tokens, ...]
    began: bytes | None = None

    def forget(self) -> None:
        """Remove the caches of chunks that are gone. Raises `StoreError` when the store cannot be written."""
        for key in self.spare:
            self.library.store.delete(key)

    @cached_property
    def spare(self) -> frozenset[ChunkKey]:
        """The caches of chunks that are gone, unless other corpora use them."""
        return self._others.spare(self.gone)

    def keep(self) -> Collection[ChunkKey]:
        """The caches that other corpora use."""
        return self._others.used

    @cached_property
    def _others(self) -> OtherCorpora:
        return OtherCorpora(self.library, self.corpus.template, self.corpus.others)


class PreparedCorpus(NamedTuple):
    """A corpus with its new index. variants: the caches that it should have; missing: those to compute."""

    library: ChunkLibrary
    variants: list[Variant]
    missing: list[Variant]
    update: IndexUpdate


def plan_change(
    corpus: Corpus,
    documents: Sequence[Document],
    *,
    stays: Callable[[str], bool] | None = None,
    unread: Callable[[str], bool] | None = None,
    progress: Progress = no_progress,
) -> CorpusChange:
    """Plan a corpus of these documents, plus the documents it held under other ids that stay.

    stays: whether the document with this id stays; by default none does. unread: whether that document exists, but could not be
    read now; it stays as well. Raises `RetrievalError` when documents cannot be divided, or when some are to stay and the index
    cannot be read.
    """
    began = corpus.begun_with()
    held = _held(corpus.index_dir, required=stays is not None)
    stay = [says for says in (stays, unread) if says is not None]
    given = {document.id for document in documents}
    others = {chunk.document_id for chunk in held} - given
    kept_ids = {document for document in others if any(says(document) for says in stay)}
    kept = [chunk for chunk in held if chunk.document_id in kept_ids]
    chunks = (*kept, *divided(documents, corpus.template, corpus.config, progress))
    ids = dict.fromkeys(map(corpus.token_ids, chunks))
    gone = dict.fromkeys(ids_of for chunk in held if (ids_of := corpus.token_ids(chunk)) not in ids)
    return CorpusChange(corpus, corpus.library(), chunks, tuple(ids), tuple(gone), began)


def prepare(change: CorpusChange, *, quick: bool = False, progress: Progress = no_progress) -> PreparedCorpus:
    """Update the index, choose the surrogate context, and list the missing caches.

    quick: see `precompute`. Raises `RetrievalError` when the index cannot be written, `StoreError` when the store cannot.
    """
    update = write_index(change, progress)
    library = decide(change, quick=quick)
    variants = library.variants(change.ids, contextual=not quick)
    return PreparedCorpus(library, variants, _missing(library, variants), update)


def _missing(library: ChunkLibrary, variants: Sequence[Variant]) -> list[Variant]:
    """Caches to compute: not in the store, and in no nearer copy that it can be restored from."""
    missing = library.missing_of(variants)
    restored = library.restored(missing)
    return [one for one in missing if one not in restored]


def write_index(change: CorpusChange, progress: Progress = no_progress) -> IndexUpdate:
    """Write the index and publish it.

    Raises `RetrievalError` when it cannot be written, `StoreError` when the store cannot, or another machine has changed it.
    """
    update = update_index(change.corpus.index_dir, change.chunks, change.corpus.embedder, progress)
    change.corpus.publish(change.began)
    return update


def decide(change: CorpusChange, *, quick: bool = False) -> ChunkLibrary:
    """The corpus's caches with a surrogate context: the one that was chosen before, or one chosen now. quick: choose none.

    Raises `StoreError` when the store cannot be written.
    """
    corpus, library = change.corpus, change.library
    space = library.isolated.identity.namespace
    corpus.store.describe(space, {**corpus.store.namespaces().get(space, {}), **library.words(contextual=False)})
    if not quick:
        library = _with_surrogate(library, change)
    if library.contextual:
        corpus.store.describe(library.contextual.identity.namespace, library.words(contextual=True))
    write_sources(corpus.store, corpus.config.name, space, _sources(library, change))
    return library


def _sources(library: ChunkLibrary, change: CorpusChange) -> dict[str, dict[str, str]]:
    """The document of each cache, by namespace; one of them if several hold the same chunk."""
    documents = {change.corpus.token_ids(chunk): chunk.document_id for chunk in change.chunks}
    found: dict[str, dict[str, str]] = {library.isolated.identity.namespace: {}}
    for one in library.variants(change.ids):
        key = library.key(one)
        found.setdefault(key.namespace, {})[key.digest] = documents[one.chunk]
    return found


def _with_surrogate(library: ChunkLibrary, change: CorpusChange) -> ChunkLibrary:
    config = change.corpus.config
    if not config.surrogate_tokens:
        return without_surrogate(library, change.keep)
    if config.surrogate_text:
        given = tuple(change.corpus.template.encode(config.surrogate_text)[: config.surrogate_tokens])
        return with_given_surrogate(library, given, change.keep)
    return with_surrogate(library, change.ids, config.surrogate_tokens)


def divided(
    documents: Sequence[Document], template: PromptTemplate, config: CorpusConfig, progress: Progress = no_progress
) -> list[Chunk]:
    """The documents' chunks. Each document is divided independently of the others."""
    chunks: list[Chunk] = []
    for number, document in enumerate(documents, 1):
        chunks += chunk_documents(
            [document],
            template.encode,
            config.chunk_tokens,
            render=lambda title, text: render_chunk(TitledText(title, text)),
        )
        progress("chunk", number, len(documents))
    return chunks


def _held(index_dir: Path, *, required: bool) -> tuple[Chunk, ...]:
    """The chunks of an index. One that cannot be read holds nothing, unless it is required."""
    try:
        return ChunkIndex.load(index_dir).chunks
    except IndexMissingError:
        return ()
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


def compute_here(library: ChunkLibrary, missing: Sequence[Variant], progress: Progress) -> int:
    """Compute and store caches in this process; returns their tokens."""
    return library.compute(missing, progress)


def precompute(
    corpus: Corpus,
    loaded: LoadedDocuments,
    *,
    add: bool = False,
    quick: bool = False,
    share: Share | None = None,
    compute: Compute = compute_here,
    progress: Progress = no_progress,
) -> Precomputed:
    """Make the corpus hold exactly these documents; with `add`, also those it held before.

    A document that exists but could not be read this time stays as it was.

    quick: compute one cache a chunk, the isolated one if there is none; the next run without it computes the rest. share:
    compute only the caches of this share. compute: what computes and stores the missing caches.

    Raises `RetrievalError` when nothing can be indexed, or when the index to add to cannot be read, and `StoreError` when the
    store cannot be written.
    """
    stays = (lambda document: True) if add else None
    change = plan_change(corpus, loaded.documents, stays=stays, unread=loaded.unread(), progress=progress)
    change.forget()  # before the index forgets them
    update = _write_index_of(change, share, progress)
    library = decide(change, quick=quick)
    variants = library.variants(change.ids, contextual=not quick)
    mine = variants if share is None else [one for one in variants if share.holds(library.key(one))]
    missing = _missing(library, mine)
    begin = time.perf_counter()
    tokens = compute(library, missing, progress)
    seconds = time.perf_counter() - begin
    leave_probe(corpus.store, corpus.decoder)
    if compute is compute_here:
        _note_rate(library, tokens, seconds)
    left = [library.key(one) for one in library.missing_of(variants)]
    if update is None and not left:  # all shares are done; another process wrote the index, or was stopped at it
        update = write_index(replace(change, began=corpus.begun_with()), progress)
    given, unread = {document.id for document in loaded.documents}, loaded.unread()
    return Precomputed(
        documents=len({chunk.document_id for chunk in change.chunks}),
        chunks=len(change.chunks),
        added=update.added if update else 0,
        removed=update.removed if update else 0,
        computed=len(missing),
        reused=len(mine) - len(missing),
        evicted=sum(share is None or share.holds(key) for key in left),
        tokens=tokens,
        seconds=seconds,
        skipped=loaded.skipped,
        unread=sum(map(unread, {chunk.document_id for chunk in change.chunks} - given)),
        rebuilt=update.reason if update else "",
        shares_left=() if share is None else tuple(sorted({share.number_of(key) for key in left})),
    )


def _write_index_of(change: CorpusChange, share: Share | None, progress: Progress) -> IndexUpdate | None:
    """Write the index. If another share is writing it, return None: all shares write the same."""
    try:
        return write_index(change, progress)
    except (IndexBusyError, StoreChangedError):
        if share is None:
            raise
        return None


def _note_rate(library: ChunkLibrary, tokens: int, seconds: float) -> None:
    """Describe in the store how fast caches are computed, for `blend plan`."""
    if tokens < RATE_TOKENS or seconds <= 0:
        return
    space = library.isolated.identity.namespace
    words = library.store.namespaces().get(space, {})
    library.store.describe(space, {**words, RATE: f"{tokens / seconds:.1f}"})
