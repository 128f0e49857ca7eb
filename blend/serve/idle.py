"""Runs prompts of the server's own while it is idle: audits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from blend.errors import PromptError
from blend.serve.events import EngineFailedError, Event, Failed, Finished, OnEvent, QueueFullError
from blend.serve.prompt import Prompt

if TYPE_CHECKING:
    from blend.serve.engine.scheduler import EmbeddedEngine

LOOK_S = 0.5  # how often to look around


class IdleWork:
    """A thread that runs prompts one at a time while the engine is idle. Threads may share it.

    Args:
        engine: runs them.
        find: the next prompt, with what takes its events; None if there is none. Called while the engine is idle.
        look_around: called before, and every `LOOK_S`.

    """

    def __init__(
        self, engine: EmbeddedEngine, find: Callable[[], tuple[Prompt, OnEvent] | None], look_around: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._find = find
        self._look_around = look_around
        self._closing = threading.Event()
        self._running: Prompt | None = None
        self._thread = threading.Thread(target=self._run, name="kvblend-idle", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Cancel the running prompt: somebody asks."""
        if (prompt := self._running) is not None:
            prompt.request.cancelled.set()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self.interrupt()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._look_around()
            is_idle = self._engine.wait_idle(LOOK_S)
            task = self._find() if is_idle else None
            if task is not None:
                self._work(*task)
            elif is_idle:
                self._closing.wait(LOOK_S)

    def _work(self, prompt: Prompt, on_event: OnEvent) -> None:
        ended = threading.Event()

        def take(event: Event) -> None:
            on_event(event)
            if isinstance(event, Failed) or (isinstance(event, Finished) and event.last):
                ended.set()

        self._running = prompt
        with suppress(QueueFullError, EngineFailedError, PromptError):  # the last: more KV than the engine holds
            self._engine.submit(prompt, take)
            ended.wait()
        self._running = None
