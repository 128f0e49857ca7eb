"""kvblend's connector for proofs that look into the worker and change what it does."""

from collections.abc import Mapping
from typing import Any

from blend.integrations.vllm import connector
from blend.integrations.vllm.connector import KVBlend
from blend.integrations.vllm.contract import Load
from blend.integrations.vllm.loads import Passes, RowBlender, row_blender
from blend.integrations.vllm.row_model import RowModel
from blend.integrations.vllm.workers import LoadFailedError

FAILS = 509
"""The last token of prompts whose load fails in the last worker, behind its first pass where there is one worker alone."""


class Worker:
    """Has `blender`, which proofs replace, do the loads of a worker."""

    def __init__(self, model: RowModel, options: Mapping[str, Any]) -> None:
        self.blender = row_blender(model, options)
        self.workers = model.site.workers
        self.steps: list[str] = []

    def passes(self, load: Load, figures: dict[str, Any]) -> Passes[None]:
        if load.token_ids[-1] == FAILS and self.workers.size == 1:
            inner = self.blender.passes(load, figures)
            next(inner)
            raise LoadFailedError("it fails in a test")
        for _ in self.blender.passes(load, figures):
            self.steps.append(load.request)
            yield

    @property
    def background(self) -> Any:
        return self.blender.background


WORKERS: list[Worker] = []


def made(model: RowModel, options: Mapping[str, Any]) -> Any:
    worker = Worker(model, options)
    if worker.workers.size > 1:
        fail_in_the_last(worker)
    WORKERS.append(worker)
    return worker


def fail_in_the_last(worker: Worker) -> None:
    """For prompts that end with `FAILS`, opening their caches fails in the last worker alone."""
    together = worker.workers.together
    loading: list[Load] = []
    passes = RowBlender.passes

    def noted(blender: RowBlender, load: Load, figures: dict[str, Any]) -> Passes[None]:
        loading[:] = [load]
        return passes(blender, load, figures)

    def uneven(step: Any) -> None:
        def failing() -> Any:
            if loading[0].token_ids[-1] == FAILS and worker.workers.rank == worker.workers.size - 1:
                raise LoadFailedError("the last worker fails in a test")
            return step()

        together(failing)

    RowBlender.passes = noted  # type: ignore[method-assign]
    worker.workers.together = uneven  # type: ignore[method-assign]


connector.row_blender = made

__all__ = ["FAILS", "WORKERS", "KVBlend"]
