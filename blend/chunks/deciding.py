"""What is decided once for a corpus, and remembered in its store: the surrogate context, and whether one copy is kept.

Whoever decides gets the library as the store has it afterwards; no other process decides meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from blend.chunks.library import ChunkLibrary, KeysInUse, no_keys
from blend.chunks.open_library import Tokens
from blend.chunks.surrogate import write_surrogate
from blend.errors import PromptError
from blend.store.pins import pinned

LARGEST_SHARE = 8  # one chunk in so many may be in the surrogate context: those have no contextual cache


def with_surrogate(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> ChunkLibrary:
    """With some of these chunks, `tokens` tokens at most, as the surrogate context, unless there is one already.

    The choice is remembered in the store and stays, because contextual caches are of use behind it only. Raises
    `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        if now.surrogate or not (chosen := choose(_fitting(now, chunks, tokens), tokens, len(chunks))):
            return now
        return _decide(now, chosen)


def with_given_surrogate(library: ChunkLibrary, tokens: Tokens, keep: KeysInUse = no_keys) -> ChunkLibrary:
    """With these tokens as the surrogate context; what was computed and measured behind another goes, but for `keep`.

    For text that everybody may read: what stands in a contextual cache has read the surrogate context. Raises
    `PromptError` when it is empty or leaves no room in the model's context, `StoreError` when the store cannot be written.
    """
    if not tokens:
        raise PromptError("the surrogate text is empty; give a paragraph or more")
    library.decoder.check_length(len(library.prefix) + len(tokens) + 1)
    with library.store.writing():
        now = library.reread()
        if now.surrogate == (tokens,):
            return now
        _forget_contextual(now, keep)
        return _decide(now, (tokens,))


def without_surrogate(library: ChunkLibrary, keep: KeysInUse = no_keys) -> ChunkLibrary:
    """With none, and what was computed and measured behind one removed, but for `keep`.

    Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        _forget_contextual(now, keep)
        return _decide(now, ())


def in_copies(library: ChunkLibrary, *, one: bool) -> ChunkLibrary:
    """Kept in one copy or in two, which the store remembers; without a surrogate context there is one anyway.

    Nothing is removed yet: see `remove_spare`. Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        if not now.surrogate or now.one_copy == one:
            return now
        write_surrogate(now.store, now.isolated.identity.surrogate_name, now.surrogate, one_copy=one)
        return now.reread()


def remove_spare(library: ChunkLibrary, chunks: Sequence[Tokens], keep: KeysInUse = no_keys) -> None:
    """Of a corpus in one copy, remove isolated caches where the contextual ones are there, but for `keep` and pinned ones."""
    variants = [one for one in library.variants(chunks) if one.contextual] if library.one_copy else []
    kept, pins = (keep(), pinned(library.store.backend)) if variants else ((), frozenset[str]())
    for one in variants:
        spare = library.key(one._replace(contextual=False))
        if spare not in kept and spare.digest not in pins and library.key(one) in library.store:
            library.store.delete(spare)


def _forget_contextual(library: ChunkLibrary, keep: KeysInUse) -> None:
    """What was computed and measured behind the surrogate context, and the words for it unless other corpora have it too."""
    if library.contextual is None:
        return
    store, namespace = library.store, library.contextual.identity.namespace
    store.prune(keep(), namespace)
    for first in (False, True):
        name = library.correction_name(contextual=True, first=first)
        if name is not None:
            store.delete_artifact(name)
    if not any(store.keys(namespace)):
        store.undescribe(namespace)


def _decide(library: ChunkLibrary, chosen: tuple[Tokens, ...]) -> ChunkLibrary:
    write_surrogate(
        library.store, library.isolated.identity.surrogate_name, chosen, one_copy=library.one_copy and bool(chosen)
    )
    return library.reread()


def _fitting(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> list[Tokens]:
    """Different chunks of which any behind the surrogate context still fits the model."""
    longest, context = max(map(len, chunks), default=0), library.decoder.context_length
    room = tokens if context is None else min(tokens, context - len(library.prefix) - longest)
    return [chunk for chunk in dict.fromkeys(chunks) if 0 < len(chunk) <= room]


def choose(chunks: Sequence[Tokens], tokens: int, corpus: int) -> tuple[Tokens, ...]:
    """Chunks in random order, the same for the same ones, as many as `tokens` and the size of the corpus allow."""
    chosen: list[Tokens] = []
    for chunk in random.Random(0).sample(chunks, len(chunks)):
        if sum(map(len, chosen)) + len(chunk) <= tokens and len(chosen) < corpus // LARGEST_SHARE:
            chosen.append(chunk)
    return tuple(chosen)
