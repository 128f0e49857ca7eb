"""The scheduler's side: which prompts are loaded, what it tells the workers in a step, and what becomes of the loads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blend.integrations.vllm.contract import LayoutTicket, OutageLog, Signer
from blend.serve.engine.background import TURN, TURN_AMONG_PROMPTS

LEAST_CLAIMED = 0.25
"""Of a prompt: where vLLM's prefix cache holds more than the rest, its own prefill is as fast as a load."""


class Load(NamedTuple):
    """A prompt whose KV kvblend provides, from row `start` on and without the last row, which vLLM computes.

    request: vLLM's id. blocks: ids of the cache blocks of its rows, in order, as many as the prompt needs or more. arrived: by
    the scheduler's clock, in seconds.
    """

    request: str
    ticket: LayoutTicket
    blocks: tuple[int, ...]
    start: int
    arrived: float = 0.0


class StepNews(NamedTuple):
    """What the scheduler tells the workers in one step of the engine.

    cancelled: requests that ended while they were loaded. now: the time, the same in all workers. turn: one step of this kind
    in so many computes missing caches; 1: no request computes anything. unfinished: whether a worker has some. rests: no pass
    is run, because a prompt that was loaded gets its first token in the step.
    """

    loads: tuple[Load, ...] = ()
    cancelled: tuple[str, ...] = ()
    now: float = 0.0
    turn: int = TURN
    unfinished: bool = False
    rests: bool = False


class Outcome(NamedTuple):
    """How a load ended. figures: for the reply; with a reason if it failed. counts: for vLLM's metrics."""

    figures: Mapping[str, Any] = {}
    counts: Mapping[str, int] = {}


@dataclass
class _Prompt:
    """A request with a ticket."""

    ticket: LayoutTicket
    figures: dict[str, Any] = field(default_factory=dict)
    loading: bool = False


class LoadScheduler:
    """Decides in vLLM's scheduler which rows of which request are loaded. One thread.

    counts: since somebody last took them, for vLLM's metrics. unfinished: see `StepNews`.
    """

    def __init__(self, signer: Signer) -> None:
        self.counts = Counter[str]()
        self.unfinished = False
        self._signer = signer
        self._outage = OutageLog()
        self._prompts: dict[str, _Prompt | None] = {}
        self._loaded = set[str]()
        self._new: list[Load] = []
        self._cancelled: list[str] = []

    def claimed(self, request: Any, computed: int) -> int:
        """How many rows behind the `computed` ones are claimed; 0 after a failed load, and where vLLM is as fast.

        The last row is claimed too, though vLLM computes it: a prompt whose last row opens a block fails otherwise.
        """
        prompt = self._prompt(request)
        if prompt is None:
            return 0
        layout = prompt.ticket.layout
        rows = layout.rows - computed
        if "reason" in prompt.figures or computed >= layout.context.stop or rows <= LEAST_CLAIMED * layout.rows:
            prompt.figures |= {"rows": layout.rows, "rows_reused": computed, "rows_computed": rows}
            return 0
        return rows

    def allocated(self, request: Any, blocks: Sequence[int], rows: int) -> None:
        """VLLM has allocated blocks for so many claimed rows."""
        prompt = self._prompt(request)
        if rows and prompt is not None:
            start = prompt.ticket.layout.rows - rows
            self._new.append(Load(request.request_id, prompt.ticket, tuple(blocks), start, time.monotonic()))
            prompt.loading = True
            prompt.figures = {}

    def step(self, scheduled: Mapping[str, int]) -> StepNews:
        """What is new for the workers. scheduled: how many rows of which requests are computed in this step."""
        rests = not self._loaded.isdisjoint(scheduled)
        self._loaded.difference_update(scheduled)
        turn = 1
        if scheduled:
            turn = TURN if max(scheduled.values()) == 1 else TURN_AMONG_PROMPTS
        step = StepNews(tuple(self._new), tuple(self._cancelled), time.monotonic(), turn, self.unfinished, rests)
        self._new = []
        self._cancelled = []
        return step

    def ended(self, outcomes: Mapping[str, Outcome], *, unfinished: bool) -> None:
        """Loads have ended. unfinished: see `StepNews`."""
        self.unfinished = unfinished
        for request, outcome in outcomes.items():
            self.counts.update(outcome.counts)
            if (prompt := self._prompts.get(request)) is not None:
                prompt.figures = dict(outcome.figures)
                prompt.loading = False
                self._loaded.add(request)

    def finished(self, request: Any) -> Mapping[str, Any] | None:
        """The request has ended or was aborted; figures for its reply."""
        self._loaded.discard(request.request_id)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return None
        if prompt.loading:
            self._cancelled.append(request.request_id)
        return prompt.figures

    def _prompt(self, request: Any) -> _Prompt | None:
        """A request's prompt; None without a ticket that this vLLM's middleware signed."""
        if request.request_id not in self._prompts:
            self._prompts[request.request_id] = self._read(request)
        return self._prompts[request.request_id]

    def _read(self, request: Any) -> _Prompt | None:
        match request.kv_transfer_params:
            case {"kvblend": {"ticket": str(text), "signature": str(signature)}}:
                if self._signer.is_signed(text, signature, request.cache_salt):
                    self._outage.works()
                    ticket = LayoutTicket.read(text)
                    return _Prompt(ticket) if ticket.layout.token_ids == tuple(request.prompt_token_ids) else None
                self.counts["fallbacks_refused"] += 1
                self._outage.failed(
                    "kvblend: a ticket is refused that the middleware of this vLLM did not sign; if none is accepted, "
                    "leave engine_id out of --kv-transfer-config"
                )
        return None
