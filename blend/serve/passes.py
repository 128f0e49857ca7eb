"""One forward pass for many: each gets what it gets alone, and where the pass fails only whoever is to blame fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from blend.timing import Stopwatch

if TYPE_CHECKING:
    import torch

    from blend.model.decoder import Decoder
    from blend.model.forward import RowRequest

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
