"""Reading a prompt's chunks layer by layer, ahead of the forward pass that needs them.

Threads read, verify and decode into a few buffers that are used in turn; the pass takes a layer when it gets there, and hands
the buffer back. So reading costs time only where the store is slower than the model. The threads do nothing but that: on a CPU
they are asleep or in the system's copies for most of the time, and leave the cores to the model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from blend.model.cpu import compute_alone
from blend.types import Span

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation

_Shapes = tuple[tuple[int, int], tuple[int, int]]
AHEAD = 3  # layers in memory beside the cache, one of them being put in place
THREADS = 2


class LayerSource(Protocol):
    """The cache of a chunk that can be read by layers; `blend.store.ChunkReader` is one. Its attributes: see there."""

    tokens: int
    layers: int
    start: int
    still: bool

    def read_into(self, index: int, keys_out: torch.Tensor, values_out: torch.Tensor) -> None:
        """Copy one layer, verified, into two `[kv_heads, tokens, head_dim]` tensors."""

    def close(self) -> None:
        """Release what is held; idempotent."""


class StagedLayer(NamedTuple):
    """One layer of all chunks as stored: `[kv_heads, rows, head_dim]` each; rows of chunks that are not read hold anything."""

    keys: torch.Tensor
    values: torch.Tensor


class StagedChunk(NamedTuple):
    """A chunk's cache, and at which rows of a `StagedLayer` it belongs."""

    reader: LayerSource
    span: Span


class LayerLoader:
    """Reads every layer of these chunks, in order, each once. Close it, or use it in a `with`.

    rows: of a `StagedLayer`. shapes: of each layer's keys and values. device: where the rows go in the end; for a GPU the
    buffers are page-locked.
    """

    def __init__(
        self,
        chunks: Sequence[StagedChunk],
        rows: int,
        shapes: Sequence[LayerRotation],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._chunks, self._rows, self._dtype = chunks, rows, dtype
        self._shapes = [(layer.key_shape, layer.value_shape) for layer in shapes]
        self._pinned = device.type == "cuda"
        self._buffers: dict[tuple[int, _Shapes], StagedLayer] = {}
        self._busy: list[torch.cuda.Event | None] = [None] * AHEAD
        self._turn = threading.Condition()
        self._free = AHEAD  # layers below this one may be read
        self._done = [0] * len(shapes)  # threads that have read the layer
        self._failed: BaseException | None = None
        self._shares = 0  # of the chunks, each read by a thread
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LayerLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to read. Raises RuntimeError, with nothing left running, when the system has no more threads."""
        shares = [self._chunks[i::THREADS] for i in range(min(THREADS, len(self._chunks)))]
        self._shares = len(shares)
        try:
            for i, share in enumerate(shares):
                thread = threading.Thread(target=self._read, args=(share,), name=f"kvblend-loader-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
            raise

    def take(self, layer: int) -> StagedLayer:
        """The layer, waited for. It may be written to, and is valid until `hand_back`.

        Raises `EntryDamagedError` when a chunk is not what was written, `StoreError` when the store cannot be read.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._failed or self._done[layer] == self._shares)
            if self._failed is not None:
                raise self._failed
        return self._buffer(layer)

    def hand_back(self, layer: int, used: torch.cuda.Event | None = None) -> None:
        """Let the buffer of `layer` be used again, on a GPU once the event `used` has come."""
        with self._turn:
            self._busy[layer % AHEAD] = used
            self._free = max(self._free, layer + 1 + AHEAD)
            self._turn.notify_all()

    def close(self) -> None:
        """Stop reading, and close the entries."""
        with self._turn:
            self._failed = self._failed or RuntimeError("the loader is closed")
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()
        for chunk in self._chunks:
            chunk.reader.close()

    def _read(self, chunks: Sequence[StagedChunk]) -> None:
        try:
            # Each thread would get helpers of its own for its copies. GNU's OpenMP counts them, and with more threads than
            # cores it puts those that wait to sleep at once: the model's own too, and passes take two to three times as long.
            compute_alone()
            with torch.inference_mode():
                for layer in range(len(self._shapes)):
                    if not self._wait(layer):
                        return
                    keys, values = self._buffer(layer)
                    for reader, span in chunks:
                        reader.read_into(layer, keys[:, span.start : span.stop], values[:, span.start : span.stop])
                    with self._turn:
                        self._done[layer] += 1
                        self._turn.notify_all()
        except BaseException as error:  # the pass that waits for this layer raises it
            with self._turn:
                self._failed = self._failed or error
                self._turn.notify_all()

    def _wait(self, layer: int) -> bool:
        """Wait for the layer's buffer; whether to go on."""
        with self._turn:
            self._turn.wait_for(lambda: self._failed or layer < self._free)
            if self._failed is not None:
                return False
            used = self._busy[layer % AHEAD]
        if used is not None:
            used.synchronize()
        return True

    def _buffer(self, layer: int) -> StagedLayer:
        """The buffer of a layer: layers of one shape that are `AHEAD` apart share it."""
        shape = self._shapes[layer]
        with self._turn:
            if (layer % AHEAD, shape) not in self._buffers:
                self._buffers[layer % AHEAD, shape] = StagedLayer(*(self._empty(*part) for part in shape))
            return self._buffers[layer % AHEAD, shape]

    def _empty(self, heads: int, width: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.empty((heads, self._rows, width), dtype=self._dtype, pin_memory=self._pinned)
