"""The embedded engine: many prompts on one decoder, scheduled pass by pass.

Every pass takes the next row of all answers that run, and a piece of one prompt's prefill. So answers go on while prompts are
blended, and what one answer's row costs alone is shared by all: a pass over few rows takes as long as reading the weights.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from blend.errors import PromptError, StoreError
from blend.model.few_rows import MOST_ROWS
from blend.serve.engine import Event, Holding, QueueFullError, Work
from blend.serve.job import Job
from blend.timing import Stopwatch

if TYPE_CHECKING:
    from blend.blender import Blend, Blender

MOST_RUNNING = 16
MOST_WAITING = 64
KV_BUDGET = 4 << 30


class EmbeddedEngine:
    """An `Engine` over a blender's decoder and store, with a thread of its own.

    most_running, most_waiting: prompts. pass_rows: of one pass, decoding and prefill together. kv_budget: bytes that the caches
    of running prompts may take; a prompt waits until there is room. What the store lacked for a prompt is computed and stored
    when nothing else is to be done.
    """

    def __init__(
        self,
        blender: Blender,
        *,
        most_running: int = MOST_RUNNING,
        most_waiting: int = MOST_WAITING,
        pass_rows: int = MOST_ROWS,
        kv_budget: int = KV_BUDGET,
    ) -> None:
        self._blender, self._decoder = blender, blender.decoder
        self._most_running, self._most_waiting = most_running, most_waiting
        self._piece_rows, self._kv_budget = max(1, pass_rows - most_running), kv_budget
        width = sum(layer.width for layer in self._decoder.rotations)
        self._row_bytes = width * self._decoder.dtype.itemsize
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._lacking: deque[Blend] = deque(maxlen=most_waiting)
        self._open = True
        self._seconds = 1.0  # that an answer took lately
        self._thread = threading.Thread(target=self._loop, name="kvblend-engine", daemon=True)
        self._thread.start()

    def submit(self, work: Work, on_event: Callable[[Event], None]) -> Job:
        """See `Engine.submit`."""
        if not (work.layout.prefix and work.layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self._decoder.check_length(work.layout.rows + work.sampling.max_tokens)
        job = Job(work, next(self._numbers), on_event, Stopwatch(self._decoder.device))
        if self._bytes(job) > self._kv_budget:
            raise PromptError(
                f"the prompt and its answer need {self._bytes(job) >> 20} MiB of KV memory, all there is are "
                f"{self._kv_budget >> 20}: use fewer chunks, a shorter answer or a larger budget"
            )
        with self._changed:
            if not self._open:
                raise QueueFullError(len(self._waiting), 1.0)
            if len(self._waiting) >= self._most_waiting:
                rounds = len(self._waiting) / self._most_running + 1
                raise QueueFullError(len(self._waiting), max(1.0, rounds * self._seconds))
            self._waiting.append(job)
            self._waiting.sort(key=lambda one: one.order)
            self._changed.notify_all()
        return job

    def holding(self) -> Holding:
        """See `Engine.holding`."""
        with self._changed:
            used = sum(map(self._bytes, self._running))
            return Holding(len(self._running), len(self._waiting), used, self._kv_budget)

    def close(self, finish_s: float = 0.0) -> None:
        """See `Engine.close`."""
        until = time.monotonic() + finish_s
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not (self._running or self._waiting), max(0.0, until - time.monotonic()))
            self._most_running = 0  # the loop ends everything
            self._changed.notify_all()
        self._thread.join()

    def _bytes(self, job: Job) -> int:
        return job.capacity * self._row_bytes

    def _loop(self) -> None:
        while True:
            with self._changed:
                idle = not (self._waiting or self._running)
                if idle and not (self._lacking or self._closing):
                    self._changed.wait()
                self._admit()
                jobs = list(self._running)
                if self._closing:
                    break
            with torch.inference_mode():
                if jobs:
                    self._pass(jobs)
                elif self._lacking:
                    with suppress(Exception):  # it is for later prompts; nobody waits for it
                        self._remember(self._lacking.popleft())
            self._leave()
        for job in (*self._running, *self._waiting):
            job.end("shutdown")
        with self._changed:
            self._running, self._waiting = [], []
            self._changed.notify_all()

    @property
    def _closing(self) -> bool:
        return self._most_running == 0

    def _admit(self) -> None:
        """Let prompts in, first come first served within a priority, as far as there is room."""
        for job in list(self._waiting):
            if reason := job.given_up:
                self._waiting.remove(job)
                job.end(reason)
                continue
            used = sum(map(self._bytes, self._running))
            if len(self._running) >= self._most_running or used + self._bytes(job) > self._kv_budget:
                return  # those behind must not overtake it for ever
            self._waiting.remove(job)
            self._running.append(job)

    def _pass(self, jobs: Sequence[Job]) -> None:
        """One row of every answer, and a piece of the first prompt that is not prefilled."""
        for job in jobs:
            if reason := job.given_up:
                job.end(reason)
        live = [job for job in jobs if not job.ended]
        prefilling = next((job for job in live if job.blend is None), None)
        if prefilling is not None and not prefilling.begun:
            self._guarded(prefilling, lambda: prefilling.begin(self._blender, self._piece_rows))
        taking = [job for job in live if job.blend is not None or (job is prefilling and not job.ended)]
        if not taking:
            return
        try:
            logits = self._decoder.prefill([job.request() for job in taking])
        except Exception as error:  # no prompt may end the engine; the one that was being prefilled is the suspect
            for job in [prefilling] if prefilling in taking and prefilling is not None else taking:
                job.fail(error)
            return
        for number, job in enumerate(taking):
            self._guarded(job, lambda job=job, number=number: job.took(logits[number : number + 1]))  # type: ignore[misc]
            if job is prefilling and job.blend is not None and job.blend.missing:
                self._lacking.append(job.blend)

    def _guarded(self, job: Job, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the job's own: a selector, the store, whoever listens to its events
            job.fail(error)

    def _leave(self) -> None:
        """Let go of those that have ended."""
        with self._changed:
            done = [job for job in self._running if job.ended]
            if done:
                self._running = [job for job in self._running if not job.ended]
                self._seconds = 0.8 * self._seconds + 0.2 * max(job.age_s for job in done)
                self._changed.notify_all()

    def _remember(self, blend: Blend) -> None:
        """Compute one cache that a prompt lacked; the rest has its turn when nothing else is to be done."""
        library = self._blender.library(blend.layout.prefix)
        missing = library.missing([one.chunk for one in blend.missing])
        try:
            library.compute(missing[:1])
        except StoreError:  # without a store to write to, the next prompt computes it again
            return
        if len(missing) > 1:
            self._lacking.appendleft(blend)
