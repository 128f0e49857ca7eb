"""The prompts that wait for their turn: whose it is, who must come again later, and when."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from blend.serve.sequence import Job
from blend.serve.types import EndReason, QueueFullError
from blend.timing import Stopwatch

if TYPE_CHECKING:
    import torch

    from blend.model.decoder import Decoder
    from blend.model.forward import RowRequest
    from blend.serve.background import Beside, Encodings


STEP_S = 30.0
"""So many seconds of waiting are worth one step of priority: long beside one prompt, short beside what a client waits for."""


class Waiting:
    """`most` prompts at a time: the most urgent first, tenants in turn within a priority, each tenant's as they came.

    Nobody waits for ever: every `STEP_S` seconds a prompt counts as one step more urgent, until it is as urgent as the most
    urgent that waits with it. No further, for among prompts of one priority the turns of tenants decide, and not their age.
    A tenant with a name takes no more than half of the places, so that there are some for the others. Used under the engine's
    lock.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: list[Job] = []
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}  # of each tenant
        self._admitted, self._others_waited = time.monotonic(), False
        self._interval_s = 0.0  # between two that were admitted while others waited

    def __len__(self) -> int:
        return len(self._jobs)

    def require_room(self, tenant: str) -> None:
        """Raise `QueueFullError` where nobody else of this tenant may wait."""
        tenants = [job.work.tenant for job in self._jobs]
        if len(tenants) >= self._most:
            raise QueueFullError(len(tenants), self._place_free_s)
        mine = tenants.count(tenant)
        if tenant and mine >= max(1, self._most // 2):
            raise QueueFullError(mine, self._place_free_s * len(set(tenants)))

    @property
    def _place_free_s(self) -> float:
        """Seconds until the next one is admitted: as long as it took lately, or longer where it takes longer now."""
        return max(1.0, self._interval_s, time.monotonic() - self._admitted)

    def add(self, job: Job) -> None:
        """Let it wait."""
        self._jobs.append(job)

    def first(self, may: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """Whose turn it is, of those that may have it."""
        highest = min((job.work.priority for job in self._jobs), default=0)

        def order(job: Job) -> tuple[int, int, int]:
            aged = max(highest, job.work.priority - int(job.age_s / STEP_S))
            return aged, self._last_turn.get(job.work.tenant, 0), job.number

        return min(filter(may, self._jobs), key=order, default=None)

    def admit(self, job: Job) -> None:
        """It waits no more; it is its tenant's turn that it took."""
        self._jobs.remove(job)
        self._last_turn[job.work.tenant] = next(self._turns)
        before, self._admitted = self._admitted, time.monotonic()
        if self._others_waited:
            self._interval_s = 0.8 * (self._interval_s or self._admitted - before) + 0.2 * (self._admitted - before)
        self._others_waited = bool(self._jobs)

    def take_given_up(self) -> list[tuple[Job, EndReason]]:
        """Those that are not to go on, wherever they stand, and why; they wait no more."""
        looked_at = [(job, job.given_up) for job in self._jobs]
        self._jobs = [job for job, reason in looked_at if reason is None]
        self._others_waited = self._others_waited and bool(self._jobs)
        return [(job, reason) for job, reason in looked_at if reason is not None]

    def empty(self) -> list[Job]:
        """Nobody waits any more; who did."""
        jobs, self._jobs = self._jobs, []
        return jobs


# --- One forward pass for many: each gets what it gets alone, and where the pass fails only whoever is to blame fails.


OnPass = Callable[[int, int, float], None]
"""Told of a pass how many rows it had, keys that these looked at together, and seconds."""


class Taker(Protocol):
    """Takes part in passes, one after another."""

    def request(self) -> RowRequest:
        """The rows that it wants in the next pass."""

    def took(self, logits: torch.Tensor) -> None:
        """What the pass gave for its last row, `[1, vocab]`."""

    def repeat(self, error: Exception) -> bool:
        """The pass failed; whether the rows are ready once more, or only later. Raises `error` where that cannot be."""

    def fail(self, error: Exception) -> None:
        """Its rows cannot be run."""


def run_pass(decoder: Decoder, takers: Sequence[Taker], on_pass: OnPass | None = None) -> None:
    """Run the next rows of all of these; of what goes wrong they are told."""
    error = _together(decoder, takers, on_pass)
    if error is None:
        return
    traceback.clear_frames(error.__traceback__)  # memory of the pass, which may be what there was too little of
    for taker in takers:
        if len(takers) == 1:
            taker.fail(error)
        else:
            _guarded(taker, lambda taker=taker: _alone(decoder, taker, error))  # type: ignore[misc]


def _together(decoder: Decoder, takers: Sequence[Taker], on_pass: OnPass | None) -> Exception | None:
    """One pass; what it failed with, if it did."""
    requests = [taker.request() for taker in takers]
    watch = None if on_pass is None else Stopwatch(decoder.device)
    try:
        logits = decoder.prefill(requests)
    except Exception as error:  # nobody's rows may end the others
        return error
    if on_pass is not None and watch is not None:
        rows = sum(request.positions.shape[0] for request in requests)
        on_pass(rows, sum(int(request.positions.sum()) for request in requests) + rows, watch.total())
    for number, taker in enumerate(takers):
        _guarded(taker, lambda taker=taker, number=number: taker.took(logits[number : number + 1]))  # type: ignore[misc]
    return None


def _alone(decoder: Decoder, taker: Taker, error: Exception) -> None:
    if taker.repeat(error):
        taker.took(decoder.prefill([taker.request()]))


def _guarded(taker: Taker, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # its own: a selector, the store, whoever listens to its events
        taker.fail(error)


# --- What each pass of the embedded engine takes: the next row of all answers that run, and a piece of one prompt's prefill.


ROWS_ALONE = 256
TURN = 4  # while answers are decoded, one pass in so many computes a piece of a chunk's cache
# While prompts are prefilled, one in so many does so in place of a prompt's piece. Were there none, a server for which prompts
# always wait would compute what its store lost in every prompt, never store it, and be slower with each cache that it loses.
TURN_AMONG_PROMPTS = 8


class Schedule:
    """Pass after pass over the prompts that run. Only the engine's thread calls it.

    loads: where prompts wait for the store. piece_rows: of a prompt's prefill beside answers, in one pass. remember: whether
    what the store lacked for a prompt is computed and stored. on_pass: told of passes that were what full prefill consists of.
    """

    def __init__(
        self,
        decoder: Decoder,
        encodings: Encodings,
        loads: Beside,
        *,
        piece_rows: int,
        remember: bool,
        on_pass: OnPass | None,
    ) -> None:
        self._decoder, self._encodings, self._loads = decoder, encodings, loads
        self._piece_rows, self._on_pass = piece_rows, on_pass
        self.remember = remember
        self._passes = 0

    def run(self, jobs: Sequence[Job]) -> bool:
        """One row of every answer, and a piece of the first prompt that can be prefilled, or of a chunk's cache.

        Whether there was anything to do but wait for the store.
        """
        for job in jobs:
            if reason := job.given_up:
                job.end(reason)
        live = [job for job in jobs if not job.ended]
        prefilling = next((job for job in live if job.blend is None and not job.waits), None)
        if prefilling is not None:
            alone = all(job is prefilling for job in live)  # nobody waits for the next token: larger pieces are quicker
            rows = max(self._piece_rows, ROWS_ALONE) if alone else self._piece_rows
            _guarded_schedule(prefilling, lambda: self._prepare(prefilling, rows))
        if takers := self._takers(live, prefilling):
            run_pass(self._decoder, takers, self._on_pass if _as_full_prefill(takers) else None)
        if prefilling is not None and prefilling.blend is not None:
            _guarded_schedule(prefilling, lambda: self._lack(prefilling))
        return bool(takers) or prefilling is not None

    def _takers(self, live: Sequence[Job], prefilling: Job | None) -> list[Taker]:
        """Who takes part in the next pass."""
        ready = prefilling is not None and not prefilling.ended and prefilling.ready
        taking = [job for job in live if job.blend is not None or (job is prefilling and ready)]
        self._passes += 1
        turn = self._passes % (TURN_AMONG_PROMPTS if ready else TURN) == 0
        encoding = self._encodings.first()
        computed = encoding is not None and encoding.ready()  # asked in every pass: what it waits for goes on meanwhile
        if encoding is not None and computed and (turn or not taking):
            # In place of the prompt's piece: a pass stays as short as the others.
            return [*(job for job in taking if job is not prefilling), encoding]
        return [*taking]

    def _prepare(self, job: Job, rows: int) -> None:
        if not job.begun:
            job.begin(self._loads)
        job.prepare(rows)
        if job.ended:
            self._lack(job)

    def _lack(self, job: Job) -> None:
        """Have computed what the store lacked for this prompt; while it is out of reach, the next prompts remind."""
        lacking = job.lacking if self.remember and job.work.remember else None
        if lacking is not None:
            self._encodings.remember(lacking, job.work.begun)


def _guarded_schedule(job: Job, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # the job's own: a selector, the store, whoever listens to its events
        job.fail(error)


def _as_full_prefill(takers: Sequence[Taker]) -> bool:
    """Whether full prefill consists of such passes: of a piece of one prompt that is computed in full, and nothing beside."""
    return len(takers) == 1 and isinstance(takers[0], Job) and takers[0].full_piece_rows >= ROWS_ALONE
