"""Caches of chunks computed in small pieces, so that answers go on meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.model.rows import Resume, RowRequest, Steps
from blend.serve.beside import Beside, Stepper
from blend.serve.corpus_caches import OnDone
from blend.serve.learned import removed_from
from blend.store.archive import verify_entry
from blend.store.names import cache_name

if TYPE_CHECKING:
    import torch

    from blend.blender import Blender
    from blend.chunks.library import ChunkLibrary
    from blend.chunks.open_library import Variant
    from blend.store.base import ChunkStore
    from blend.types import ChunkKey, PromptLayout

MOST_LACKING = 512  # caches that prompts lacked; of more the next prompts remind
Lacking = Callable[[], "tuple[ChunkLibrary, Sequence[Variant]]"]
"""What the store lacked for a prompt; it may have to ask the store for that."""


def lacking(
    blender: Blender, layout: PromptLayout, missing: Sequence[Variant]
) -> tuple[ChunkLibrary, Sequence[Variant]]:
    """These caches of a prompt; if none are named, all that the store lacks now."""
    library = blender.library(layout.kept_behind)
    return library, missing or library.missing([chunk for chunk in layout.stored if chunk is not None])


def nobody_waits(variant: Variant, error: Exception | None) -> None:
    """Of what is computed for later prompts nobody wants to be told."""


class Encoding:
    """Caches that are to be computed and stored one after another, but for what the store has by then and what was removed.

    Only the engine's thread runs it, and what waits for the store runs beside; on_done is called in either. `cancel`, `len`,
    how many are left, and `keys` are for everybody. begun: see `RemovedKeys.unless_removed`.
    """

    def __init__(
        self,
        library: ChunkLibrary,
        variants: Sequence[Variant],
        most_rows: int,
        on_done: OnDone,
        beside: Beside,
        begun: float = inf,
    ) -> None:
        self._begun = begun
        self._library, self._left, self._most_rows, self._on_done = library, deque(variants), most_rows, on_done
        self._stepper = Stepper(self._steps(), beside)
        self._piece: RowRequest | None = None
        self._cancelled = False

    def __len__(self) -> int:
        return 0 if self._cancelled else len(self._left)

    def keys(self, store: ChunkStore) -> set[ChunkKey]:
        """Where this store is to keep those that are left."""
        return set(map(self._library.key, tuple(self._left))) if store is self._library.store else set()

    def cancel(self) -> None:
        """Compute no more of them."""
        self._cancelled = True

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._cancelled or not self._left

    def ready(self) -> bool:
        """Whether there are rows to run, which are made ready: not while the store is waited for, nor where nothing is left."""
        self._piece = None if self.done else self._stepper.rows()
        return self._piece is not None

    def request(self) -> RowRequest:
        """The next rows to run."""
        assert self._piece is not None
        return self._piece

    def repeat(self, error: Exception) -> bool:
        """The same rows may run again: they write what they wrote."""
        return True

    def took(self, logits: torch.Tensor) -> None:
        """The piece was run."""
        self._stepper.took(logits)

    def fail(self, error: Exception) -> None:
        """Give up the one that is being computed."""
        self._stepper.failed(error)

    def close(self) -> None:
        """Let go of everything."""
        self.cancel()
        self._stepper.give_up()

    def abandon(self, error: Exception) -> None:
        """None of those that are left will be computed any more; nothing is under way beside by now."""
        while self._left:
            self._end(error)

    def _steps(self) -> Steps[None]:
        while not self.done:
            one = self._left[0]
            try:
                yield Resume.BESIDE
                if not self._stored(one):
                    yield Resume.HERE
                    encoder = self._library.encoder(contextual=one.contextual)
                    cache = yield from encoder.steps(one.chunk, self._most_rows)
                    yield Resume.BESIDE
                    keep = partial(self._library.keep, one, cache)
                    removed_from(self._library.store).unless_removed(self._library.key(one), self._begun, keep)
            except Exception as error:  # the store, a chunk that is too long, a pass that failed
                self._end(error)
            else:
                self._end(None)

    def _stored(self, variant: Variant) -> bool:
        """Whether the store has it by now, every byte of it: damage behind a header is why some are to be computed again."""
        library = self._library
        return not library.lacking([variant]) and not verify_entry(library.store, cache_name(library.key(variant)))

    def _end(self, error: Exception | None) -> None:
        done = self._left.popleft()
        with suppress(Exception):  # whoever listens must not harm the engine
            self._on_done(done, error)


class Encodings:
    """The caches that an engine is to compute, in the order in which they were called for. Threads may share it.

    beside: where the store is waited for, in one thread: an engine has one of them under way. most_rows: of a piece.
    on_remembered: told of each that a prompt lacked.
    """

    def __init__(self, beside: Beside, most_rows: int, on_remembered: OnDone = nobody_waits) -> None:
        self._beside, self._most_rows, self._on_remembered = beside, most_rows, on_remembered
        self._lock = threading.Lock()
        self._queue: deque[Encoding] = deque()
        self._asking = 0
        self._closed = False

    def __len__(self) -> int:
        """How many caches are left, as far as that is known."""
        with self._lock:
            return self._asking + sum(map(len, self._queue))

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, library: ChunkLibrary, variants: Sequence[Variant], on_done: OnDone, begun: float = inf) -> Encoding:
        """Have these computed. begun: of the prompt that lacked them; who looks after removals itself gives none."""
        encoding = Encoding(library, variants, self._most_rows, on_done, self._beside, begun)
        with self._lock:
            if self._closed:
                encoding.cancel()
            else:
                self._queue.append(encoding)
        return encoding

    def keys(self, store: ChunkStore) -> set[ChunkKey]:
        """Where this store is to keep those that are left."""
        found: set[ChunkKey] = set()
        with self._lock:
            return found.union(*(one.keys(store) for one in self._queue))

    def remember(self, lacking: Lacking, begun: float | None = None) -> None:
        """Have those computed that a prompt lacked and nobody has called for yet; while the store is out of reach, none.

        begun: when the prompt was put together, by `time.monotonic`; now, where it is not given.
        """
        with self._lock:
            self._asking += 1
        self._beside.start(partial(self._remember, lacking, monotonic() if begun is None else begun))

    def _remember(self, lacking: Lacking, begun: float) -> None:
        try:
            with suppress(StoreError):
                library, missing = lacking()
                queued = self.keys(library.store)
                with self._lock:
                    room = sum(map(len, self._queue)) < MOST_LACKING
                new = [one for one in missing if library.key(one) not in queued]
                if new and room:
                    self.add(library, new, self._on_remembered, begun)
        finally:
            with self._lock:
                self._asking -= 1

    def first(self) -> Encoding | None:
        """The first that is not done."""
        with self._lock:
            gone = list[Encoding]()
            while self._queue and self._queue[0].done:
                gone.append(self._queue.popleft())
            first = self._queue[0] if self._queue else None
        for one in gone:
            one.close()
        return first

    def close(self) -> list[Encoding]:
        """Compute no more of them; those that were not done."""
        with self._lock:
            self._closed = True
            queue, self._queue = self._queue, deque()
        left = [one for one in queue if not one.done]
        for one in queue:
            one.close()
        return left
