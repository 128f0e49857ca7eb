"""Background work of the engine: I/O that may wait for a store, and chunk caches that are computed in small pieces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

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
    from blend.types import CacheKey, ChunkKey

_Result = TypeVar("_Result")
MOST_MISSING = 512  # caches queued because prompts missed them, and prompts to look at; later prompts queue the rest
OnDone = Callable[["CacheKey", Exception | None], None]
"""Called for each cache when it is stored, or with the error."""
FindMissing = Callable[[], "tuple[ChunkLibrary, Sequence[CacheKey]]"]
"""Finds the caches that the store lacked for a prompt; it may have to ask the store."""


class IOPool:
    """Threads for calls that may wait for a store, first come, first served. wake: called after each."""

    def __init__(
        self,
        name: str,
        threads: int,
        wake: Callable[[], None],
    ) -> None:
        self._wake = wake
        self._executor = ThreadPoolExecutor(threads, name, initializer=use_one_thread)  # the cores are the engine's
        ready = threading.Barrier(threads + 1)
        try:
            for _ in range(threads):  # all threads start now: a later failure would leave a prompt waiting
                self._executor.submit(ready.wait)
        except RuntimeError:
            ready.abort()
            self._executor.shutdown()
            raise
        ready.wait(60)

    def start(self, call: Callable[[], None]) -> None:
        """Run this in the pool. Any thread may call it."""
        self._executor.submit(self._run, call)

    def close(self) -> None:
        """Finish the started calls, and end the threads."""
        self._executor.shutdown()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                call()
        except BaseException as error:  # the next call belongs to another prompt
            log_error(error, "")
        self._wake()


class Stepper(Generic[_Result]):
    """Drives `Steps`, in the engine's thread and in the pool. Only the engine's thread calls it.

    busy: a thread of the pool runs the steps. ended: nothing is left to do. result: of the steps, once they have ended.
    """

    def __init__(self, steps: Steps[_Result], io: IOPool) -> None:
        self._steps = steps
        self._io = io
        self._next: RowRequest | Resume = Resume.ENGINE
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self.busy = self.ended = False
        self.result: _Result | None = None

    def rows(self) -> RowRequest | None:
        """Advance until the next I/O wait, running at most one turn; the rows to run, or None if there are none yet.

        Raises what the steps raise, in the pool too.
        """
        turns = 1
        while not (self.busy or self.ended):
            if self._error is not None:
                self.ended = True
                raise self._error
            if isinstance(self._next, RowRequest):
                return self._next
            if self._next is Resume.BACKGROUND:
                self._start(partial(next, self._steps))
            elif self._next is Resume.ENGINE or turns:
                turns -= self._next is Resume.NEXT_TURN
                self._resume(partial(next, self._steps))
            else:
                return None
        return None

    def took(self, logits: torch.Tensor) -> None:
        """Give the steps the logits of the rows. Raises what the steps raise."""
        self._resume(partial(self._steps.send, logits))

    def failed(self, error: Exception) -> None:
        """Give the steps the error of their rows, in the pool, because closing files may take a while."""
        if not self.ended:
            self._start(partial(self._steps.throw, error))

    def give_up(self) -> None:
        """Stop and free everything; it is busy until that is done."""
        with self._lock:
            if self._given_up or self.ended:
                return
            self._given_up = True
            if self.busy:
                return
            self.busy = True
        self._io.start(self._close)

    def _resume(self, call: Callable[[], RowRequest | Resume]) -> None:
        try:
            self._advance(call)
        except BaseException:
            self.ended = True
            raise

    def _advance(self, call: Callable[[], RowRequest | Resume]) -> None:
        try:
            self._next = call()
        except StopIteration as end:
            self.result = end.value
            self.ended = True

    def _start(self, call: Callable[[], RowRequest | Resume]) -> None:
        self.busy = True
        self._io.start(partial(self._run_in_pool, call))

    def _run_in_pool(self, call: Callable[[], RowRequest | Resume]) -> None:
        try:
            if not self._given_up:
                self._advance(call)
            while self._next is Resume.BACKGROUND and not (self.ended or self._given_up):
                self._advance(partial(next, self._steps))
        except BaseException as error:  # raised in the engine's thread as an `Exception`, which ends one prompt only
            self._error = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} in a store")
        with self._lock:
            self.busy = given_up = self._given_up  # from here on, `give_up` closes the steps itself
        if given_up:
            self._close()

    def _close(self) -> None:
        try:
            self._steps.close()
        except Exception as error:  # an entry that cannot be closed harms no prompt
            log_error(error, "")
        self._error = None
        self._next = Resume.ENGINE
        self.ended = True
        self.busy = False


def ignore(variant: CacheKey, error: Exception | None) -> None:
    """A listener that does nothing."""


@dataclass(eq=False)
class EncodingTask:
    """Caches to compute and store. Any thread may `cancel` it.

    begun: see `RemovedKeys.unless_removed`. ended: set when all are stored or failed, or it was cancelled.
    """

    library: ChunkLibrary
    remaining: deque[CacheKey]
    on_done: OnDone
    begun: float
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if not self.remaining:
            self.ended.set()

    def __len__(self) -> int:
        return 0 if self.ended.is_set() else len(self.remaining)

    def cancel(self) -> None:
        """Compute no more of them."""
        self.ended.set()

    def end_first(self, error: Exception | None) -> None:
        """Report that the first remaining cache is stored, or has failed."""
        variant = self.remaining.popleft()
        with suppress(Exception):  # a broken listener must not harm the engine
            self.on_done(variant, error)
        if not self.remaining:
            self.ended.set()


Compute = Callable[["ChunkLibrary", Sequence["CacheKey"], OnDone], EncodingTask]
"""Computes and stores caches that were not removed, in any thread."""


class EncodingQueue:
    """Computes and stores caches one after another, unless they are stored or removed by then. Stores take turns.

    Any thread may add and count them. The engine's thread runs them, as a `scheduler.BatchItem`.

    Args:
        io: a pool of one thread.
        most_rows: most rows of a piece.
        on_remembered: called for each cache that a prompt missed.

    """

    def __init__(self, io: IOPool, most_rows: int, on_remembered: OnDone = ignore) -> None:
        self._io = io
        self._most_rows = most_rows
        self._on_remembered = on_remembered
        self._lock = threading.Lock()
        self._tasks: TurnQueue[ChunkStore, EncodingTask] = TurnQueue()  # without the running one
        self._asking = 0
        self._closed = False
        self._running: tuple[EncodingTask, Stepper[None]] | None = None
        self._piece: RowRequest | None = None

    def __len__(self) -> int:
        """Number of caches that are known to be left."""
        with self._lock:
            return self._asking + sum(map(len, self._unfinished))

    def __bool__(self) -> bool:
        return bool(self._tasks) or self._running is not None

    def add(
        self,
        library: ChunkLibrary,
        variants: Sequence[CacheKey],
        on_done: OnDone,
        begun: float = inf,
    ) -> EncodingTask:
        """Queue these. on_done: called in either kind of thread. begun: arrival of the prompt that missed them, if any."""
        task = EncodingTask(library, deque(variants), on_done, begun)
        with self._lock:
            if self._closed:
                task.cancel()
            else:
                self._tasks.add(library.store, task)
        return task

    def keys(self, store: ChunkStore) -> set[ChunkKey]:
        """Keys of this store that are still to be written."""
        with self._lock:
            unfinished = [
                (task.library, tuple(task.remaining)) for task in self._unfinished if task.library.store is store
            ]
        return {library.key(variant) for library, variants in unfinished for variant in variants}

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
            with suppress(StoreError):
                library, missing = find_missing()
                queued = self.keys(library.store)
                new = [variant for variant in missing if library.key(variant) not in queued]
                if new and len(queued) < MOST_MISSING:
                    self.add(library, new, self._on_remembered, begun)
        finally:
            with self._lock:
                self._asking -= 1

    def ready(self) -> bool:
        """Prepare the next rows; False if none are left or they wait for the store."""
        self._piece = None
        while self._piece is None and self._take_turn():
            self._piece = self._stepper.rows()
            if not self._stepper.ended:
                break
        return self._piece is not None

    def _take_turn(self) -> bool:
        """Go on with the running cache, or the next one of the store whose turn it is; False without one."""
        with self._lock:
            if self._running is not None:
                task, stepper = self._running
                if task and not stepper.ended:
                    return True
                stepper.give_up()
                self._running = None
                if task:
                    self._tasks.add(task.library.store, task)
            while self._running is None and (turn := self._tasks.pop()):
                _, task = turn
                if task:
                    self._running = task, Stepper(self._steps(task), self._io)
            return self._running is not None

    @property
    def _stepper(self) -> Stepper[None]:
        """Drives the running cache."""
        assert self._running is not None
        return self._running[1]

    @property
    def _unfinished(self) -> list[EncodingTask]:
        running = [self._running[0]] if self._running is not None else []
        return [task for task in (*running, *self._tasks) if task]

    def close(self) -> list[EncodingTask]:
        """Compute no more; returns the unfinished tasks."""
        with self._lock:
            self._closed = True
            tasks = self._unfinished
            self._tasks.clear()
        for task in tasks:
            task.cancel()
        if self._running is not None:
            self._stepper.give_up()
        return tasks

    def next_rows(self) -> RowRequest:
        """The rows of the next pass."""
        assert self._piece is not None
        return self._piece

    def retry(self, error: Exception) -> bool:
        """Always True: the same rows write the same KV again."""
        return True

    def took(self, logits: torch.Tensor) -> None:
        """The rows were run."""
        self._stepper.took(logits)

    def fail(self, error: Exception) -> None:
        """Give up the cache that is being computed."""
        self._stepper.failed(error)

    def _steps(self, task: EncodingTask) -> Steps[None]:
        """Compute and store the first cache that is left."""
        library = task.library
        variant = task.remaining[0]
        try:
            yield Resume.BACKGROUND
            if not _is_stored(library, variant):
                yield Resume.ENGINE
                encoder = library.encoder(variant.kind)
                cache = yield from encoder.steps(variant.chunk, self._most_rows)
                yield Resume.BACKGROUND
                keep = partial(library.keep, variant, cache)
                removed_from(library.store).unless_removed(library.key(variant), task.begun, keep)
        except Exception as error:  # the store, a chunk that is too long, a pass that failed
            task.end_first(error)
        else:
            task.end_first(None)


def _is_stored(library: ChunkLibrary, variant: CacheKey) -> bool:
    """Whether the store has every byte of it; a damaged entry is computed again."""
    return not library.missing_of([variant]) and not verify_entry(library.store, cache_name(library.key(variant)))
