"""Blends prompts and writes them as slot files, in one thread; learns their text when nothing else is to be done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from blend.attached.known import KnownTexts
from blend.files import sweep, temporary_path
from blend.integrations.llamacpp.cache import CellCache
from blend.integrations.llamacpp.decoder import CellDecoder
from blend.integrations.llamacpp.slots import write_slot
from blend.layout import PromptLayout, Tokens
from blend.serve.engine.savings import LEAST_GAIN, reason_against
from blend.serve.events import NOTHING
from blend.serve.failures import log_error
from blend.stopwatch import Progress
from blend.types import CacheKey

MOST_CHORES = 1024  # that wait for silence
HELD = "llama-server holds most of it"

Chore = Callable[[Progress], object]
"""Work for times of silence. It reports its progress, which may raise."""

_Result = TypeVar("_Result")


class SlotFile(NamedTuple):
    """A prompt's first rows in a file that a slot can be filled from.

    Attributes:
        path: of the file.
        rows: of the prompt.
        restored: rows in the file, all but the prompt's last one.
        reused: rows of the prompt that were not computed in every layer.
        seconds: that it took.

    """

    path: Path
    rows: int
    restored: int
    reused: int
    seconds: float

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class _BusyAgainError(Exception):
    """A prompt came during a chore."""


class SlotFiles:
    """Blends prompts into files. `close` ends its thread.

    Args:
        texts: the text that is known. Its decoder is llama.cpp's.
        folder: where files are written, llama-server's `--slot-save-path`.

    """

    def __init__(self, texts: KnownTexts, folder: Path) -> None:
        decoder: Any = texts.blender.decoder
        assert isinstance(decoder, CellDecoder)
        self.decoder = decoder
        self.folder = folder
        self._texts = texts
        self._thread = ThreadPoolExecutor(1, "kvblend-blending")
        self._chores = deque[Chore](maxlen=MOST_CHORES)
        self._missing = set[CacheKey]()
        self._is_fitted = not texts.learns
        self._is_fitting = False
        self._is_closed = False

    def close(self) -> None:
        """Finish what runs; the rest is given up."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    def warm_up(self) -> None:
        """Read what the first prompt would wait for."""
        self._texts.read_corpora()

    def new_path(self) -> Path:
        """Where a file may be written."""
        return temporary_path(self.folder)

    def sweep(self) -> None:
        """Remove what processes left behind that were killed."""
        sweep(self.folder)

    # Prompts

    async def write(self, ids: Tokens, user: str, reusable: int) -> SlotFile | str:
        """Blend a prompt into a file, unless there is little to gain: then the reason.

        Args:
            ids: the prompt.
            user: the end user whose learned text it may use.
            reusable: its first rows that llama-server need not compute anyway.

        Raises:
            BlendError: it cannot be blended, or not be written.

        """
        if self._is_fitting:
            return "the KV correction is being fitted"
        return await self._run(partial(self._write, ids, user, reusable), _discard)

    async def write_exactly(self, ids: Tokens) -> SlotFile:
        """Compute a prompt in full into a file. Raises `BlendError`."""
        return await self._run(partial(self._write_exactly, ids), _discard)

    async def _run(self, work: Callable[[], _Result], discard: Callable[[Future[_Result]], None]) -> _Result:
        """Do it in the thread. discard: what becomes of a result that comes after its client has left."""
        future = self._thread.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(discard)
            raise

    @torch.inference_mode()
    def _write(self, ids: Tokens, user: str, reusable: int) -> SlotFile | str:
        begin = perf_counter()
        longest = self.decoder.context_length or 0
        if len(ids) > longest:
            return f"the prompt has more than {longest} tokens; see tokens of --engine-options"
        texts = self._texts
        texts.compute_recurring([ids], user)  # what was not learned yet because there was no silence
        layout = texts.layout(ids, user)
        if layout.token_ids != ids:
            return NOTHING
        for piece in texts.note_new(layout, user):
            self._chores.append(partial(texts.compute, [piece], user))
        self._see_to(layout)
        reason = self._reason_against(layout, reusable)
        if reason:
            return reason
        blend = texts.prefill(layout)
        reused = layout.rows - blend.rows_recomputed
        assert isinstance(blend.cache, CellCache)
        return self._written(blend.cache, ids, reused, begin)

    def _see_to(self, layout: PromptLayout) -> None:
        """Have the caches computed that a prompt lacks: later; now if a prompt has lacked them before."""
        missing = set(self._texts.missing(layout))
        if missing & self._missing:
            self._texts.compute_missing(layout)
            self._missing -= missing
        elif missing:
            self._missing |= missing
            self._chores.append(partial(self._texts.compute_missing, layout))

    def _reason_against(self, layout: PromptLayout, reusable: int) -> str:
        """Why llama-server computes what it does not hold of a prompt, or ""."""
        blender = self._texts.blender
        if not reason_against(blender, layout, blender.config, LEAST_GAIN + reusable):
            return ""
        return reason_against(blender, layout, blender.config) or HELD

    @torch.inference_mode()
    def _write_exactly(self, ids: Tokens) -> SlotFile:
        begin = perf_counter()
        cache = self.decoder.new_cache(len(ids))
        self.decoder.encode_rows(torch.tensor([ids]), 0, cache)
        return self._written(cache, ids, 0, begin)

    def _written(self, cache: CellCache, ids: Tokens, reused: int, begin: float) -> SlotFile:
        path = self.new_path()
        try:
            write_slot(cache, ids[:-1], path)
        finally:
            cache.free()
        return SlotFile(path, len(ids), len(ids) - 1, reused, perf_counter() - begin)

    # Learning

    async def learn(self, is_idle: Callable[[], bool]) -> None:
        """Compute the caches that prompts lacked, one after another, as long as nothing else is to be done."""
        while self._chores and is_idle():
            chore = self._chores.popleft()
            if not await self._run(partial(self._do, chore, is_idle), _ignore):
                self._chores.appendleft(chore)

    async def fit(self, is_idle: Callable[[], bool]) -> None:
        """Fit the KV correction that learned text needs, once. Prompts are forwarded as they are meanwhile."""
        if self._is_fitted or not is_idle():
            return
        self._is_fitting = True
        try:
            self._is_fitted = await self._run(partial(self._do, self._texts.fit, is_idle), _ignore)
        finally:
            self._is_fitting = False

    @torch.inference_mode()
    def _do(self, chore: Chore, is_idle: Callable[[], bool]) -> bool:
        """Do a chore; False if it was ended by a prompt, and goes on another time."""

        def progress(*_: object) -> None:
            if self._is_closed or not is_idle():
                raise _BusyAgainError

        try:
            chore(progress)
        except _BusyAgainError:
            return False
        except Exception as error:  # it is not repeated
            log_error(error, "idle")
        return True


def _discard(future: Future[Any]) -> None:
    """Remove the file of a client that has left."""
    if not future.cancelled() and future.exception() is None and isinstance(written := future.result(), SlotFile):
        written.remove()


def _ignore(_: Future[bool]) -> None:
    pass
