"""Choose and change the surrogate context, behind which contextual caches are computed.

It is chosen once, stored as a small artifact, and verified before use. `with_surrogate` to `without_surrogate` change it while
no other process writes to the store, and return the library as the store has it afterwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Sequence

from blend.chunks.library import ChunkLibrary
from blend.errors import PromptError
from blend.layout import Tokens
from blend.types import ChunkKey

LARGEST_SHARE = 8  # one chunk in so many may be in the surrogate context: those have no contextual cache


KeysInUse = Callable[[], "Collection[ChunkKey]"]
"""Says which caches others use and must not be removed; called only before a removal."""


def no_keys() -> Collection[ChunkKey]:
    """No cache is used elsewhere."""
    return ()


def with_surrogate(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> ChunkLibrary:
    """Choose some of these chunks, at most `tokens` tokens, as the surrogate context, unless there is one.

    The choice stays, because contextual caches are useful only behind it. Raises `StoreError` when the store cannot be written.
    """
    with library.store.writing():
        now = library.reread()
        if now.surrogate:
            return now
        chosen = choose(_fitting(now, chunks, tokens), tokens, len(chunks))
        return _decide(now, chosen) if chosen else now


def with_given_surrogate(library: ChunkLibrary, tokens: Tokens, keep: KeysInUse = no_keys) -> ChunkLibrary:
    """Take these tokens as the surrogate context, and remove caches made behind another, except `keep`.

    Contextual caches have read the surrogate context, so it must be text that every user may read. Raises `PromptError` if it
    is empty or too long for the model, `StoreError` when the store cannot be written.
    """
    if not tokens:
        raise PromptError("the surrogate text is empty; give a paragraph or more")
    library.decoder.check_length(len(library.prefix) + len(tokens) + 1)
    return _replaced(library, (tokens,), keep)


def with_default_surrogate(library: ChunkLibrary, tokens: Tokens) -> ChunkLibrary:
    """Take these tokens as the surrogate context, unless the store holds a choice. Raises as `with_given_surrogate`."""
    library.decoder.check_length(len(library.prefix) + len(tokens) + 1)
    with library.store.writing():
        now = library.reread()
        return now if now.decided else _decide(now, (tokens,))


def without_surrogate(library: ChunkLibrary, keep: KeysInUse = no_keys) -> ChunkLibrary:
    """Have no surrogate context, and remove caches made behind one, except `keep`.

    Raises `StoreError` when the store cannot be written.
    """
    return _replaced(library, (), keep)


def _replaced(library: ChunkLibrary, chosen: tuple[Tokens, ...], keep: KeysInUse) -> ChunkLibrary:
    """The library with this surrogate context, without caches made behind another."""
    with library.store.writing():
        now = library.reread()
        if now.decided and now.surrogate == chosen:
            return now
        _forget_contextual(now, keep)
        return _decide(now, chosen)


def _forget_contextual(library: ChunkLibrary, keep: KeysInUse) -> None:
    """Remove caches made behind the surrogate context, and its description if no other corpus uses it."""
    if library.contextual is None:
        return
    store = library.store
    namespace = library.contextual.identity.namespace
    store.prune(keep(), namespace)
    store.delete_artifact(library.contextual.identity.correction_name)
    if not any(store.keys(namespace)):
        store.undescribe(namespace)


def _decide(library: ChunkLibrary, chosen: tuple[Tokens, ...]) -> ChunkLibrary:
    content = json.dumps({"chunks": chosen}).encode()
    library.store.write_artifact(library.isolated.identity.surrogate_name, content)
    return library.reread()


def _fitting(library: ChunkLibrary, chunks: Sequence[Tokens], tokens: int) -> list[Tokens]:
    """Distinct chunks that leave room for the longest chunk in the model's context."""
    longest = max(map(len, chunks), default=0)
    context = library.decoder.context_length
    room = tokens if context is None else min(tokens, context - len(library.prefix) - longest)
    return [chunk for chunk in dict.fromkeys(chunks) if 0 < len(chunk) <= room]


def choose(chunks: Sequence[Tokens], tokens: int, corpus: int) -> tuple[Tokens, ...]:
    """Chunks in random order, the same for the same ones, as many as `tokens` and the size of the corpus allow."""
    chosen: list[Tokens] = []
    room = tokens
    for chunk in random.Random(0).sample(chunks, len(chunks)):
        if len(chunk) <= room and len(chosen) < corpus // LARGEST_SHARE:
            chosen.append(chunk)
            room -= len(chunk)
    return tuple(chosen)
