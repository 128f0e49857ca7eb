"""Work in the background of answers: I/O that may wait for a store, and caches of chunks that are computed in small pieces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from blend.errors import StoreError
from blend.model.cpu import use_one_thread
from blend.model.forward import Resume, RowRequest, Steps
from blend.serve.corpus_caches import OnDone
from blend.serve.failures import log_error
from blend.serve.learned import removed_from
from blend.store.admin import verify_entry
from blend.store.backend import cache_name

if TYPE_CHECKING:
    from blend.blender import Blender
    from blend.chunks.library import ChunkLibrary, Variant
    from blend.store.base import ChunkStore
    from blend.types import ChunkKey, PromptLayout

_Result = TypeVar("_Result")
MOST_MISSING = 512  # caches queued because prompts lacked them; later prompts ask again for the rest
FindMissing = Callable[[], "tuple[ChunkLibrary, Sequence[Variant]]"]
"""Finds the caches that the store lacked for a prompt; it may have to ask the store."""


class IOPool:
    """Threads for calls that may wait for a store, first come, first served. wake: called after each."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None]) -> None:
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
        """Finish what was started, and end the threads."""
        self._executor.shutdown()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                call()
        except BaseException as error:  # the next call is of another prompt
            log_error(error, "")
        self._wake()


class Stepper(Generic[_Result]):
    """Drives `Steps`, in the engine's thread and in the pool. Only the engine's thread calls it.

    busy: a thread of the pool runs the steps. ended: nothing is left to do; result: of the steps, then.
    """

    def __init__(self, steps: Steps[_Result], io: IOPool) -> None:
        self._steps, self._io = steps, io
        self._next: RowRequest | Resume = Resume.ENGINE
        self._error: Exception | None = None
        self._lock, self._given_up = threading.Lock(), False
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
                self._start(partial(self._run_in_pool, partial(next, self._steps)))
            elif self._next is Resume.ENGINE or turns:
                turns -= self._next is Resume.NEXT_TURN
                self._resume(partial(next, self._steps))
            else:
                return None
        return None

    def took(self, logits: torch.Tensor) -> None:
        """The rows were run. Raises what the steps raise."""
        self._resume(partial(self._steps.send, logits))

    def failed(self, error: Exception) -> None:
        """The rows could not be run. The steps get the error in the pool, because closing files may take a while."""
        if not self.ended:
            self._start(partial(self._run_in_pool, partial(self._steps.throw, error)))

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
            self._next = call()
        except StopIteration as done:
            self.result, self.ended = done.value, True
        except BaseException:
            self.ended = True
            raise

    def _start(self, call: Callable[[], None]) -> None:
        self.busy = True
        self._io.start(call)

    def _run_in_pool(self, call: Callable[[], RowRequest | Resume]) -> None:
        try:
            if not self._given_up:
                self._next = call()
            while self._next is Resume.BACKGROUND and not self._given_up:
                self._next = next(self._steps)
        except StopIteration as done:
            self.result, self.ended = done.value, True
        except Exception as error:  # raised in the engine's thread
            self._error = error
        except BaseException as error:
            self._error = RuntimeError(f"{type(error).__name__} in the engine's I/O pool")
        with self._lock:
            self.busy = given_up = self._given_up  # from here on, `give_up` closes the steps itself
        if given_up:
            self._close()

    def _close(self) -> None:
        try:
            self._steps.close()
        except Exception as error:  # an entry that cannot be closed harms no prompt
            log_error(error, "")
        self._error, self._next = None, Resume.ENGINE
        self.ended, self.busy = True, False


def missing_caches(
    blender: Blender, layout: PromptLayout, missing: Sequence[Variant]
) -> tuple[ChunkLibrary, Sequence[Variant]]:
    """These caches of a prompt; if none are named, all that the store lacks now."""
    library = blender.library(layout.kept_behind)
    return library, missing or library.missing([chunk for chunk in layout.stored if chunk is not None])


def _ignore(variant: Variant, error: Exception | None) -> None:
    """The listener for caches that are computed for later prompts."""


class EncodingTask:
    """Caches to compute and store, one after another, unless the store has them by then or they were removed.

    Only the engine's thread runs it; `cancel`, `len` and `keys` are for all threads. on_done: called in either kind of thread.
    begun: see `Removed.unless_removed`.
    """

    def __init__(
        self,
        library: ChunkLibrary,
        variants: Sequence[Variant],
        most_rows: int,
        on_done: OnDone,
        io: IOPool,
        begun: float = inf,
    ) -> None:
        self._library, self._left, self._most_rows = library, deque(variants), most_rows
        self._on_done, self._begun = on_done, begun
        self._stepper = Stepper(self._steps(), io)
        self._piece: RowRequest | None = None
        self._cancelled = False

    def __len__(self) -> int:
        return 0 if self._cancelled else len(self._left)

    def keys(self, store: ChunkStore) -> set[ChunkKey]:
        """Keys of this store that are still to be written."""
        return set(map(self._library.key, tuple(self._left))) if store is self._library.store else set()

    def cancel(self) -> None:
        """Compute no more of them."""
        self._cancelled = True

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._cancelled or not self._left

    def ready(self) -> bool:
        """Prepare the next rows; False if none are left or the store is waited for."""
        self._piece = None if self.done else self._stepper.rows()
        return self._piece is not None

    # Passes: see `scheduler.BatchItem`

    def next_rows(self) -> RowRequest:
        """The rows of the next pass."""
        assert self._piece is not None
        return self._piece

    def retry(self, error: Exception) -> bool:
        """Always possible: the rows write what they wrote."""
        return True

    def took(self, logits: torch.Tensor) -> None:
        """The rows were run."""
        self._stepper.took(logits)

    def fail(self, error: Exception) -> None:
        """Give up the cache that is being computed."""
        self._stepper.failed(error)

    def close(self) -> None:
        """Free everything."""
        self.cancel()
        self._stepper.give_up()

    def abandon(self, error: Exception) -> None:
        """Report all that are left as failed; the pool has ended."""
        while self._left:
            self._end(error)

    def _steps(self) -> Steps[None]:
        while not self.done:
            one = self._left[0]
            try:
                yield Resume.BACKGROUND
                if not self._stored(one):
                    yield Resume.ENGINE
                    encoder = self._library.encoder(contextual=one.contextual)
                    cache = yield from encoder.steps(one.chunk, self._most_rows)
                    yield Resume.BACKGROUND
                    keep = partial(self._library.keep, one, cache)
                    removed_from(self._library.store).unless_removed(self._library.key(one), self._begun, keep)
            except Exception as error:  # the store, a chunk that is too long, a pass that failed
                self._end(error)
            else:
                self._end(None)

    def _stored(self, variant: Variant) -> bool:
        """Whether the store has every byte of it; a damaged entry is computed again."""
        library = self._library
        return not library.missing_of([variant]) and not verify_entry(library.store, cache_name(library.key(variant)))

    def _end(self, error: Exception | None) -> None:
        done = self._left.popleft()
        with suppress(Exception):  # a broken listener must not harm the engine
            self._on_done(done, error)


class EncodingQueue:
    """The caches that an engine is to compute, in order. Threads may share it.

    io: a pool of one thread: one cache is in progress at a time. most_rows: of a piece. on_remembered: called for each cache
    that a prompt lacked.
    """

    def __init__(self, io: IOPool, most_rows: int, on_remembered: OnDone = _ignore) -> None:
        self._io, self._most_rows, self._on_remembered = io, most_rows, on_remembered
        self._lock = threading.Lock()
        self._tasks: deque[EncodingTask] = deque()
        self._asking = 0
        self._closed = False

    def __len__(self) -> int:
        """Caches that are left, as far as known."""
        with self._lock:
            return self._asking + sum(map(len, self._tasks))

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(
        self, library: ChunkLibrary, variants: Sequence[Variant], on_done: OnDone, begun: float = inf
    ) -> EncodingTask:
        """Queue these. begun: arrival of the prompt that lacked them; callers that handle removals themselves give none."""
        task = EncodingTask(library, variants, self._most_rows, on_done, self._io, begun)
        with self._lock:
            if self._closed:
                task.cancel()
            else:
                self._tasks.append(task)
        return task

    def keys(self, store: ChunkStore) -> set[ChunkKey]:
        """Keys of this store that are still to be written."""
        found: set[ChunkKey] = set()
        with self._lock:
            return found.union(*(task.keys(store) for task in self._tasks))

    def remember(self, find_missing: FindMissing, begun: float | None = None) -> None:
        """Queue the caches that a prompt lacked and that are not queued yet; none while the store is unreachable.

        begun: arrival of the prompt, by `time.monotonic`; default: now.
        """
        with self._lock:
            self._asking += 1
        self._io.start(partial(self._remember, find_missing, monotonic() if begun is None else begun))

    def _remember(self, find_missing: FindMissing, begun: float) -> None:
        try:
            with suppress(StoreError):
                library, missing = find_missing()
                queued = self.keys(library.store)
                with self._lock:
                    room = sum(map(len, self._tasks)) < MOST_MISSING
                new = [one for one in missing if library.key(one) not in queued]
                if new and room:
                    self.add(library, new, self._on_remembered, begun)
        finally:
            with self._lock:
                self._asking -= 1

    def first(self) -> EncodingTask | None:
        """The first that is not done."""
        with self._lock:
            gone = list[EncodingTask]()
            while self._tasks and self._tasks[0].done:
                gone.append(self._tasks.popleft())
            first = self._tasks[0] if self._tasks else None
        for task in gone:
            task.close()
        return first

    def close(self) -> list[EncodingTask]:
        """Compute no more; the tasks that were not done."""
        with self._lock:
            self._closed = True
            tasks, self._tasks = self._tasks, deque()
        left = [task for task in tasks if not task.done]
        for task in tasks:
            task.close()
        return left
