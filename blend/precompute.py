"""Documents -> chunks -> index and chunk caches: incremental, and resumable after a stop at any point.

The index is replaced first and the caches follow one by one, so a stop leaves an index whose missing caches are recomputed on
use, and a next run that computes only those.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blend.chunks.encode import leave_probe
from blend.chunks.surrogate import remove_spare
from blend.chunks.work import close
from blend.config import CorpusConfig
from blend.indexing import Corpus, CorpusChange, plan, prepare
from blend.prompt import PromptTemplate
from blend.store.base import ChunkStore
from blend.timing import Progress, no_progress
from blend_retrieval import LoadedDocuments, SkippedDocument

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.decoder import Decoder
    from blend_retrieval import Embedder


LEAST_TOKENS = 4_000  # of a run whose rate means anything
RATE = "tokens_per_s"  # what a namespace's description calls it: tokens of isolated and contextual caches together


@dataclass(frozen=True)
class Precomputed:
    """What a run did.

    documents, chunks: in the corpus now. added, removed: chunks that are new to the index, and gone from it. computed,
    reused: caches computed now, and found stored; most chunks have two, isolated and contextual, unless one copy is kept.
    evicted: caches of the corpus that the store's budget has no room for. tokens, seconds: of the forward passes and the
    writing of their caches. skipped: documents that could not be read, with the reason. unread: documents of before that are
    among them, and stay as they were. rebuilt: why an index that was there could not be built upon, or empty.
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


def note_rate(library: ChunkLibrary, tokens: int, seconds: float) -> None:
    """Say beside the caches how fast they were computed and stored, for `blend plan`; a short run says nothing."""
    if tokens < LEAST_TOKENS or seconds <= 0:
        return
    space = library.isolated.identity.namespace
    words = library.store.namespaces().get(space, {})
    library.store.describe(space, {**words, RATE: f"{tokens / seconds:.1f}"})


def planned(corpus: Corpus, loaded: LoadedDocuments, *, add: bool, progress: Progress = no_progress) -> CorpusChange:
    """See `plan`: of the documents of before all stay with `add`, else those that are there and could not be read."""
    stays = (lambda document: True) if add else None
    return plan(corpus, loaded.documents, stays=stays, unread=loaded.unread(), progress=progress)


def unread_in(change: CorpusChange, loaded: LoadedDocuments) -> int:
    """How many documents of a corpus are as they were before, because they could not be read."""
    given, unread = {document.id for document in loaded.documents}, loaded.unread()
    return sum(map(unread, {chunk.document_id for chunk in change.chunks} - given))


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

    A document that it held and that is there, but could not be read this time, stays as it was.

    others: name and index directory of the store's other corpora: caches that they use as well are not removed.
    quick: only one cache a chunk, the isolated one where there is none; whether one copy or two are kept stays as it is. The
    next run without it computes the rest; with `config.one_copy` the isolated caches go when the contextual ones are there.

    Raises `RetrievalError` when nothing can be indexed, or when there is an index to add to that cannot be read, and
    `StoreError` when the store cannot be written.
    """
    corpus = Corpus(decoder, template, embedder, store, index_dir, config, others or {})
    change = planned(corpus, loaded, add=add, progress=progress)
    change.forget()  # before the index forgets them; only its own entries go, a report's stay
    library, variants, missing, update = prepare(change, quick=quick, progress=progress)
    begin = time.perf_counter()
    tokens = library.compute(missing, progress)
    leave_probe(store, decoder)
    seconds = time.perf_counter() - begin
    note_rate(library, tokens, seconds)
    remove_spare(library, change.ids, change.keep)
    if not quick:
        close(library)  # what several processes may have left half done is done
    return Precomputed(
        documents=len({chunk.document_id for chunk in change.chunks}),
        chunks=len(change.chunks),
        added=update.added,
        removed=update.removed,
        computed=len(missing),
        reused=len(variants) - len(missing),
        evicted=len(library.lacking(variants)),
        tokens=tokens,
        seconds=seconds,
        skipped=loaded.skipped,
        unread=unread_in(change, loaded),
        rebuilt=update.reason,
    )
