"""One share of a precompute; the processes of the others may run anywhere and at any time, over the same store.

    divide the documents -> index, surrogate context: whoever comes first -> work order -> caches of this share
    -> the last one to finish: KV correction

Nothing but the store is between them. Each may be killed and started again at any moment, and started twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.encode import leave_probe
from blend.chunks.surrogate import remove_spare
from blend.chunks.work import Pass, Share, Work, close, finish, take_up, tokens_of
from blend.errors import StoreChangedError
from blend.indexing import Corpus, CorpusChange, decide, write_index
from blend.precompute import Precomputed, note_rate, planned, unread_in
from blend.sharing import begun_with
from blend.timing import Progress, no_progress
from blend_retrieval.errors import IndexBusyError

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend_retrieval import IndexUpdate, LoadedDocuments


class Computed(NamedTuple):
    """How many caches were computed and stored, and the tokens of the forward passes that it took."""

    caches: int = 0
    tokens: int = 0


Compute = Callable[[Work, list[Pass], Progress], Computed]
"""Has the passes computed and stored, as far as the store lacks any of their caches."""


@dataclass(frozen=True)
class ShareDone:
    """What one share did.

    done: `computed` and `reused` are of the share alone, and what was stored before the first one began counts as reused by the
    share of number 1; `evicted` is known to the last one.

    under_way, lacks, last: see `Finished`.
    """

    share: Share
    done: Precomputed
    under_way: bool
    lacks: tuple[int, ...]
    last: bool


def precompute_share(
    rag: Rag,
    loaded: LoadedDocuments,
    share: Share,
    *,
    add: bool = False,
    compute: Compute | None = None,
    progress: Progress = no_progress,
) -> ShareDone:
    """Compute one share of what `Rag.precompute` would; the last one to finish leaves the corpus as that leaves it.

    All shares must be given the same documents and options. compute: who runs the passes, by default this process. Raises what
    `Rag.precompute` raises.
    """
    rag.refresh()
    change = _plan(rag, loaded, add, progress)
    change.forget()
    update = _index(rag, change, progress)
    library = decide(change)
    work = take_up(library, library.variants(change.ids))
    mine, begin = work.of(share), time.perf_counter()
    computed = (compute or compute_here)(work, mine, progress)
    seconds = time.perf_counter() - begin
    if compute is None:
        note_rate(library, computed.tokens, seconds)
    found = finish(work, share)
    if found.last:
        update = update or write_index(_begun_now(change), progress)
        leave_probe(rag.store, rag.decoder)
        remove_spare(library, change.ids, change.keep)
        rag.calibrate(anew=work.mostly_new, progress=progress)
        close(library)
    rag.store.advance()
    done = Precomputed(
        documents=len({chunk.document_id for chunk in change.chunks}),
        chunks=len(change.chunks),
        added=update.added if update else 0,
        removed=update.removed if update else 0,
        computed=computed.caches,
        reused=sum(map(len, mine)) - computed.caches + (work.stored if share.number == 1 else 0),
        evicted=len(library.lacking(work.variants)) if found.last else 0,
        tokens=computed.tokens,
        seconds=seconds,
        skipped=loaded.skipped,
        unread=unread_in(change, loaded),
        rebuilt=update.reason if update else "",
    )
    return ShareDone(share, done, *found)


def compute_here(work: Work, passes: list[Pass], progress: Progress) -> Computed:
    """Run the passes one after another; progress: of the stage "encode", in tokens."""
    lacking = set(work.library.lacking([one for each in passes for one in each]))
    passes = [one for one in passes if lacking.intersection(one)]  # the rest counts neither as work nor as progress
    total, seen, done = sum(map(tokens_of, passes)), 0, Computed()
    progress("encode", 0, total)
    for one in passes:
        caches, tokens = work.library.compute_pass(one), tokens_of(one)
        done = Computed(done.caches + caches, done.tokens + (tokens if caches else 0))
        seen += tokens
        progress("encode", seen, total)
    return done


def _index(rag: Rag, change: CorpusChange, progress: Progress) -> IndexUpdate | None:
    """Write the index, or leave it to the process that is at it: the caches do not need it, and the last one looks again."""
    try:
        return write_index(change, progress)
    except IndexBusyError:
        return None
    except StoreChangedError:  # one on another machine, over the same shared store, was quicker
        rag.refresh()
        return None


def _begun_now(change: CorpusChange) -> CorpusChange:
    """In place of what another share has published meanwhile: all are given the same documents."""
    return replace(change, began=begun_with(change.corpus.index_dir, change.corpus.store))


def _plan(rag: Rag, loaded: LoadedDocuments, add: bool, progress: Progress) -> CorpusChange:
    corpus = Corpus(
        rag.decoder, rag.template, rag.embedder, rag.store, rag.index_dir, rag.corpus_config, rag.other_corpora
    )
    return planned(corpus, loaded, add=add, progress=progress)
