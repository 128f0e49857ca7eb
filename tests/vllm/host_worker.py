"""kvblend's part of vLLM's workers over kvblend's own decoder instead of vLLM's model: it runs where no vLLM is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from models import decoder

from blend.config import BlendConfig
from blend.integrations.vllm.contract import BOOK
from blend.integrations.vllm.decoder import PagedCache, Passes, Pause
from blend.integrations.vllm.loads import LoadQueue, RowBlender
from blend.integrations.vllm.scheduler import Load, Outcome, StepNews
from blend.model.passes import RowRequest
from blend.serve.prompts.learned import LearnedCaches
from blend.store import open_store

BLOCK, MOST_ROWS = 16, 64
RATIO = 0.15
ROW_S = 0.01
"""Seconds that a row takes, by `Clock`."""


class Clock:
    """Stands for the module `time`: only rows that are computed take time, and what a test says."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


class Group:
    """Workers of one model that run one after another: the others hear what the first one has said, in its order."""

    def __init__(self, said: deque[tuple[str, Any]], *, is_first: bool) -> None:
        self._said = said
        self._is_first = is_first

    def from_first(self, value: Any) -> Any:
        return self.spoken("value", value)

    def spoken(self, kind: str, value: Any) -> Any:
        """kind: of what is said. Workers that speak of different things hang."""
        if self._is_first:
            self._said.append((kind, value))
            return value
        assert self._said, f"the first worker says no {kind}"
        first_kind, first_value = self._said.popleft()
        assert first_kind == kind
        return first_value


class HostDecoder:
    """As `PagedDecoder`. rows: of each pass. settled: caches of prompts that were blended."""

    most_rows = MOST_ROWS

    def __init__(self, group: Group, clock: Clock, *, is_first: bool) -> None:
        self._decoder = decoder("llama")
        self._clock = clock
        self._heard = list[RowRequest]()
        self.is_first = is_first
        self.model = SimpleNamespace(workers=group, block_size=BLOCK)
        self.rows = list[int]()
        self.settled = list[PagedCache]()
        self.at_pass: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def from_first(self, request: RowRequest | None) -> RowRequest | None:
        request = self.model.workers.spoken("rows", request)
        if request is not None and not self.is_first:
            self._heard.append(request)
        return request

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.model.workers.spoken("values", values))

    def together(self, step: Callable[[], Hashable]) -> None:
        outcome = step()
        assert self.model.workers.spoken("outcome", outcome) == outcome

    def run_rows(self, request: RowRequest) -> None:
        for _ in self.passes(request):
            pass

    def passes(self, request: RowRequest) -> Passes[torch.Tensor]:
        """at_pass may raise. Rows of the first worker were run there."""
        self.at_pass()
        rows = int(request.positions.shape[0])
        self.rows.append(rows)
        self._clock.seconds += ROW_S * rows
        logits = torch.empty(0)
        if not any(request is heard for heard in self._heard):
            logits = self._decoder.prefill([request])
        yield Pause.PASS
        return logits

    def settle(self, cache: PagedCache) -> None:
        self.settled.append(cache)


class HostWorker:
    """A worker over a store. budget: of learned text. said: to the other workers, if this one is not the first.

    Attributes:
        outcomes: of loads that have ended, by request, in this order.
        failed_blocks: of loads that have failed.
        history: what the scheduler has said in each step.

    """

    def __init__(
        self, folder: Path, clock: Clock, budget: int = 10**9, said: deque[tuple[str, Any]] | None = None
    ) -> None:
        self.said = deque[tuple[str, Any]]() if said is None else said
        self._clock = clock
        self.decoder = HostDecoder(Group(self.said, is_first=said is None), clock, is_first=said is None)
        learned = LearnedCaches(folder / BOOK, budget) if budget else None
        store = open_store(folder / "kv", codec="native")
        config = BlendConfig(ratio=RATIO, correction=False)
        self.blender = RowBlender(cast(Any, self.decoder), store, config, learned)
        self.queue = LoadQueue(self.blender)
        self.outcomes = dict[str, Outcome]()
        self.failed_blocks = set[int]()
        self.history = list[StepNews]()

    def step(self, *loads: Load, cancelled: Sequence[str] = ()) -> None:
        """A step of the engine."""
        self.take(StepNews(loads, tuple(cancelled), self._clock.seconds, turn=1))

    def take(self, news: StepNews) -> None:
        self.history.append(news)
        self.queue.step(news)
        self.outcomes |= self.queue.outcomes
        self.failed_blocks |= self.queue.failed_blocks

    def until(self, count: int, *loads: Load) -> list[str]:
        """Run until so many loads have ended; all that have, in this order."""
        self.step(*loads)
        for _ in range(2000):
            if len(self.outcomes) >= count:
                return list(self.outcomes)
            self.step()
        raise AssertionError(f"only {list(self.outcomes)} have ended")

    def figures(self, *names: str) -> list[dict[str, Any]]:
        return [dict(self.outcomes[name].figures) for name in names]

    def close(self) -> None:
        self.blender.close()
