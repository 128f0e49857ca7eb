"""The most recently used chunks of a pool on the GPU as well, from which they are placed at the rate of its own memory."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from blend.errors import first_line

if TYPE_CHECKING:
    import torch

    from blend.store.ready import ReadyChunk
    from blend_kernels import ChunkKV

LOG = logging.getLogger("kvblend.store")
DEFAULT_SHARE = 0.3  # of the GPU memory that is free once the model is loaded


class GpuTier:
    """Copies chunks to the GPU behind answers, and drops the least recently used ones above a budget.

    A prompt that uses a chunk keeps its memory: what is dropped is freed when the last prompt is done with it.

    Args:
        budget_bytes: most bytes of GPU memory.
        copy: copies a chunk's KV to the GPU and waits until it is there. Raises RuntimeError where there is no memory.

    Attributes:
        nbytes: bytes of the chunks that are there.

    """

    def __init__(self, budget_bytes: int, copy: Callable[[ChunkKV], ChunkKV]) -> None:
        self.budget_bytes = budget_bytes
        self._copy = copy
        self._chunks: OrderedDict[ReadyChunk, int] = OrderedDict()  # only the thread below looks at it
        self.nbytes = 0
        self._threads = ThreadPoolExecutor(1, "kvblend-gpu-tier")

    @classmethod
    def on(cls, device: torch.device, budget_bytes: int | None) -> GpuTier:
        """A tier in this GPU's memory; without a budget a share of what is free there now."""
        import torch

        if budget_bytes is None:
            budget_bytes = int(DEFAULT_SHARE * torch.cuda.mem_get_info(device)[0])
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def copy(kv: ChunkKV) -> ChunkKV:
            with torch.cuda.stream(stream), torch.inference_mode():
                near = kv.to(device)
            stream.synchronize()
            return near

        LOG.info("kvblend keeps up to %.1f GB of chunk caches on the GPU (--gpu-budget)", budget_bytes / 1e9)
        return cls(budget_bytes, copy)

    def bring(self, chunks: Iterable[ReadyChunk]) -> None:
        """Have these chunks there soon, as the most recently used ones. Returns at once."""
        if self.budget_bytes > 0:
            self._threads.submit(self._bring, list(chunks))

    def settle(self) -> None:
        """Wait until what was asked for is there."""
        self._threads.submit(lambda: None).result()

    def _bring(self, chunks: Iterable[ReadyChunk]) -> None:
        for chunk in chunks:
            nbytes = chunk.kv.memory.numel()
            is_there = chunk in self._chunks
            if is_there:
                self._chunks.move_to_end(chunk)
            if is_there or nbytes > self.budget_bytes:
                continue
            self._drop_until(self.budget_bytes - nbytes)
            try:
                near = self._copy(chunk.kv)
            except RuntimeError as error:  # the model needs the memory
                LOG.warning("kvblend: no more chunk caches on the GPU: %s", first_line(error))
                self.budget_bytes = self.nbytes
                return
            chunk.near = near
            self._chunks[chunk] = nbytes
            self.nbytes += nbytes

    def _drop_until(self, most: int) -> None:
        while self.nbytes > most:
            chunk, nbytes = self._chunks.popitem(last=False)
            chunk.near = chunk.kv
            self.nbytes -= nbytes
