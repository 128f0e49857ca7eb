"""The prompts that wait for their turn: whose it is, and who must come again later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.serve.engine import QueueFullError

if TYPE_CHECKING:
    from blend.serve.job import Job


class Waiting:
    """In order of priority and arrival, `most` at a time. Used under the engine's lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def require_room(self, retry_after_s: float) -> None:
        """Raise `QueueFullError` where nobody else may wait."""
        if len(self._jobs) >= self._most:
            raise QueueFullError(len(self._jobs), retry_after_s)

    def add(self, job: Job) -> None:
        """Let it wait."""
        self._jobs.append(job)
        self._jobs.sort(key=lambda one: one.order)

    @property
    def first(self) -> Job | None:
        """Whose turn it is."""
        return self._jobs[0] if self._jobs else None

    def remove(self, job: Job) -> None:
        """It waits no more."""
        self._jobs.remove(job)

    def empty(self) -> list[Job]:
        """Nobody waits any more; who did."""
        jobs, self._jobs = self._jobs, []
        return jobs
