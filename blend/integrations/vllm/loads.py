"""The worker's side: loads are done, in the engine's thread or beside it, and what became of them is told once."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any, NamedTuple

import torch

from blend.integrations.vllm.contract import Load, LoadFailedError, Stage
from blend.model.cpu import compute_alone

_LOG = logging.getLogger("vllm.kvblend")


class Done(NamedTuple):
    """Since the last time: requests whose load ended, which of these failed, and the blocks that hold nothing of use.

    figures: what the stage told of those that did well.
    """

    requests: set[str]
    failed: set[str]
    blocks: set[int]
    figures: dict[str, dict[str, Any]]


class Loads:
    """What `stage` does for requests. Only the engine's thread calls it.

    apart: whether loads run in a thread of their own, so that the batch goes on meanwhile.
    """

    def __init__(self, stage: Stage, block_size: int, *, apart: bool) -> None:
        self._stage, self._block_size, self.apart = stage, block_size, apart
        self._waiting: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done = Done(set(), set(), set(), {})
        self._warned = False
        self._thread = threading.Thread(target=self._loop, name="kvblend-loads", daemon=True) if apart else None
        if self._thread is not None:
            self._thread.start()

    def start(self, load: Load) -> None:
        """Do it now, or beside."""
        if self.apart:
            self._waiting.put(load)
        else:
            self._do(load)

    def rest(self, *, alone: bool) -> None:
        """A step without loads begins. alone: without requests too."""
        if self.apart:
            return
        try:
            with torch.inference_mode():
                self._stage.rest(alone=alone)
        except Exception:  # no request waits for it
            _LOG.warning("kvblend: what was put off could not be done", exc_info=True)

    @property
    def unfinished(self) -> bool:
        """Whether `rest` has more to do."""
        return not self.apart and self._stage.unfinished

    def done(self) -> Done:
        """What has ended since the last call."""
        with self._lock:
            found, self._done = self._done, Done(set(), set(), set(), {})
        return found

    def close(self) -> None:
        """Finish, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(30)
        self._stage.close()

    def _loop(self) -> None:
        compute_alone()  # the cores are the engine's
        while (load := self._waiting.get()) is not None:
            self._do(load)

    def _do(self, load: Load) -> None:
        figures = self._filled(load)
        bad = set(load.blocks[load.start // self._block_size : (load.stop - 1) // self._block_size + 1])
        with self._lock:
            self._done.requests.add(load.request)
            if figures is not None:
                self._done.figures[load.request] = figures
            else:
                self._done.failed.add(load.request)
                self._done.blocks.update(bad)

    def _filled(self, load: Load) -> dict[str, Any] | None:
        """What the stage tells of a load; None for one that failed."""
        try:
            with torch.inference_mode():
                figures = self._stage.fill(load) or {}
        except Exception as error:  # whatever it is, vLLM can compute these rows itself
            if not self._warned:  # one line an outage
                known = isinstance(error, LoadFailedError)
                _LOG.warning("kvblend: %s; vLLM prefills by itself until it works again", error, exc_info=not known)
            self._warned = True
            return None
        if self._warned:
            _LOG.info("kvblend: blended KV comes again")
        self._warned = False
        return figures
