"""The surrogate context of a corpus: chosen once, stored as a small artifact, verified before use.

`with_surrogate` to `without_surrogate` change the choice while no other process writes to the store, and return the library as
the store has it afterwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import EntryDamagedError, PromptError

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary, Tokens
    from blend.store.base import ChunkStore
    from blend.types import ChunkKey

LARGEST_SHARE = 8  # one chunk in so many may be in the surrogate context: those have no contextual cache


KeysInUse = Callable[[], "Collection[ChunkKey]"]
"""Says which caches others use, which must not be removed; called only when something is to go."""


def no_keys() -> Collection[ChunkKey]:
    """Nobody else uses anything."""
    return ()


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


def with_surrogate_anew(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> ChunkLibrary:
    """With some of these chunks as the surrogate context in place of the one that there is, if they make another.

    What was computed and measured behind the old one is removed. For a corpus of which much more is known than when it was
    decided. Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        chosen = choose(_fitting(now, chunks, tokens), tokens, len(chunks))
        if not chosen or chosen == now.surrogate:
            return now
        _forget_contextual(now, no_keys)
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


def _forget_contextual(library: ChunkLibrary, keep: KeysInUse) -> None:
    """What was computed and measured behind the surrogate context, and the words for it unless other corpora have it too."""
    if library.contextual is None:
        return
    store, namespace = library.store, library.contextual.identity.namespace
    store.prune(keep(), namespace)
    store.delete_artifact(library.contextual.identity.correction_name)
    if not any(store.keys(namespace)):
        store.undescribe(namespace)


def _decide(library: ChunkLibrary, chosen: tuple[Tokens, ...]) -> ChunkLibrary:
    write_surrogate(library.store, library.isolated.identity.surrogate_name, chosen)
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


class StoredSurrogate(NamedTuple):
    """decided: whether the store holds a choice, of none too. chunks: their token ids. problems: why one is not used."""

    decided: bool
    chunks: tuple[Tokens, ...] = ()
    problems: tuple[str, ...] = ()


def read_surrogate(store: ChunkStore, name: str, vocabulary: int) -> StoredSurrogate:
    """The surrogate context under this name; one that is damaged, or has ids of `vocabulary` and beyond, counts as absent."""
    try:
        content = store.read_artifact(name)
        if content is None:
            return StoredSurrogate(decided=False)
        return StoredSurrogate(True, _parsed(content, vocabulary))
    except (EntryDamagedError, ValueError) as error:
        return StoredSurrogate(False, (), (f"the surrogate context cannot be used: {error}",))


def write_surrogate(store: ChunkStore, name: str, chunks: Sequence[Tokens]) -> None:
    """Keep this choice under this name. Raises `StoreError` when the store cannot be written."""
    store.write_artifact(name, json.dumps({"chunks": chunks}).encode())


def _parsed(content: bytes, vocabulary: int) -> tuple[Tokens, ...]:
    try:
        chunks = tuple(tuple(chunk) for chunk in json.loads(content)["chunks"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is no list of chunks") from None
    if not all(chunk and all(type(t) is int and 0 <= t < vocabulary for t in chunk) for chunk in chunks):
        raise ValueError(f"it has tokens that a vocabulary of {vocabulary} does not")
    return chunks
