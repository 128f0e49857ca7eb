"""Work of an engine that may wait for a store: done beside the engine's thread, which goes on with what waits for nothing."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from blend.errors import StoreError
from blend.model.cpu import compute_alone
from blend.model.forward import Resume, RowRequest, Steps
from blend.serve.caching import OnDone
from blend.serve.faults import log_error
from blend.serve.removed import removed_from
from blend.store.admin import verify_entry
from blend.store.backend import cache_name

if TYPE_CHECKING:
    from blend.blender import Blender
    from blend.chunks.library import ChunkLibrary, Variant
    from blend.store.base import ChunkStore
    from blend.types import ChunkKey, PromptLayout


_Result = TypeVar("_Result")


class Beside:
    """So many threads that do what they are given, first come first served. wake: called after each."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None]) -> None:
        self._wake, self._given = wake, queue.SimpleQueue[Callable[[], None] | None]()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system has no more
            self.close()
            raise

    def start(self, call: Callable[[], None]) -> None:
        """Have this done. Any thread may call it."""
        self._given.put(call)

    def close(self) -> None:
        """Finish what was given, and end."""
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        compute_alone()  # the cores are the engine's
        while (call := self._given.get()) is not None:
            try:
                with torch.inference_mode():
                    call()
            except BaseException as error:  # the next one is somebody else's
                log_error(error, "")
            del call  # what it holds is not to be kept until there is another
            self._wake()


class Stepper(Generic[_Result]):
    """Steps on their way, in the engine's thread and beside it. Only the engine's thread calls it.

    busy: whether a thread beside is at it. ended: whether there is nothing more to do; result: what came of it then.
    """

    def __init__(self, steps: Steps[_Result], beside: Beside) -> None:
        self._steps, self._beside = steps, beside
        self._next: RowRequest | Resume = Resume.ENGINE
        self._error: Exception | None = None
        self._lock, self._given_up = threading.Lock(), False
        self.busy = self.ended = False
        self.result: _Result | None = None

    def rows(self) -> RowRequest | None:
        """Go on as far as nothing is waited for, with no more than one turn; the rows to run, or None where there are none yet.

        Raises what the steps raise, beside too.
        """
        turns = 1
        while not (self.busy or self.ended):
            if self._error is not None:
                self.ended = True
                raise self._error
            if isinstance(self._next, RowRequest):
                return self._next
            if self._next is Resume.BACKGROUND:
                self._start(partial(self._go_on_beside, partial(next, self._steps)))
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
        """The rows could not be run: tell the steps, beside, because to close what they opened may take its time."""
        if not self.ended:
            self._start(partial(self._go_on_beside, partial(self._steps.throw, error)))

    def give_up(self) -> None:
        """Go no further, and let go of everything, if need be once the thread beside is back: it is busy until then."""
        with self._lock:
            if self._given_up or self.ended:
                return
            self._given_up = True
            if self.busy:
                return
            self.busy = True
        self._beside.start(self._close)

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
        self._beside.start(call)

    def _go_on_beside(self, call: Callable[[], RowRequest | Resume]) -> None:
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
            self._error = RuntimeError(f"{type(error).__name__} beside the engine")
        with self._lock:
            self.busy = given_up = self._given_up  # from here on, giving up has it closed by another thread
        if given_up:
            self._close()

    def _close(self) -> None:
        try:
            self._steps.close()
        except Exception as error:  # entries that cannot be closed harm nobody
            log_error(error, "")
        self._error, self._next = None, Resume.ENGINE
        self.ended, self.busy = True, False


# --- Caches of chunks computed in small pieces, so that answers go on meanwhile.


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
    how many are left, and `keys` are for everybody. begun: see `Removed.unless_removed`.
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
        """Whether the store has it by now, every byte of it: damage behind a header is why some are to be computed again."""
        library = self._library
        return not library.missing_of([variant]) and not verify_entry(library.store, cache_name(library.key(variant)))

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
