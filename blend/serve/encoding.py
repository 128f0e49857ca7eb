"""Caches of chunks computed in small pieces, so that answers go on meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from blend.model.rows import RowRequest, Steps
from blend.serve.caching import OnDone
from blend.serve.removed import removed_from
from blend.store.archive import verify_entry
from blend.store.names import cache_name

if TYPE_CHECKING:
    import torch

    from blend.chunks.library import ChunkLibrary
    from blend.chunks.open_library import Variant
    from blend.types import ChunkCache


def nobody_waits(wanted: Variant, error: Exception | None) -> None:
    """Of what is computed for later prompts nobody wants to be told."""


class Encoding:
    """Caches that are to be computed and stored one after another, but for what the store has by then and what was removed.

    Only the engine's thread runs it; `cancel` and `len`, how many are left, are for everybody.
    """

    def __init__(self, library: ChunkLibrary, wanted: Sequence[Variant], most_rows: int, on_done: OnDone) -> None:
        self._library, self._left, self._most_rows, self._on_done = library, deque(wanted), most_rows, on_done
        self._steps: Steps[ChunkCache] | None = None
        self._piece: RowRequest | None = None
        self._cancelled = False

    def __len__(self) -> int:
        return 0 if self._cancelled else len(self._left)

    def cancel(self) -> None:
        """Compute no more of them."""
        self._cancelled = True

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._cancelled or not self._left

    def ready(self) -> bool:
        """Whether there are rows to run; they are made ready."""
        while not self.done and self._piece is None:
            try:
                self._begin()
            except Exception as error:  # the store, or a chunk that is too long
                self.fail(error)
        return not self.done

    def request(self) -> RowRequest:
        """The next rows to run."""
        assert self._piece is not None
        return self._piece

    def repeat(self, error: Exception) -> None:
        """The same rows may run again: they write what they wrote."""

    def _begin(self) -> None:
        wanted = self._left[0]
        if self._stored(wanted):
            self._end(None)
            return
        self._steps = self._library.encoder(contextual=wanted.contextual).steps(wanted.chunk, self._most_rows)
        self._piece = next(self._steps)

    def _stored(self, wanted: Variant) -> bool:
        """Whether the store has it by now, every byte of it: damage behind a header is why some are to be computed again."""
        library = self._library
        return not library.lacking([wanted]) and not verify_entry(library.store, cache_name(library.key(wanted)))

    def took(self, logits: torch.Tensor) -> None:
        """The piece was run."""
        assert self._steps is not None
        try:
            try:
                self._piece = self._steps.send(logits)
            except StopIteration as finished:
                self._keep(finished.value)
                self._end(None)
        except Exception as error:  # memory that ran out, the store
            self.fail(error)

    def _keep(self, cache: ChunkCache) -> None:
        library, one = self._library, self._left[0]
        keep = partial(library.keep, one, cache)
        removed_from(library.store).unless_removed(library.key(one), keep)

    def fail(self, error: Exception) -> None:
        """Give up the one that is being computed."""
        self._end(error)

    def close(self) -> None:
        """Let go of everything."""
        if self._steps is not None:
            self._steps.close()

    def abandon(self, error: Exception) -> None:
        """None of those that are left will be computed any more."""
        while not self.done:
            self.fail(error)

    def _end(self, error: Exception | None) -> None:
        self._piece = self._steps = None
        done = self._left.popleft()
        with suppress(Exception):  # whoever listens must not harm the engine
            self._on_done(done, error)
