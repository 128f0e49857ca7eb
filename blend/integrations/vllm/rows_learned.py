"""Texts that came with requests, as the store keeps them: within a budget, the least recently used caches going first.

What `blend vllm` and `blend serve` mean by `--no-learn` and `--learn-budget`, where vLLM's own model blends. The book is this
stage's own: a worker that shares a store with one of those does not overwrite theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.chunks.open_library import Tokens, Variant
from blend.corpora import corpora, in_words
from blend.errors import ConfigError, StoreError
from blend.limits import check_number
from blend.model.outline import ModelOutline
from blend.plan.sizes import entry_bytes
from blend.serve.learned import LearnedCaches, removed_from
from blend.serve.limits import LEARN_BUDGET
from blend.sharing import published
from blend.store.pins import pinned
from blend.store.replica import root_of
from blend.store.sources import read_sources
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.store import ChunkStore

BOOK = "learned-rows.json"


class LearnedTexts:
    """Which caches of clients' texts may be stored in `store`, whose folder is `root`; 0 of budget_bytes allows none.

    It waits for the store: not for the engine's thread, and not for two threads at once.
    """

    def __init__(self, store: ChunkStore, root: Path, budget_bytes: int) -> None:
        self._store, self._root = store, root
        self._book = LearnedCaches(root / BOOK, budget_bytes) if budget_bytes else None

    def admitted(
        self, library: ChunkLibrary, chunks: Sequence[Tokens], queued: Callable[[], set[ChunkKey]]
    ) -> set[Variant]:
        """These chunks came with a request: those of their caches that may be stored, or stay so.

        What goes for them is removed, but for caches of a corpus and pinned ones. queued: keys of caches that are yet to be
        computed; those among them that go are not stored any more. Raises `StoreError`, before anything has changed, where
        something must go and nobody can say which caches are a corpus's.
        """
        book = self._book
        if book is None:
            return set()
        variants = {library.key(one): one for one in library.variants(chunks)}
        sizes = {key: self._bytes(library, one) for key, one in variants.items()}
        known = all(key in book for key in sizes)
        kept = self._kept() if self._exceeded(book, sizes) else frozenset()
        removed_from(self._store).allow(sizes)
        gone = book.use(sizes)
        self._forget([key for key in gone if key.digest not in kept], queued)
        if gone or not known:  # the order alone is not worth a file for every request
            book.save()
        return {one for key, one in variants.items() if key in book}

    def _exceeded(self, book: LearnedCaches, sizes: Mapping[ChunkKey, int]) -> bool:
        return book.nbytes + sum(size for key, size in sizes.items() if key not in book) > book.budget

    def _forget(self, keys: Sequence[ChunkKey], queued: Callable[[], set[ChunkKey]]) -> None:
        # Only what could still be put: a note of everything that ever went would grow for ever.
        removed_from(self._store).add(queued().intersection(keys))
        for key in keys:
            self._store.delete(key)

    def _kept(self) -> frozenset[str]:
        """Digests of the caches that stay in any case: a corpus's, and pinned ones."""
        told = read_sources(self._store)
        if told.unread:
            raise StoreError(
                f"{told.unread[0]}, the note of a corpus's caches, cannot be read: nothing more is learned"
            )
        held = set(corpora(self._root)) if root_of(self._root) is None else published(self._store)
        for name in sorted(held - told.corpora):
            raise StoreError(
                f"the store says nowhere which caches the corpus ({in_words(name)}) uses: nothing more is learned; "
                "run `blend precompute` for it again"
            )
        return frozenset(told.documents) | pinned(self._store.backend)

    def _bytes(self, library: ChunkLibrary, one: Variant) -> int:
        decoder, encoder = library.decoder, library.encoder(contextual=one.contextual)
        shapes = ModelOutline(
            name="",
            keys=tuple(layer.key_shape for layer in decoder.rotations),
            values=tuple(layer.value_shape for layer in decoder.rotations),
            row_operations=0,
            pair_operations=0,
            parameters=0,
            context=None,
        )
        start, codec = len(encoder.prefix_tokens), self._store.codec.name
        return entry_bytes(shapes, len(one.chunk), start, codec, encoder.identity.dtype)


def learn_budget(options: Mapping[str, Any]) -> int:
    """Bytes of the store for texts that clients bring; 0 keeps nothing of them. Raises `ValueError`, in one line."""
    learn, budget = options.get("learn", True), options.get("learn_budget", LEARN_BUDGET / 1e9)
    if not isinstance(learn, bool):
        raise ValueError(f"kvblend: learn is {learn!r}; give true or false")
    try:
        check_number("learn_budget", budget)
    except ConfigError as error:
        raise ValueError(f"kvblend: {error}") from None
    return round(budget * 1e9) if learn else 0
