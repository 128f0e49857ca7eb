"""The prompts that wait for their turn: whose it is, who must come again later, and when."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from blend.serve.engine import EndReason, QueueFullError

if TYPE_CHECKING:
    from blend.serve.job import Job

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
