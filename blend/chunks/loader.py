"""Reads, verifies and decodes the layers of chunks in threads, ahead of the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from blend.errors import EntryDamagedError
from blend.model import cpu
from blend.store.reader import require_finite
from blend.store.ready import ReadyChunk, parts_of

if TYPE_CHECKING:
    from blend.store.reader import ChunkReader


THREADS = 2


class LayerLoader:
    """Reads every layer of chunks once, in order, in threads.

    The threads only read, verify and decode; on a CPU they leave the cores to the model.

    Args:
        layers: how many the decoder has.

    Attributes:
        readers: the chunks, whose memory is read into, and their open entries.

    """

    def __init__(self, layers: int) -> None:
        self.readers: dict[ReadyChunk, ChunkReader] = {}
        self._layers = layers
        self._reading: list[list[Future[None]]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._is_read = False

    @property
    def is_complete(self) -> bool:
        """Whether every layer is there, without a thread that reads it."""
        return self._is_read or not self.readers

    def start(self) -> None:
        """Start reading. Raises RuntimeError, with nothing left running, if the system has no more threads."""
        if self.is_complete:
            return
        # One thread a worker: else OpenMP starts a team for each. With more threads than cores it puts waiting threads to
        # sleep at once, the model's too, and forward passes take two to three times as long.
        self._threads = ThreadPoolExecutor(THREADS, "kvblend-loader", initializer=cpu.use_one_thread)
        pairs = list(self.readers.items())
        shares = [pairs[number::THREADS] for number in range(min(THREADS, len(pairs)))]
        try:
            for layer in range(self._layers):
                reads = [self._threads.submit(self._read, layer, share) for share in shares]
                self._reading.append(reads)
        except RuntimeError:
            self.close()
            raise

    def wait(self, layer: int) -> None:
        """Wait until a layer is there.

        Raises `EntryDamagedError` when an entry is not what was written, `StoreError` when the store cannot be read.
        """
        if self._reading:
            for share in self._reading[layer]:
                share.result()

    def read_all(self) -> dict[ReadyChunk, str]:
        """Read every layer in this thread; a line for every chunk whose entry is damaged. Raises `StoreError` as `wait`."""
        damaged: dict[ReadyChunk, str] = {}
        for chunk, reader in self.readers.items():
            try:
                for layer in range(self._layers):
                    self._read(layer, [(chunk, reader)])
            except EntryDamagedError as error:
                damaged[chunk] = str(error)
        self._is_read = not damaged
        return damaged

    def wait_for_all(self) -> None:
        """Wait until every layer is there. Raises as `wait`."""
        for shares in self._reading:
            for share in shares:
                share.result()

    def close(self) -> None:
        """Stop reading."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _read(self, layer: int, share: Iterable[tuple[ReadyChunk, ChunkReader]]) -> None:
        for chunk, reader in share:
            kv = chunk.kv
            parts = {"k": kv.keys[layer], "v": kv.values[layer]}
            if kv.shape.packing != "plain":
                parts = parts_of(kv, layer)
                reader.read_parts(layer, parts)
            elif kv.keys[layer].numel() or kv.values[layer].numel():
                reader.read_into(layer, kv.keys[layer], kv.values[layer])
            operator = reader.operator(layer)
            if reader.has_operators:
                chunk.operators[layer] = operator
            require_finite(chunk.address, layer, (*parts.values(), *operator))
