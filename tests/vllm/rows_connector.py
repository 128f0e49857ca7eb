"""kvblend's connector for proofs: loads of prompts that end with `FAILS` fail, and a slow disk is waited for."""

import threading
from collections.abc import Callable, Collection, Hashable

from blend.errors import StoreError
from blend.integrations.vllm.connector import KVBlend
from blend.integrations.vllm.decoder import Passes
from blend.integrations.vllm.loads import BlendedLoad, RowBlender
from blend.integrations.vllm.row_model import WorkerGroup
from blend.integrations.vllm.scheduler import Load
from blend.serve.flights import Flight

FAILS = 509
"""The last token of prompts that fail: behind the first pass, or, of several workers, in the last one before its first pass."""
blending, together = RowBlender.blending, WorkerGroup.together
running = list[Load]()


def fails() -> bool:
    return running[0].ticket.layout.suffix[-1] == FAILS


def blending_that_fails(blender: RowBlender, load: Load, flight: Flight) -> Passes[BlendedLoad]:
    running[:] = [load]
    if fails() and blender.decoder.workers == 1:
        next(blending(blender, load, flight))
        raise StoreError("it fails in a test")
    return (yield from blending(blender, load, flight))


def together_that_fails(workers: WorkerGroup, step: Callable[[], Hashable]) -> None:
    def uneven() -> Hashable:
        if workers.rank == workers.size - 1 > 0 and fails():
            raise StoreError("the last worker fails in a test")
        return step()

    together(workers, uneven)


is_patient = threading.Event()
"""While it is set, prompts wait for a store however long it stalls the owner of text that they share."""
is_patient.set()
is_overdue = Flight.is_overdue


def is_overdue_at_last(flight: Flight, names: Collection[bytes], times: int = 1) -> bool:
    return not is_patient.is_set() and is_overdue(flight, names, times)


Flight.is_overdue = is_overdue_at_last  # type: ignore[method-assign]
RowBlender.blending = blending_that_fails  # type: ignore[method-assign]
WorkerGroup.together = together_that_fails  # type: ignore[method-assign]

__all__ = ["FAILS", "KVBlend"]
