"""Work of an engine that may wait for a store: done beside the engine's thread, which goes on with what waits for nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch

from blend.model.rows import Resume, RowRequest, Steps
from blend.model.threads import compute_alone
from blend.serve.failures import log_error

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
        self._next: RowRequest | Resume = Resume.HERE
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
            if self._next is Resume.BESIDE:
                self._start(partial(self._go_on_beside, partial(next, self._steps)))
            elif self._next is Resume.HERE or turns:
                turns -= self._next is Resume.TURN
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
            while self._next is Resume.BESIDE and not self._given_up:
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
        self._error, self._next = None, Resume.HERE
        self.ended, self.busy = True, False
