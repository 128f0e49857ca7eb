"""Background work of the engine: I/O that may wait for a store, and chunk caches that are computed in small pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from blend.errors import StoreError
from blend.model.cpu import use_one_thread
from blend.model.passes import Resume, RowRequest, Steps
from blend.serve.failures import log_error
from blend.serve.removed import removed_from
from blend.serve.turns import TurnQueue
from blend.store.admin import verify_entry
from blend.store.backend import cache_name

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.store.base import ChunkStore
    from blend.types import CacheKey

_Result = TypeVar("_Result")
MOST_MISSING = 512  # caches queued because prompts missed them, and prompts to look at; later prompts queue the rest
TURN = 4  # while answers run, one pass in so many computes a piece of a chunk's cache
# The same while prompts are prefilled. Without it a server with a full queue would compute lost caches in every prompt,
# never store them, and slow down with each cache that it loses.
TURN_AMONG_PROMPTS = 8
OnDone = Callable[["CacheKey", Exception | None], None]
"""Called for each cache when it is stored, or with the error."""
FindMissing = Callable[[], "tuple[ChunkLibrary, Sequence[CacheKey]]"]
"""Finds the caches that the store lacked for a prompt; it may have to ask the store."""
Compute = Callable[["ChunkLibrary", Sequence["CacheKey"], OnDone], None]
"""Computes and stores caches that were not removed, in any thread."""


class IOPool:
    """Threads for calls that may wait for a store, first come, first served. wake: called after each."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._executor = ThreadPoolExecutor(threads, name, initializer=use_one_thread)  # the cores are the engine's

    def start(self, call: Callable[[], None]) -> Future[None]:
        """Run this in the pool. Any thread may call it."""
        future = self._executor.submit(torch.inference_mode()(call))
        future.add_done_callback(lambda _: self.wake())
        return future

    def close(self) -> None:
        """Finish the started calls, and end the threads."""
        self._executor.shutdown()


class Stepper(Generic[_Result]):
    """Drives `Steps`, in the engine's thread and in the pool. Only the engine's thread calls it.

    ended: nothing is left to do. result: of the steps, once they have ended.
    """

    def __init__(self, steps: Steps[_Result], io: IOPool) -> None:
        self._steps = steps
        self._io = io
        self._next: RowRequest | Resume = Resume.ENGINE
        self._call: Future[None] | None = None  # in the pool
        self._closing = False
        self.ended = False
        self.result: _Result | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread of the pool runs the steps."""
        return self._closing or (self._call is not None and not self._call.done())

    def rows(self) -> RowRequest | None:
        """Advance until the next I/O wait, running at most one turn; the rows to run, or None if there are none yet.

        Raises what the steps raise, in the pool too.
        """
        may_run = True
        while not self.busy:
            if self._call is not None:
                call = self._call
                self._call = None
                call.result()
            if self.ended:
                return None
            if isinstance(self._next, RowRequest):
                return self._next
            if self._next is Resume.BACKGROUND:
                self._start(partial(next, self._steps))
            elif self._next is Resume.ENGINE or may_run:
                may_run = may_run and self._next is Resume.ENGINE
                self._advance(partial(next, self._steps))
            else:
                return None
        return None

    def took(self, logits: torch.Tensor) -> None:
        """Give the steps the logits of the rows. Raises what the steps raise."""
        self._advance(partial(self._steps.send, logits))

    def failed(self, error: Exception) -> None:
        """Give the steps the error of their rows, in the pool, because closing files may take a while."""
        if not self.ended:
            self._start(partial(self._steps.throw, error))

    def give_up(self) -> None:
        """Stop and free everything, in the pool, because closing files may take a while; it is busy until that is done."""
        if not (self.ended or self._closing):
            call = self._call if self._call is not None and self.busy else self._io.start(lambda: None)
            self._closing = True
            call.add_done_callback(self._close)

    def _advance(self, call: Callable[[], RowRequest | Resume]) -> None:
        try:
            self._next = call()
        except StopIteration as end:
            self.result = end.value
            self.ended = True
        except BaseException:
            self.ended = True
            raise

    def _start(self, call: Callable[[], RowRequest | Resume]) -> None:
        self._call = self._io.start(partial(self._advance_in_pool, call))

    def _advance_in_pool(self, call: Callable[[], RowRequest | Resume]) -> None:
        self._advance(call)
        while self._next is Resume.BACKGROUND and not (self.ended or self._closing):
            self._advance(partial(next, self._steps))

    def _close(self, call: Future[None]) -> None:
        try:
            self._steps.close()
        finally:  # an entry that cannot be closed harms no prompt
            self._call = None
            self.ended = True
            self._closing = False
            self._io.wake()


def ignore(variant: CacheKey, error: Exception | None) -> None:
    """A listener that does nothing."""


class Encoding(NamedTuple):
    """A cache to compute and store. begun: see `RemovedKeys.unless_removed`."""

    library: ChunkLibrary
    variant: CacheKey
    on_done: OnDone
    begun: float

    @property
    def rows(self) -> int:
        """Rows that it takes while it is computed: of the chunk, and of what stands in front of it."""
        return self.library.start(self.variant) + len(self.variant.chunk)

    def report(self, error: Exception | None) -> None:
        """It is stored, or has failed."""
        with suppress(Exception):  # a broken listener must not harm the engine
            self.on_done(self.variant, error)


class EncodingQueue:
    """Computes and stores caches one after another, unless they are stored or removed by then. Stores take turns.

    Any thread may add and count them. The engine's thread runs them, as a `scheduler.BatchItem`.

    Args:
        io: a pool of one thread.
        most_rows: most rows of a piece.
        on_remembered: called for each cache that a prompt missed.
        fits: whether a cache may be begun that takes so many rows while it is computed.

    """

    def __init__(
        self,
        io: IOPool,
        most_rows: int,
        on_remembered: OnDone = ignore,
        fits: Callable[[int], bool] = lambda rows: True,
    ) -> None:
        self._io = io
        self._most_rows = most_rows
        self._on_remembered = on_remembered
        self._fits = fits
        self._lock = threading.Lock()
        self._waiting: TurnQueue[ChunkStore, Encoding] = TurnQueue()
        self._running: tuple[Encoding, Stepper[None]] | None = None
        self._asking = 0
        self._piece: RowRequest | None = None

    def __len__(self) -> int:
        """Number of caches that are known to be left, and of prompts that are still to be looked at."""
        with self._lock:
            return self._asking + len(self._left)

    @property
    def _left(self) -> list[Encoding]:
        running = [self._running[0]] if self._running is not None and not self._running[1].ended else []
        return [*running, *self._waiting]

    def add(self, library: ChunkLibrary, variants: Sequence[CacheKey], on_done: OnDone, begun: float = inf) -> None:
        """Queue these. on_done: called in either kind of thread. begun: arrival of the prompt that missed them, if any."""
        with self._lock:
            for variant in variants:
                self._waiting.add(library.store, Encoding(library, variant, on_done, begun))

    def remember(self, find_missing: FindMissing, begun: float | None = None) -> None:
        """Queue the caches that a prompt missed and that are not queued yet; none while the store is unreachable.

        begun: arrival of the prompt, by `time.monotonic`; default: now.
        """
        with self._lock:
            if self._asking >= MOST_MISSING:
                return
            self._asking += 1
        self._io.start(partial(self._remember, find_missing, monotonic() if begun is None else begun))

    def _remember(self, find_missing: FindMissing, begun: float) -> None:
        try:
            library, missing = find_missing()
            with self._lock:
                encodings = [encoding for encoding in self._left if encoding.library.store is library.store]
            queued = {encoding.library.key(encoding.variant) for encoding in encodings}
            if len(queued) < MOST_MISSING:
                new = [variant for variant in missing if library.key(variant) not in queued]
                self.add(library, new, self._on_remembered, begun)
        except StoreError:
            pass
        except Exception as error:  # only later prompts would gain
            log_error(error, "")
        finally:
            with self._lock:
                self._asking -= 1

    @property
    def rows(self) -> int:
        """Rows that the cache takes that is being computed."""
        running = self._running
        return 0 if running is None or running[1].ended else running[0].rows

    @property
    def _is_between(self) -> bool:
        """Whether no cache is being computed."""
        return self._running is None or self._running[1].ended

    def _may_begin(self) -> bool:
        """Whether the next cache may be begun. Not under the lock: who decides has one too."""
        with self._lock:
            following = next(iter(self._waiting), None)
        return following is None or self._fits(following.rows)

    def ready(self) -> bool:
        """Prepare the next rows; False if none are left, or they wait for the store or for room."""
        self._piece = None
        while self._piece is None and (stepper := self._stepper()) is not None:
            self._piece = stepper.rows()
            if not stepper.ended:
                break
        return self._piece is not None

    def _stepper(self) -> Stepper[None] | None:
        """Drives the running cache, or the next one of the store whose turn it is; None without one, or without room."""
        if self._is_between and not self._may_begin():
            return None
        with self._lock:
            if self._is_between:
                turn = self._waiting.pop()
                self._running = turn and (turn[1], Stepper(self._steps(turn[1]), self._io))
            return self._running and self._running[1]

    def close(self, error: Exception | None = None) -> None:
        """Compute no more. error: reported for each cache that is left."""
        with self._lock:
            encodings = self._left
            self._waiting.clear()
            running = self._running
        if running is not None:
            running[1].give_up()
        for encoding in encodings if error is not None else ():
            encoding.report(error)

    def next_rows(self) -> RowRequest:
        """The rows of the next pass."""
        assert self._piece is not None
        return self._piece

    def took(self, logits: torch.Tensor) -> None:
        """The rows were run."""
        assert self._running is not None
        self._running[1].took(logits)

    def fail(self, error: Exception) -> None:
        """Give up the cache that is being computed."""
        assert self._running is not None
        self._running[1].failed(error)

    def _steps(self, encoding: Encoding) -> Steps[None]:
        """Compute and store a cache."""
        library, variant, _, begun = encoding
        try:
            yield Resume.BACKGROUND
            if not _is_stored(library, variant):
                yield Resume.ENGINE
                encoder = library.encoder(variant.kind)
                cache = yield from encoder.steps(variant.chunk, self._most_rows)
                yield Resume.BACKGROUND
                keep = partial(library.keep, variant, cache)
                removed_from(library.store).unless_removed(library.key(variant), begun, keep)
        except Exception as error:  # the store, a chunk that is too long, a pass that failed
            encoding.report(error)
        else:
            encoding.report(None)


def _is_stored(library: ChunkLibrary, variant: CacheKey) -> bool:
    """Whether the store has every byte of it; a damaged entry is computed again."""
    return not library.missing_of([variant]) and not verify_entry(library.store, cache_name(library.key(variant)))
