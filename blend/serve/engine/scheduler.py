"""The engine: admits prompts, and decides what each forward pass computes.

A pass takes the next row of every running answer and a piece of one prompt's prefill, so answers go on while prompts are
blended. A pass over few rows takes as long as reading the weights, so answers share that cost. Now and then a piece of a
chunk's cache takes the place of the prompt's. Calls that may wait for a store run in I/O pools.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from blend.errors import PromptError, StoreError
from blend.model import cpu
from blend.model.cpu import set_threads
from blend.serve.engine.background import TURN, TURN_AMONG_PROMPTS, EncodingQueue, IOPool, OnDone
from blend.serve.engine.comparison import ComparisonQueue
from blend.serve.engine.edits import Spelling
from blend.serve.engine.histories import Histories
from blend.serve.engine.prefixes import PrefixCache
from blend.serve.engine.room import KVRoom
from blend.serve.engine.savings import LEAST_GAIN, gains_from
from blend.serve.engine.sequence import Sequence
from blend.serve.events import EngineFailedError, EngineStats, OnEvent, QueueFullError
from blend.serve.failures import STORE_UNREACHABLE, log_error
from blend.serve.limits import KV_BUDGET, MOST_RUNNING, MOST_WAITING, PREFIX_BUDGET
from blend.serve.prompt import Prompt

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.decoder import Decoder
    from blend.model.passes import RowRequest
    from blend.prefill.blender import Blender
    from blend.types import CacheKey


STEP_S = 30.0
"""Seconds of waiting that count as one step of priority: long for a prompt, short for a client."""
ROWS_ALONE = 256
LOADING = 2  # prompts whose caches are loaded at a time
LOOK_S = 0.05  # how often cancelled prompts are looked for while everything waits for the store
CPU_ROWS = 80  # five times as long as a pass of one row; more would only make answers wait
GPU_ROWS = 1024
TRIM_S = 60.0
"""Seconds between two returns of freed memory to the system, while nothing runs. A return takes .2 s a gigabyte."""


class EmbeddedEngine:
    """Answers prompts over a blender's decoder and store, many at once. Threads may share it.

    With `BlendConfig.reproducible`, prompts leave nothing to later ones, and each pass computes one answer's row or
    one prompt's piece: the same rows together with others have other last bits, from which other answers may follow.

    Args:
        blender: blended prefill; its decoder answers.
        blender_of: the blender of a tenant's corpus, on the same decoder; default: `blender` for all.
        most_running: most answers in progress.
        most_waiting: most prompts in the queue.
        pass_rows: most rows of one pass, decoding and prefill together.
        kv_budget: bytes for the KV caches of running prompts and their answers; a prompt waits until there is room.
        prefix_budget: bytes of the prefix cache.
        least_gain: rows that blending must save.
        remember: compute and store the caches that prompts missed, when idle.

    """

    def __init__(
        self,
        blender: Blender,
        *,
        blender_of: Callable[[str, str], Blender] | None = None,
        most_running: int = MOST_RUNNING,
        most_waiting: int = MOST_WAITING,
        pass_rows: int | None = None,
        kv_budget: int = KV_BUDGET,
        prefix_budget: int = PREFIX_BUDGET,
        least_gain: int = LEAST_GAIN,
        remember: bool = True,
    ) -> None:
        self.blender = blender
        self.decoder = blender.decoder
        self._reproducible = blender.config.reproducible
        if self._reproducible:
            self.decoder.graphs = None  # they are captured while it runs, and may round otherwise
        self._least_gain = least_gain
        self._blender_of = blender_of or (lambda tenant, corpus: blender)
        self._most_running = min(most_running, self.decoder.most_caches or most_running)
        if pass_rows is None:
            pass_rows = CPU_ROWS if self.decoder.device.type == "cpu" else GPU_ROWS
        self._piece_rows = max(1, pass_rows - most_running)
        self._room = KVRoom(self.decoder, kv_budget)
        self.prefixes = PrefixCache(0 if self._reproducible else prefix_budget)
        self.histories = Histories(Spelling(self.decoder.tokenizer))
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting = WaitingQueue(most_waiting)
        self._running: list[Sequence] = []
        self._loads = IOPool("kvblend-loads", LOADING, self._wake)
        self._caches = IOPool("kvblend-caches", 1, self._wake)
        self._ahead = IOPool("kvblend-ahead", 1, lambda: None)
        self._encodings = EncodingQueue(self._caches, self._piece_rows, fits=self._fits_chunk)
        self._comparisons = ComparisonQueue(self.decoder, self.prefixes, self.histories, self._piece_rows)
        self._remember = remember and not self._reproducible
        self._passes = itertools.count(1)
        self._trimmed = time.monotonic()
        self._open = True
        self._failed = self._idle = self._news = self._closing = False
        self._threads = torch.get_num_threads()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kvblend-engine", daemon=True)
        cpu.end_helpers()  # of the calling thread, which often has computed: it loaded the model
        self._thread.start()
        self._begun.wait()

    def submit(self, prompt: Prompt, on_event: OnEvent) -> Sequence:
        """Accept a prompt; its events go to `on_event`, from the engine's thread.

        Raises `PromptError` if it can never run, `QueueFullError` if too many wait, `EngineFailedError` if the engine has died.
        """
        if self._reproducible:
            prompt = _without_history(prompt)
        layout = prompt.layout
        sampling = prompt.sampling
        tenant = prompt.request.tenant
        self.decoder.check_length(layout.rows + sampling.max_tokens)
        if wrong := [token for token in sampling.logit_bias if token >= self.decoder.vocabulary]:
            last = self.decoder.vocabulary - 1
            raise PromptError(f"logit_bias names the token {wrong[0]}; the model has those from 0 to {last}")
        if sampling.n > self._most_running:
            raise PromptError(f"n is {sampling.n}; this server computes at most {self._most_running} answers at a time")
        blender = self.blender  # full prefill needs no store, so any blender does
        if not prompt.full_because:
            try:
                blender = self._blender_of(tenant, prompt.corpus)
            except StoreError:  # the tenant's store cannot be opened
                prompt = replace(prompt, full_because=STORE_UNREACHABLE)
        sequence = Sequence(
            prompt, blender, self.prefixes, self.histories, next(self._numbers), on_event, least_gain=self._least_gain
        )
        self._room.require(sequence)
        with self._changed:
            self.require_room(tenant)
            must_wait = bool(self._running or self._waiting)
            self._waiting.add(sequence)
            self._wake()
        if must_wait and blender.store.backend.is_elsewhere and not prompt.full_because:
            self._ahead.start(partial(self._bring, sequence, blender))
        return sequence

    def _bring(self, sequence: Sequence, blender: Blender) -> None:
        """Bring the caches of a prompt that waits for its turn to this machine."""
        layout = sequence.prompt.layout
        if sequence.begun or not self._open:
            return
        with suppress(StoreError):  # it shows when the prompt's turn comes
            blender.library(layout.kept_behind).bring(layout)

    def doubt(self, tenant: str, author: str) -> None:
        """Full recompute gave another answer than an author's blended rows: forget them, and move none until some are exact."""
        for earlier in self.histories.doubt(tenant, author):
            self.prefixes.drop_blended(earlier.conversation)

    def require_room(self, tenant: str = "") -> None:
        """Raise `QueueFullError` if too many prompts wait, of this tenant or of all, and `EngineFailedError`."""
        with self._changed:
            self._require_open()
            self._waiting.require_room(tenant)

    def _require_open(self) -> None:
        if self._failed:
            raise EngineFailedError
        if not self._open:
            raise QueueFullError(len(self._waiting), 1.0)

    def stats(self) -> EngineStats:
        """Its load now."""
        with self._changed:
            used = self._used_bytes
            counts = len(self._running), len(self._waiting), used, self._room.budget
        return EngineStats(
            *counts, self.prefixes.nbytes, len(self._encodings), self.prefixes.evictions, len(self._comparisons)
        )

    def wait_idle(self, seconds: float, *, prompts_alone: bool = False) -> bool:
        """Wait until nothing is running, waiting or being computed; False if that takes longer.

        prompts_alone: caches may be computed meanwhile.
        """

        def idle() -> bool:
            background = self._encodings or self._comparisons
            return not (self._running or self._waiting or (background and not prompts_alone))

        with self._changed:
            return self._changed.wait_for(idle, seconds)

    @property
    def alive(self) -> bool:
        """Whether its thread runs and no fault has ended its work."""
        return not self._failed and self._thread.is_alive()

    def encode(self, library: ChunkLibrary, variants: abc.Sequence[CacheKey], on_done: OnDone) -> None:
        """Compute and store these caches in small pieces, between the passes of answers."""
        with self._changed:
            self._require_open()
            self._encodings.add(library, variants, on_done)
            self._wake()

    def close(self, finish_s: float = 0.0) -> None:
        """Accept nothing more, let running answers finish within `finish_s`, and end the rest."""
        until = time.monotonic() + finish_s
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not (self._running or self._waiting), max(0.0, until - time.monotonic()))
            self._closing = True  # the loop ends everything
            self._wake()
        self._thread.join()

    @property
    def _used_bytes(self) -> int:
        """Of running prompts, and of the chunk whose cache is computed between them if that counts."""
        chunk_rows = self._encodings.rows if self._room.counts_chunks else 0
        return self._room.bytes_of(sum(sequence.capacity for sequence in self._running) + chunk_rows)

    def _fits_chunk(self, rows: int) -> bool:
        """Whether a chunk's cache of so many rows may be begun: it takes no room from a prompt that waits for it."""
        if not (self._room.counts_chunks and self._running):
            return True
        with self._changed:
            next_prompt = self._waiting.first()
        waiting_rows = 0 if next_prompt is None else next_prompt.capacity
        return self._used_bytes + self._room.bytes_of(waiting_rows + rows) <= self._room.budget

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def _loop(self) -> None:
        set_threads(self._threads)
        self._begun.set()
        try:
            while self._turn():
                pass
        except BaseException as error:  # a bug: no client may wait for an answer that never comes
            log_error(error, "engine")
            with self._changed:
                self._failed = True
        self._end_all()

    def _turn(self) -> bool:
        """Wait for something to do, admit, and run one pass. False ends the loop."""
        self._trim_memory()
        self._capture_graphs()
        with self._changed:
            if not (self._waiting or self._running or self._encodings or self._comparisons or self._closing):
                self._changed.notify_all()
                self._changed.wait(TRIM_S)
            elif self._idle and not self._news:
                self._changed.wait(LOOK_S)
            self._news = False
            if self._closing:
                return False
            self._running += self._waiting.remove_ended()  # to be ended like the others
            self._admit()
            running = list(self._running)
        with torch.inference_mode():
            self._idle = not self.step(running)
        self._release_ended()
        return True

    def step(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Run one pass of these, in the engine's thread; False if everything waits for the store."""
        for sequence in sequences:
            if reason := sequence.end_reason:
                sequence.end(reason)
        live = [sequence for sequence in sequences if not sequence.ended]
        prefilling = next((sequence for sequence in live if sequence.blend is None and not sequence.waits), None)
        if prefilling is not None:
            # Larger pieces are quicker, and delay nobody: no answer runs. A less urgent prompt keeps to small ones.
            alone = all(sequence is prefilling for sequence in live) and prefilling.request.priority <= 0
            rows = max(self._piece_rows, ROWS_ALONE) if alone or self._reproducible else self._piece_rows
            _guarded(prefilling, partial(prefilling.prepare, rows, self._loads))
        waiting = (sequence for sequence in live if sequence.answers_left and not sequence.ended)
        begun = next((sequence for sequence in waiting if sequence is not prefilling), None)
        if begun is not None:
            _guarded(begun, begun.begin_answer)
        items = self._batch(live, prefilling)
        for batch in [[item] for item in items] if self._reproducible else filter(None, [items]):
            run_pass(self.decoder, batch)
        if prefilling is not None and prefilling.blend is not None:
            _guarded(prefilling, partial(self._remember_missing, prefilling))
        return bool(items) or prefilling is not None or begun is not None

    def _batch(self, live: list[Sequence], prefilling: Sequence | None) -> list[BatchItem]:
        """The members of the next pass."""
        ready = prefilling is not None and not prefilling.ended and prefilling.piece is not None
        answers = [answer for sequence in live if not sequence.ended for answer in sequence.answers]
        turn = next(self._passes) % (TURN_AMONG_PROMPTS if ready else TURN) == 0
        if not (answers or ready) and self._comparisons.ready():
            return [self._comparisons]
        if self._encodings.ready() and (turn or not (answers or ready)):  # `ready` also advances its I/O
            # In place of the prompt's piece: the pass stays as short as the others.
            return [*answers, self._encodings]
        return [*answers, prefilling] if prefilling is not None and ready else [*answers]

    def _remember_missing(self, sequence: Sequence) -> None:
        """Queue the caches that this prompt missed."""
        prompt = sequence.prompt
        if self._remember and self._open and prompt.remember and (find := sequence.find_missing()):
            self._encodings.remember(find, prompt.request.arrived)

    def _end_all(self) -> None:
        """End what is left: the server shuts down, or the engine has failed."""
        with self._changed:
            sequences = [*self._running, *self._waiting.clear()]
            self._running = []
            self._changed.notify_all()
        for sequence in sequences:
            if self._failed:
                sequence.fail(EngineFailedError())
            else:
                sequence.end("shutdown")
        self._encodings.close(EngineFailedError() if self._failed else None)
        self._loads.close()
        self._caches.close()
        self._ahead.close()
        for sequence in sequences:
            sequence.release()

    def _admit(self) -> None:
        """Admit the next prompt if it can begin at once; until then a more urgent one may come."""
        sequence = self._waiting.first(
            lambda waiting: not any(_goes_before(running, waiting) for running in self._running)
        )
        if sequence is None:
            return
        used = self._used_bytes
        answers = sum(member.prompt.sampling.n for member in (*self._running, sequence))
        if answers > self._most_running or used + self._room.bytes_of(sequence.capacity) > self._room.budget:
            return  # smaller prompts must not overtake it for ever
        self._waiting.admit(sequence)
        self._comparisons.clear()
        self._running.append(sequence)

    def _release_ended(self) -> None:
        with self._changed:
            ended = [sequence for sequence in self._running if sequence.ended and not sequence.waits]
            if ended:
                self._news = True
                self._running = [sequence for sequence in self._running if sequence not in ended]
                self._changed.notify_all()
        for sequence in ended:
            if sequence.comparison is not None and not self._running:
                self._comparisons.add(sequence.comparison)
            sequence.release()

    def _capture_graphs(self) -> None:
        """Have the decoder capture its graphs while nothing is asked for."""
        graphs = self.decoder.graphs
        while graphs is not None and not (self._waiting or self._running or self._encodings or self._closing):
            if not graphs.capture_next():
                return
            _ = self.decoder.pass_rows  # timed now, not at a prompt

    def _trim_memory(self) -> None:
        """Give freed memory back to the system, that of other threads included."""
        if not self._running and time.monotonic() - self._trimmed >= TRIM_S:
            cpu.trim_heap()
            self._trimmed = time.monotonic()


def _without_history(prompt: Prompt) -> Prompt:
    """The prompt, which takes nothing of earlier ones and leaves nothing. Its seed is 0, unless the request has one."""
    sampling = prompt.sampling if prompt.request.sampling.seed is not None else replace(prompt.sampling, seed=0)
    return replace(prompt, sampling=sampling, author="", learn=None, remember=False)


def _goes_before(running: Sequence, waiting: Sequence) -> bool:
    """Whether a running prompt must be prefilled first: it can go on now, or leaves rows that serve the waiting one."""
    prefilling = running.blend is None and not running.ended
    return prefilling and (not running.waits or gains_from(waiting.prompt, running.prompt))


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
        self._admitted = time.monotonic()

    def __len__(self) -> int:
        return len(self._waiting)

    def require_room(self, tenant: str) -> None:
        """Raise `QueueFullError` if this tenant may not add another prompt."""
        tenants = [sequence.request.tenant for sequence in self._waiting]
        count = tenants.count(tenant)
        if len(tenants) >= self._most or (tenant and count >= max(1, self._most // 2)):
            since_admission_s = time.monotonic() - self._admitted  # the next one may take as long
            raise QueueFullError(count if tenant else len(tenants), max(1.0, since_admission_s))

    def add(self, sequence: Sequence) -> None:
        """Let it wait."""
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
        self._admitted = time.monotonic()

    def remove_ended(self) -> list[Sequence]:
        """Remove and return cancelled and overdue prompts."""
        ended = [sequence for sequence in self._waiting if sequence.end_reason]
        self._waiting = [sequence for sequence in self._waiting if sequence not in ended]
        return ended

    def clear(self) -> list[Sequence]:
        """Remove and return all."""
        sequences, self._waiting = self._waiting, []
        return sequences


class BatchItem(Protocol):
    """Takes part in passes, one after another."""

    def next_rows(self) -> RowRequest:
        """The rows of the next pass."""

    def took(self, logits: torch.Tensor) -> None:
        """Take the logits of its last rows, `[outputs, vocab]`."""

    def fail(self, error: Exception) -> None:
        """Its rows cannot be run."""


def run_pass(decoder: Decoder, items: abc.Sequence[BatchItem]) -> None:
    """Run one pass. If it fails, answers and caches run alone and a prefill begins anew, so that only the faulty one fails."""
    requests = [item.next_rows() for item in items]
    try:
        logits = decoder.prefill(requests)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # frees the memory of the pass, which may have been exhausted
        for item in items:
            if len(items) == 1:
                item.fail(error)
            elif isinstance(item, Sequence):
                _guarded(item, partial(item.restart, error))
            else:
                run_pass(decoder, [item])
        return
    rows = torch.split(logits, [request.outputs for request in requests])
    for item, item_logits in zip(items, rows, strict=True):
        _guarded(item, partial(item.took, item_logits))


def _guarded(item: BatchItem, call: Callable[[], None]) -> None:
    """Let an error fail this item only: it is of its selector, the store or its listener."""
    try:
        call()
    except Exception as error:
        item.fail(error)
