"""Whose turn it is, and what each forward pass computes.

A pass takes the next row of every running answer and a piece of one prompt's prefill, so answers go on while prompts are
blended. A pass over few rows takes as long as reading the weights, so answers share that cost. Now and then a piece of a
chunk's cache takes the place of the prompt's.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from blend.serve.sequence import Sequence
from blend.serve.types import EndReason, QueueFullError
from blend.timing import Stopwatch

if TYPE_CHECKING:
    import torch

    from blend.model.decoder import Decoder
    from blend.model.forward import RowRequest
    from blend.serve.background import EncodingQueue, IOPool

STEP_S = 30.0
"""Seconds of waiting that count as one step of priority: long for a prompt, short for a client."""
ROWS_ALONE = 256
TURN = 4  # while answers run, one pass in so many computes a piece of a chunk's cache
# The same while prompts are prefilled. Without it a server with a full queue would compute what its store lost in every prompt,
# never store it, and slow down with each cache that it loses.
TURN_AMONG_PROMPTS = 8

OnPass = Callable[[int, int, float], None]
"""Called after a pass with its rows, the keys that they attended to in total, and seconds."""


class WaitingQueue:
    """At most `most` waiting prompts: by priority, then tenants in turn, then by arrival. Used under the engine's lock.

    Every `STEP_S` seconds a prompt counts as one step more urgent, until it equals the most urgent that waits. It gains no
    more, because within a priority the turns of tenants decide. A named tenant takes at most half of the places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[Sequence] = []
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}  # of each tenant
        self._admitted, self._others_waited = time.monotonic(), False
        self._interval_s = 0.0  # between two admissions while others waited

    def __len__(self) -> int:
        return len(self._waiting)

    def require_room(self, tenant: str) -> None:
        """Raise `QueueFullError` if this tenant may not add another prompt."""
        tenants = [sequence.request.tenant for sequence in self._waiting]
        if len(tenants) >= self._most:
            raise QueueFullError(len(tenants), self._place_free_s)
        mine = tenants.count(tenant)
        if tenant and mine >= max(1, self._most // 2):
            raise QueueFullError(mine, self._place_free_s * len(set(tenants)))

    @property
    def _place_free_s(self) -> float:
        """Seconds until the next admission: the recent average, or longer if it takes longer now."""
        return max(1.0, self._interval_s, time.monotonic() - self._admitted)

    def add(self, sequence: Sequence) -> None:
        """Add it at the end."""
        self._waiting.append(sequence)

    def first(self, eligible: Callable[[Sequence], bool] = lambda sequence: True) -> Sequence | None:
        """The next of those that are eligible."""
        highest = min((sequence.request.priority for sequence in self._waiting), default=0)

        def order(sequence: Sequence) -> tuple[int, int, int]:
            request = sequence.request
            aged = max(highest, request.priority - int(sequence.age_s / STEP_S))
            return aged, self._last_turn.get(request.tenant, 0), sequence.number

        return min(filter(eligible, self._waiting), key=order, default=None)

    def admit(self, sequence: Sequence) -> None:
        """Remove it; its tenant has had its turn."""
        self._waiting.remove(sequence)
        self._last_turn[sequence.request.tenant] = next(self._turns)
        before, self._admitted = self._admitted, time.monotonic()
        if self._others_waited:
            self._interval_s = 0.8 * (self._interval_s or self._admitted - before) + 0.2 * (self._admitted - before)
        self._others_waited = bool(self._waiting)

    def remove_ended(self) -> list[tuple[Sequence, EndReason]]:
        """Remove the cancelled and the late, and return them with the reason."""
        reasons = [(sequence, sequence.end_reason) for sequence in self._waiting]
        self._waiting = [sequence for sequence, reason in reasons if reason is None]
        self._others_waited = self._others_waited and bool(self._waiting)
        return [(sequence, reason) for sequence, reason in reasons if reason is not None]

    def clear(self) -> list[Sequence]:
        """Remove and return all."""
        sequences, self._waiting = self._waiting, []
        return sequences


class BatchItem(Protocol):
    """Takes part in passes, one after another."""

    def next_rows(self) -> RowRequest:
        """The rows of the next pass."""

    def took(self, logits: torch.Tensor) -> None:
        """Take the logits of its last row, `[1, vocab]`."""

    def retry(self, error: Exception) -> bool:
        """Whether its rows can run again now, after a shared pass failed. Raises `error` if they never can."""

    def fail(self, error: Exception) -> None:
        """Its rows cannot be run."""


class Scheduler:
    """Runs pass after pass over the running prompts. Only the engine's thread calls it.

    loads: the pool in which prompts wait for the store. piece_rows: of a prefill that shares its pass with answers. remember:
    compute and store the caches that prompts lacked. on_pass: called after passes like those of a full prefill.
    """

    def __init__(
        self,
        decoder: Decoder,
        encodings: EncodingQueue,
        loads: IOPool,
        *,
        piece_rows: int,
        remember: bool,
        on_pass: OnPass | None,
    ) -> None:
        self._decoder, self._encodings, self._loads = decoder, encodings, loads
        self._piece_rows, self._on_pass = piece_rows, on_pass
        self.remember = remember
        self._passes = 0

    def run(self, sequences: Iterable[Sequence]) -> bool:
        """Run one pass; False if everything waits for the store."""
        sequences = list(sequences)
        for sequence in sequences:
            if reason := sequence.end_reason:
                sequence.end(reason)
        live = [sequence for sequence in sequences if not sequence.ended]
        prefilling = next((one for one in live if one.blend is None and not one.waits), None)
        if prefilling is not None:
            alone = all(one is prefilling for one in live)  # larger pieces are quicker, and no answer waits
            rows = max(self._piece_rows, ROWS_ALONE) if alone else self._piece_rows
            _guarded(prefilling, partial(self._prepare, prefilling, rows))
        if items := self._batch(live, prefilling):
            run_pass(self._decoder, items, self._on_pass if _as_full_prefill(items) else None)
        if prefilling is not None and prefilling.blend is not None:
            _guarded(prefilling, partial(self._remember_missing, prefilling))
        return bool(items) or prefilling is not None

    def _batch(self, live: list[Sequence], prefilling: Sequence | None) -> list[BatchItem]:
        """The members of the next pass."""
        ready = prefilling is not None and not prefilling.ended and prefilling.piece is not None
        members = [one for one in live if one.blend is not None or (one is prefilling and ready)]
        self._passes += 1
        turn = self._passes % (TURN_AMONG_PROMPTS if ready else TURN) == 0
        encoding = self._encodings.first()
        if encoding is not None and encoding.ready() and (turn or not members):  # `ready` also advances its I/O
            # In place of the prompt's piece: the pass stays as short as the others.
            return [*(one for one in members if one is not prefilling), encoding]
        return [*members]

    def _prepare(self, sequence: Sequence, rows: int) -> None:
        if not sequence.begun:
            sequence.begin(self._loads)
        sequence.prepare(rows)
        if sequence.ended:
            self._remember_missing(sequence)

    def _remember_missing(self, sequence: Sequence) -> None:
        """Queue the caches that the store lacked for this prompt."""
        request = sequence.request
        if self.remember and request.remember and (find := sequence.find_missing()):
            self._encodings.remember(find, request.arrived)


def run_pass(decoder: Decoder, items: list[BatchItem], on_pass: OnPass | None = None) -> None:
    """Run one pass. If it fails, each member runs alone, so that only the faulty one fails."""
    error = _together(decoder, items, on_pass)
    if error is None:
        return
    traceback.clear_frames(error.__traceback__)  # frees the memory of the pass, which may have been exhausted
    for item in items:
        if len(items) == 1:
            item.fail(error)
        else:
            _guarded(item, partial(_alone, decoder, item, error))


def _together(decoder: Decoder, items: list[BatchItem], on_pass: OnPass | None) -> Exception | None:
    requests = [item.next_rows() for item in items]
    watch = None if on_pass is None else Stopwatch(decoder.device)
    try:
        logits = decoder.prefill(requests)
    except Exception as error:
        return error
    if on_pass is not None and watch is not None:
        rows = sum(request.positions.shape[0] for request in requests)
        on_pass(rows, sum(int(request.positions.sum()) for request in requests) + rows, watch.total())
    for number, item in enumerate(items):
        _guarded(item, partial(item.took, logits[number : number + 1]))
    return None


def _alone(decoder: Decoder, item: BatchItem, error: Exception) -> None:
    if item.retry(error):
        item.took(decoder.prefill([item.next_rows()]))


def _guarded(item: BatchItem, call: Callable[[], None]) -> None:
    """An error in here is this item's own: of its selector, the store, or its listener."""
    try:
        call()
    except Exception as error:
        item.fail(error)


def _as_full_prefill(items: list[BatchItem]) -> bool:
    """Whether the pass is a large piece of a prompt that is computed in full, and nothing else."""
    return len(items) == 1 and isinstance(items[0], Sequence) and items[0].full_piece_rows >= ROWS_ALONE
