"""Freed memory goes back to the system, where it can be when nobody waits for a token."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from blend.errors import ContextLengthError, PromptError, StoreError
from blend.model import cpu
from blend.model.cpu import set_threads
from blend.serve.background import Beside, Encoding, Encodings
from blend.serve.corpus_caches import OnDone
from blend.serve.failures import STORE_UNREACHABLE, log_error
from blend.serve.limits import KV_BUDGET, MOST_RUNNING, MOST_WAITING, PREFIX_BUDGET
from blend.serve.prefixes import Prefixes
from blend.serve.scheduler import OnPass, Schedule, Waiting
from blend.serve.sequence import LEAST, Job, may_gain_by
from blend.serve.types import EngineFailedError, Event, Holding, QueueFullError, Work

if TYPE_CHECKING:
    from blend.blender import Blender
    from blend.chunks.library import ChunkLibrary, Variant


# Seconds between two times: .2 s for a gigabyte, in which no token is computed.
IDLE_S, BUSY_S = 60.0, 600.0


class Tidying:
    """Of one engine's thread."""

    def __init__(self) -> None:
        self._tidied, self._untidy = time.monotonic(), False

    def used(self) -> None:
        """Memory was used, and may have been freed."""
        self._untidy = True

    @property
    def due_s(self) -> float | None:
        """Seconds in which to `tidy` where nothing else is to be done; None where there is nothing to give back."""
        return IDLE_S if self._untidy else None

    def tidy(self, *, busy: bool) -> None:
        """Give back what is free, if there may be any and it is time. busy: whether somebody waits for a token."""
        if self._untidy and time.monotonic() - self._tidied >= (BUSY_S if busy else IDLE_S):
            cpu.trim_heap()
            self._tidied, self._untidy = time.monotonic(), False


# --- The embedded engine: many prompts on one decoder, scheduled pass by pass.


LOADING = 2  # prompts whose caches are loaded at a time
LOOK_S = 0.05  # while all there is to do waits for the store, prompts that are given up are looked for so often
CPU_ROWS = 80  # a pass takes five times as long as that of a single row; of more, answers would wait longer for nothing
GPU_ROWS = 1024


class EmbeddedEngine:
    """An `Engine` over a blender's decoder and store, with a thread of its own.

    blender_of: that of a tenant's corpus, on the same decoder; without it all share `blender`. most_running, most_waiting:
    prompts. pass_rows: of one pass, decoding and prefill together. kv_budget: bytes that the caches of running prompts may
    take; a prompt waits until there is room. prefix_budget: bytes of KV of earlier prompts and conversations that are kept.
    least_gain: rows that blending must save a prompt. remember: whether what the store lacked for a prompt is computed and
    stored, when nothing else is to be done. on_pass: told of passes that were what full prefill consists of.
    """

    def __init__(
        self,
        blender: Blender,
        *,
        blender_of: Callable[[str, str], Blender] | None = None,
        most_running: int = MOST_RUNNING,
        most_waiting: int = MOST_WAITING,
        pass_rows: int | None = None,
        kv_budget: int = KV_BUDGET,
        prefix_budget: int = PREFIX_BUDGET,
        least_gain: int = LEAST,
        remember: bool = True,
        on_pass: OnPass | None = None,
    ) -> None:
        self._blender, self._least_gain = blender, least_gain
        self._blender_of = blender_of or (lambda tenant, corpus: blender)
        self._decoder = blender.decoder
        self._most_running = most_running
        if pass_rows is None:
            pass_rows = CPU_ROWS if self._decoder.device.type == "cpu" else GPU_ROWS
        piece_rows, self._kv_budget = max(1, pass_rows - most_running), kv_budget
        width = sum(layer.width for layer in self._decoder.rotations)
        self._row_bytes = width * self._decoder.dtype.itemsize
        self._prefixes = Prefixes(prefix_budget)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting = Waiting(most_waiting)
        self._running: list[Job] = []
        self._loads = Beside("kvblend-loads", LOADING, self._wake)
        self._caches = Beside("kvblend-caches", 1, self._wake)
        self._encodings = Encodings(self._caches, piece_rows)
        self._schedule = Schedule(
            self._decoder, self._encodings, self._loads, piece_rows=piece_rows, remember=remember, on_pass=on_pass
        )
        self._tidying = Tidying()
        self._open = True
        self._failed = self._idle = self._news = False
        self._threads, self._begun = torch.get_num_threads(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kvblend-engine", daemon=True)
        self._thread.start()
        self._begun.wait()

    def submit(self, work: Work, on_event: Callable[[Event], None]) -> Job:
        """See `Engine.submit`."""
        if not (work.layout.prefix and work.layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self._decoder.check_length(work.layout.rows + work.sampling.max_tokens)
        work, blender = self._placed(work)
        job = Job(work, blender, self._prefixes, next(self._numbers), on_event, least_gain=self._least_gain)
        if self._bytes(job) > self._kv_budget:
            raise ContextLengthError(
                f"the prompt and its answer need {self._bytes(job) >> 20} MiB of KV memory, all there is are "
                f"{self._kv_budget >> 20}: use fewer chunks, a shorter answer or a larger budget",
                self._kv_budget // self._row_bytes - work.sampling.max_tokens,
                work.layout.rows,
            )
        with self._changed:
            self.require_room(work.tenant)
            self._waiting.add(job)
            self._wake()
        if not work.full:
            with suppress(StoreError):  # it is for speed; that the store is away shows when the prompt's turn comes
                blender.read_ahead(work.layout)
        return job

    def _placed(self, work: Work) -> tuple[Work, Blender]:
        """A prompt and who computes it. What is not blended needs no store, so it needs no tenant's blender either."""
        if not work.full:
            try:
                return work, self._blender_of(work.tenant, work.corpus)
            except StoreError:  # the tenant's store cannot be opened
                work = replace(work, full=True, reason=STORE_UNREACHABLE)
        return work, self._blender

    def require_room(self, tenant: str = "") -> None:
        """See `Engine.require_room`."""
        with self._changed:
            self._require_open()
            self._waiting.require_room(tenant)

    def _require_open(self) -> None:
        if self._failed:
            raise EngineFailedError
        if not self._open:
            raise QueueFullError(len(self._waiting), 1.0)

    def holding(self) -> Holding:
        """See `Engine.holding`."""
        with self._changed:
            used = sum(map(self._bytes, self._running))
            counts = len(self._running), len(self._waiting), used, self._kv_budget
        return Holding(*counts, self._prefixes.nbytes, len(self._encodings), self._prefixes.evictions)

    @property
    def alive(self) -> bool:
        """Whether its thread runs, and no fault has ended its work."""
        return not self._failed and self._thread.is_alive()

    def encode(self, library: ChunkLibrary, variants: Sequence[Variant], on_done: OnDone) -> Encoding:
        """Compute and store these caches in small pieces, beside answers and when there are none; see `Encoding`."""
        with self._changed:
            self._require_open()
            self._wake()
            return self._encodings.add(library, variants, on_done)

    def forget(self, tenant: str) -> None:
        """Let go of all that is kept in memory of this tenant's prompts."""
        self._prefixes.forget(tenant)

    def close(self, finish_s: float = 0.0) -> None:
        """See `Engine.close`."""
        until = time.monotonic() + finish_s
        with self._changed:
            self._open = self._schedule.remember = False
            self._changed.wait_for(lambda: not (self._running or self._waiting), max(0.0, until - time.monotonic()))
            self._most_running = 0  # the loop ends everything
            self._wake()
        self._thread.join()

    def _bytes(self, job: Job) -> int:
        return job.capacity * self._row_bytes

    def _wake(self) -> None:
        """There is something new to look at."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def _loop(self) -> None:
        set_threads(self._threads)
        self._begun.set()
        try:
            while self._turn():
                pass
        except BaseException as error:  # a fault of ours: nobody may wait for what never comes
            log_error(error, "engine")
            with self._changed:
                self._failed = True
        self._end_all()

    def _turn(self) -> bool:
        """One pass, once there is something to do; whether to go on."""
        self._tidying.tidy(busy=bool(self._running))
        with self._changed:
            if not (self._waiting or self._running or self._encodings or self._closing):
                self._changed.wait(self._tidying.due_s)
            elif self._idle and not self._news:
                self._changed.wait(LOOK_S)
            self._news = False
            gone = self._waiting.take_given_up()
            self._admit()
            jobs, closing = list(self._running), self._closing
            if gone:
                self._changed.notify_all()
        for job, reason in gone:
            job.end(reason)
            job.release()
        if closing:
            return False
        with torch.inference_mode():
            self._idle = not self._schedule.run(jobs)
        if not self._idle:
            self._tidying.used()
        self._leave()
        return True

    def _end_all(self) -> None:
        """End what is left: the server is shut down, or the engine has failed."""
        with self._changed:
            jobs, self._running = [*self._running, *self._waiting.empty()], []
            self._changed.notify_all()
        for job in jobs:
            if self._failed:
                job.fail(EngineFailedError())
            else:
                job.end("shutdown")
        encodings = self._encodings.close()
        self._loads.close()
        self._caches.close()
        for job in jobs:
            job.release()
        for encoding in encodings if self._failed else ():
            encoding.abandon(EngineFailedError())

    @property
    def _closing(self) -> bool:
        return self._most_running == 0

    def _admit(self) -> None:
        """Let the next prompt in when it can be begun at once: until then somebody more urgent may come."""
        job = self._waiting.first(lambda job: not any(_goes_before(one, job) for one in self._running))
        if job is None:
            return
        used = sum(map(self._bytes, self._running))
        if len(self._running) >= self._most_running or used + self._bytes(job) > self._kv_budget:
            return  # those behind must not overtake it for ever
        self._waiting.admit(job)
        self._running.append(job)

    def _leave(self) -> None:
        """Let go of those that have ended."""
        with self._changed:
            done = [job for job in self._running if job.ended and not job.waits]
            if done:
                self._news = True
                self._running = [job for job in self._running if job not in done]
                self._changed.notify_all()
        for job in done:
            job.release()


def _goes_before(one: Job, job: Job) -> bool:
    """Whether a running prompt must be prefilled before this one is begun: it can go on, or leaves rows that serve it."""
    return one.blend is None and not one.ended and (not one.waits or may_gain_by(job.work, one.work))
