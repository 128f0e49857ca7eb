"""What each pass of the embedded engine takes: the next row of all answers that run, and a piece of one prompt's prefill.

So answers go on while prompts are blended, and what one answer's row costs alone is shared by all: a pass over few rows takes
as long as reading the weights. Now and then a piece of a chunk's cache comes in place of the prompt's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blend.serve.job import Job
from blend.serve.passes import OnPass, Taker, run_pass

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.serve.beside import Beside
    from blend.serve.encoding import Encodings

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
            _guarded(prefilling, lambda: self._prepare(prefilling, rows))
        if takers := self._takers(live, prefilling):
            run_pass(self._decoder, takers, self._on_pass if _as_full_prefill(takers) else None)
        if prefilling is not None and prefilling.blend is not None:
            _guarded(prefilling, lambda: self._lack(prefilling))
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


def _guarded(job: Job, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # the job's own: a selector, the store, whoever listens to its events
        job.fail(error)


def _as_full_prefill(takers: Sequence[Taker]) -> bool:
    """Whether full prefill consists of such passes: of a piece of one prompt that is computed in full, and nothing beside."""
    return len(takers) == 1 and isinstance(takers[0], Job) and takers[0].full_piece_rows >= ROWS_ALONE
