"""One change of a corpus, step by step: which chunks it is to hold, the index that holds them, the caches that they lack.

    plan -> CorpusChange -> prepare -> Prepared

Until `prepare` nothing is written; after it the chunks can be retrieved, and whoever likes computes what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.library import ChunkLibrary, Tokens, Variant
from blend.chunks.surrogate import in_copies, with_given_surrogate, with_surrogate, without_surrogate
from blend.config import CorpusConfig
from blend.prompt import PromptTemplate, render_chunk
from blend.sharing import begun_with, publish_index
from blend.store.admin import write_sources
from blend.store.base import ChunkStore
from blend.timing import Progress, no_progress
from blend.types import ChunkKey
from blend_retrieval import Chunk, ChunkIndex, Document, IndexUpdate, RetrievalError, chunk_documents, update_index
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend_retrieval import Embedder


@dataclass(frozen=True)
class TitledText:
    """A chunk as a prompt needs it."""

    title: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """What one corpus is kept with.

    others: name and index directory of the store's other corpora: caches that they use as well are not removed. known: token
    ids of chunks by the chunks' ids, as far as they were asked for before.
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
        """Its chunk caches as the store stands now."""
        config = self.config
        return ChunkLibrary(self.decoder, self.store, self.template.prefix, config.batch_tokens, corpus=config.name)

    def token_ids(self, chunk: Chunk) -> Tokens:
        """Of a chunk as it stands in prompts."""
        ids = self.known.get(chunk.id)
        if ids is None:
            self.known[chunk.id] = ids = self.template.chunk_ids(chunk)
        return ids


@dataclass(frozen=True)
class OtherCorpora:
    """The other corpora of a store, as far as they use its caches.

    library: of the corpus at hand. indexes: name and index directory of each other one.
    """

    library: ChunkLibrary
    template: PromptTemplate
    indexes: Mapping[str, Path]

    @cached_property
    def used(self) -> frozenset[ChunkKey]:
        """The caches of what they hold. One whose index cannot be read answers nothing, and uses none."""
        keys = set[ChunkKey]()
        for name, directory in self.indexes.items():
            held = [self.template.chunk_ids(chunk) for chunk in _held(directory, required=False)]
            keys |= self._libraries[name].keys(held)
        return frozenset(keys)

    def spare(self, gone: Sequence[Tokens]) -> frozenset[ChunkKey]:
        """The caches of chunks that the corpus at hand holds no more, but for those that the others use.

        Also those that were made for another corpus: a question may have brought a chunk's text to it.
        """
        if not gone:
            return frozenset()
        libraries = (self.library, *self._libraries.values())
        keys = {library.key(one) for library in libraries for one in library.variants(gone, isolated=True)}
        return frozenset(keys.difference(self.used))

    @cached_property
    def _libraries(self) -> dict[str, ChunkLibrary]:
        """Of the other corpora, and of the one without a name though it may have no documents: it may have learned texts."""
        mine = self.library
        names = {"", *self.indexes}.difference((mine.corpus,))
        return {name: ChunkLibrary(mine.decoder, mine.store, mine.prefix, corpus=name) for name in names}


@dataclass(frozen=True)
class CorpusChange:
    """Chunks that a corpus is to hold, before anything is written.

    library: the corpus's caches before. ids: token ids of the chunks, each once. gone: those that the corpus holds now and is
    not to hold any more. began: what all who share the store had then, see `Sharing.begun_with`.
    """

    corpus: Corpus
    library: ChunkLibrary
    chunks: tuple[Chunk, ...]
    ids: tuple[Tokens, ...]
    gone: tuple[Tokens, ...]
    began: bytes | None = None

    def forget(self) -> None:
        """Remove the caches of what is gone. Raises `StoreError` when the store cannot be written."""
        for key in self.spare:
            self.library.store.delete(key)

    @cached_property
    def spare(self) -> frozenset[ChunkKey]:
        """The caches of what is gone, but for those that other corpora use."""
        return self._others.spare(self.gone)

    def keep(self) -> Collection[ChunkKey]:
        """The caches that other corpora use."""
        return self._others.used

    @cached_property
    def _others(self) -> OtherCorpora:
        return OtherCorpora(self.library, self.corpus.template, self.corpus.others)


class Prepared(NamedTuple):
    """A corpus whose index holds what it is to hold. variants: the caches that it should have; missing: those to compute."""

    library: ChunkLibrary
    variants: list[Variant]
    missing: list[Variant]
    update: IndexUpdate


def plan(
    corpus: Corpus,
    documents: Sequence[Document],
    *,
    stays: Callable[[str], bool] | None = None,
    unread: Callable[[str], bool] | None = None,
    progress: Progress = no_progress,
) -> CorpusChange:
    """A corpus of these documents, and of those that it held under other ids as far as they stay.

    stays: told the id of a document; without it none do, but what is `unread`: that is there, and could not be read now.
    Raises `RetrievalError` when documents cannot be divided, or when some are to stay and the index cannot be read.
    """
    began = begun_with(corpus.index_dir, corpus.store)
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


def prepare(change: CorpusChange, *, quick: bool = False, progress: Progress = no_progress) -> Prepared:
    """Bring the index up to date, decide on the surrogate context, and see which caches are missing.

    From here on the chunks can be retrieved, by all who share the store. quick: see `precompute`. Raises `RetrievalError` when
    the index cannot be written, `StoreError` when the store cannot.
    """
    update = write_index(change, progress)
    library = decide(change, quick=quick)
    variants = library.quickest(change.ids) if quick else library.variants(change.ids)
    lacking = library.lacking(variants)
    restored = library.restored(lacking)
    return Prepared(library, variants, [one for one in lacking if one not in restored], update)


def write_index(change: CorpusChange, progress: Progress = no_progress) -> IndexUpdate:
    """Have the index hold the chunks that the corpus is to hold, for all who share the store.

    Raises `RetrievalError` when it cannot be written, `StoreError` when the store cannot, or another machine has changed it.
    """
    update = update_index(change.corpus.index_dir, change.chunks, change.corpus.embedder, progress)
    publish_index(change.corpus.index_dir, change.corpus.store, change.began)
    return update


def decide(change: CorpusChange, *, quick: bool = False) -> ChunkLibrary:
    """The corpus's caches behind the surrogate context that is decided on now, or was before; quick: see `precompute`.

    Raises `StoreError` when the store cannot be written.
    """
    corpus, library = change.corpus, change.library
    space = library.isolated.identity.namespace
    corpus.store.describe(space, {**corpus.store.namespaces().get(space, {}), **library.words(contextual=False)})
    if not quick:
        library = in_copies(_with_surrogate(library, change), one=corpus.config.one_copy)
    if library.contextual:
        corpus.store.describe(library.contextual.identity.namespace, library.words(contextual=True))
    write_sources(corpus.store, corpus.config.name, space, _sources(library, change))
    return library


def _sources(library: ChunkLibrary, change: CorpusChange) -> dict[str, dict[str, str]]:
    """Which document each cache is of, by namespaces; of several with the same chunk one."""
    documents = {change.corpus.token_ids(chunk): chunk.document_id for chunk in change.chunks}
    found: dict[str, dict[str, str]] = {library.isolated.identity.namespace: {}}
    for one in library.variants(change.ids, isolated=True):
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
    """The documents divided, each on its own: none depends on another."""
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
    """What the index holds before it is replaced. One that cannot be read holds nothing, unless it is required."""
    try:
        return ChunkIndex.load(index_dir).chunks
    except IndexMissingError:
        return ()
    except RetrievalError:
        if required:
            raise
        return ()
