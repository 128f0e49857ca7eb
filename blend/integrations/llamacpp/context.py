"""A llama.cpp context: sequences of cells, passes over rows, and a look at the attention of a pass.

All prompts share the cells of one unified cache. A sequence is a set of cells: `lend` copies no data. One pass at a time.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blend.errors import ConfigError, PromptError
from blend.integrations.llamacpp.library import DecodeBatch, GraphTensor, OnNode
from blend.integrations.llamacpp.model import GGUFModel
from blend.integrations.llamacpp.state import F16, F32, Q8_0, Bytes, StateFormat

CACHE_TYPES = {"f16": F16, "q8_0": Q8_0}
SEQUENCES = 64  # of a context; llama.cpp allows 256, and reserves logits for each
_ENABLED = 1
_NO_CELLS = 1  # what `llama_decode` returns if the batch does not fit the cache
_ALL = -1


@dataclass(frozen=True)
class ContextOptions:
    """How a context is made.

    Attributes:
        tokens: cells of the cache, for all prompts together.
        threads: of the computation; 0 for one a core.
        cache_type: what keys and values are kept in, one of `CACHE_TYPES`.
        ubatch: rows that are computed together.

    """

    tokens: int = 8192
    threads: int = 0
    cache_type: str = "f16"
    ubatch: int = 512

    def __post_init__(self) -> None:
        if self.cache_type not in CACHE_TYPES:
            raise ConfigError(f"cache_type is {self.cache_type!r}; choose among {', '.join(CACHE_TYPES)}")
        if min(self.tokens, self.ubatch) < 1 or self.threads < 0:
            raise ConfigError("tokens and ubatch are at least 1, threads at least 0")


class ContextFullError(PromptError):
    """The cells are full."""


class AttentionNode(NamedTuple):
    """One layer's attention in a pass, as the graph computes it.

    Attributes:
        layer: counted among the layers that keep KV.
        query: after RoPE, float32 `[heads, rows, head_dim]`.
        key_shape, value_shape: heads and head dimension.
        scale: of the scores.
        softcap: of the scores; None without one.
        sinks: one score for each head, or None.
        first_key: the first cell's keys as the cache keeps them, of one head.

    """

    layer: int
    query: Tensor
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    scale: float
    softcap: float | None
    sinks: Tensor | None
    first_key: bytes


OnAttention = Callable[[AttentionNode], bool]
"""Gets each layer's attention right after it was computed, and says whether the pass goes on."""


class BatchRows(NamedTuple):
    """Rows of a pass: token ids, positions, the sequence of each, and whose logits are wanted; `[rows]` each."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    outputs: NDArray[np.bool_]


class Context:
    """A context of a model. `close` frees it.

    Args:
        model: the model.
        options: how it is made.

    Attributes:
        state_format: of its sequences, set by `admission`.
        lock: held by whoever uses several of its methods together.

    Raises:
        ConfigError: llama.cpp does not make it, or makes another one than was asked for.

    """

    state_format: StateFormat

    def __init__(self, model: GGUFModel, options: ContextOptions) -> None:
        self.model = model
        self.options = options
        self.lock = RLock()
        self._library = model.library
        self._on_attention: OnAttention | None = None
        self._attending = 0
        self._on_node = OnNode(self._visit)  # as long as the context
        self._error: BaseException | None = None
        self._free = list(range(SEQUENCES - 1, -1, -1))
        self._abandoned = deque[int]()
        self._handle = self._library.call("llama_init_from_model", model.handle, self._parameters())
        if not self._handle:
            raise ConfigError(
                f"llama.cpp cannot make a context of {options.tokens} tokens for {model.file.name}"
                f"{self._library.logged_error()}"
            )
        self._check_sizes()
        self._memory = self._library.call("llama_get_memory", self._handle)
        threads = options.threads or len(os.sched_getaffinity(0))
        self._library.call("llama_set_n_threads", self._handle, threads, threads)

    def close(self) -> None:
        """Free it."""
        if self._handle:
            self._library.call("llama_free", self._handle)
            self._handle = None

    def _parameters(self) -> ctypes.Structure:
        """`llama_context_params` as asked for."""
        options = self.options
        fields = self._library.context_fields
        parameters = self._library.call("llama_context_default_params")
        raw = parameters.bytes
        cells = options.tokens
        struct.pack_into("<4I", raw, 0, cells, cells, min(options.ubatch, cells), SEQUENCES)
        struct.pack_into("<i", raw, fields.flash_attention, _ENABLED)
        struct.pack_into("<Q", raw, fields.on_node, ctypes.cast(self._on_node, ctypes.c_void_p).value)
        kind = CACHE_TYPES[options.cache_type]
        struct.pack_into("<2i", raw, fields.type_k, kind, kind)
        raw[fields.full_window] = raw[fields.unified] = 1
        return parameters  # type: ignore[no-any-return]

    def _check_sizes(self) -> None:
        """Compare what it says of itself with what was asked for. llama.cpp rounds the number of cells up."""
        cells, batch, ubatch, sequences = (
            int(self._library.call(f"llama_n_{name}", self._handle)) for name in ("ctx", "batch", "ubatch", "seq_max")
        )
        tokens = self.options.tokens
        is_alike = tokens <= cells < tokens + 256 and batch >= tokens and ubatch <= batch and sequences == SEQUENCES
        if not is_alike:
            raise ConfigError(
                f"{self._library.path} made another context than was asked for: its parameters are unknown"
            )
        self.cells = cells
        self._batch_rows = batch  # more would end the process

    # Sequences

    @contextmanager
    def spare(self, count: int) -> Iterator[list[int]]:
        """So many empty sequences for a while; they are emptied and given back."""
        taken = [self.take() for _ in range(count)]
        try:
            yield taken
        finally:
            for sequence in taken:
                self.give_back(sequence)

    @property
    def unused(self) -> int:
        """How many sequences are free."""
        return len(self._free) + len(self._abandoned)

    def abandon(self, sequence: int) -> None:
        """Give a sequence back before the next pass; any thread may call it, also during a pass."""
        self._abandoned.append(sequence)

    def take(self) -> int:
        """An empty sequence. Raises `PromptError` if none is free."""
        with self.lock:
            self._take_abandoned()
            if not self._free:
                raise PromptError(
                    f"all {SEQUENCES} sequences of llama.cpp's context are in use; run fewer prompts at once"
                )
            return self._free.pop()

    def _take_abandoned(self) -> None:
        """Free the cells of forgotten prompts."""
        while self._abandoned:
            self.give_back(self._abandoned.popleft())

    def give_back(self, sequence: int) -> None:
        """Empty a sequence, and free it for others."""
        with self.lock:
            if self._handle:
                self.drop(sequence)
            self._free.append(sequence)

    def lend(self, source: int, target: int, start: int, stop: int) -> None:
        """Let the cells of these positions belong to another sequence, too."""
        if start < stop:
            self._library.call("llama_memory_seq_cp", self._memory, source, target, start, stop)

    def drop(self, sequence: int, start: int = _ALL, stop: int = _ALL) -> None:
        """Take the cells of these positions, or all, from a sequence; those of no sequence are free."""
        if not self._library.call("llama_memory_seq_rm", self._memory, sequence, start, stop):
            raise RuntimeError("llama.cpp refuses to remove cells of a sequence")

    def last_position(self, sequence: int) -> int:
        """Of a sequence; -1 if it is empty."""
        return int(self._library.call("llama_memory_seq_pos_max", self._memory, sequence))

    # States

    def state(self, sequence: int) -> Bytes:
        """The state of a sequence; see `state`."""
        size = int(self._library.call("llama_state_seq_get_size", self._handle, sequence))
        raw = np.empty(size, np.uint8)
        written = self._library.call("llama_state_seq_get_data", self._handle, raw.ctypes.data, size, sequence)
        return raw[:written]

    def set_state(self, sequence: int, state: Bytes) -> None:
        """Replace a sequence's cells by those of a state. Raises `ContextFullError` if they do not fit."""
        arguments = (self._handle, state.ctypes.data, len(state), sequence)
        if self._library.call("llama_state_seq_set_data", *arguments) != len(state):
            raise self._full()

    def save(self, sequence: int, token_ids: NDArray[np.int32], file: Path) -> int:
        """Write a sequence and its token ids to a file as llama.cpp keeps them; its bytes, 0 if it cannot be written."""
        arguments = (self._handle, os.fsencode(file), sequence, token_ids.ctypes.data, len(token_ids))
        return int(self._library.call("llama_state_seq_save_file", *arguments))

    # Passes

    def run(self, rows: BatchRows, on_attention: OnAttention | None = None) -> Tensor:
        """Compute rows; their KV goes to cells of their sequences.

        Args:
            rows: of each sequence consecutive ones, the first of which follows the sequence's last cell.
            on_attention: sees each layer's attention, and may end the pass. The KV of the layers above is then undefined.

        Returns:
            Logits of the rows that want them, float32 `[outputs, vocab]`; undefined after an early end.

        Raises:
            ContextFullError: the cells are full; nothing has changed.

        """
        count = len(rows.token_ids)
        sequences = np.ascontiguousarray(rows.sequences, np.int32)
        addresses = sequences.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        ones = np.ones(count, np.int32)
        outputs = rows.outputs.astype(np.int8)
        token_ids = np.ascontiguousarray(rows.token_ids, np.int32)
        positions = np.ascontiguousarray(rows.positions, np.int32)
        if count > self._batch_rows:
            raise self._full()
        batch = DecodeBatch(count)
        batch.token, batch.pos = _numbers(token_ids), _numbers(positions)
        batch.n_seq_id = _numbers(ones)
        batch.seq_id = ctypes.cast(addresses.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        batch.logits = ctypes.cast(outputs.ctypes.data, ctypes.POINTER(ctypes.c_int8))
        with self.lock:
            self._take_abandoned()
            self._on_attention = on_attention
            self._attending = 0
            try:
                code = self._library.call("llama_decode", self._handle, batch)
            finally:
                self._on_attention = None
            error, self._error = self._error, None
            if error is not None:
                raise error
            if code == _NO_CELLS:
                raise self._full()
            if code:
                raise RuntimeError(f"llama_decode failed with {code}{self._library.logged_error()}")
            return self._logits(np.flatnonzero(rows.outputs))

    def _logits(self, rows: NDArray[np.intp]) -> Tensor:
        logits = torch.empty((len(rows), self.model.vocabulary))
        for place, row in enumerate(rows.tolist()):
            pointer = self._library.call("llama_get_logits_ith", self._handle, row)
            ctypes.memmove(logits[place].data_ptr(), pointer, 4 * self.model.vocabulary)
        return logits

    def _full(self) -> ContextFullError:
        return ContextFullError(
            f"llama.cpp's context of {self.cells} tokens is full{self._library.logged_error()}; use a larger one, "
            "shorter prompts, or fewer at once"
        )

    # What a pass computes

    def _visit(self, address: int, is_asked: bool, _: int | None) -> bool:
        """`cb_eval`: whether a node is wanted; then, once it is computed, whether the pass goes on."""
        if self._on_attention is None:
            return not is_asked
        if is_asked:
            return self._operation_at(address) == self._library.attention
        try:
            node = self._attention_node(GraphTensor.from_address(address))
            self._attending = self._attending + 1
            return self._on_attention(node)
        except BaseException as error:  # it must not cross C
            self._error = error
            return False

    @cached_property
    def _operation_at(self) -> Callable[[int], int]:
        offset = GraphTensor.op.offset
        return lambda address: int(ctypes.c_int32.from_address(address + offset).value)

    def _attention_node(self, node: GraphTensor) -> AttentionNode:
        keys, values = (GraphTensor.from_address(node.src[place]) for place in (1, 2))
        scale, _, softcap = struct.unpack_from("<3f", node.op_params)
        sinks = self._read(node.src[4]) if node.src[4] else None
        head_bytes = min(keys.nb[1], keys.nb[2])
        first_key = (ctypes.c_ubyte * head_bytes)()
        self._library.call("ggml_backend_tensor_get", node.src[1], first_key, 0, head_bytes)
        return AttentionNode(
            self._attending,
            self._read(node.src[0])[0],
            (keys.ne[2], keys.ne[0]),
            (values.ne[2], values.ne[0]),
            scale,
            softcap or None,
            None if sinks is None else sinks.flatten(),
            bytes(first_key),
        )

    def _read(self, address: int) -> Tensor:
        """A float32 tensor of the graph, its dimensions from the slowest to the fastest."""
        tensor = GraphTensor.from_address(address)
        if tensor.type != F32:
            raise RuntimeError(f"a tensor of ggml's type {tensor.type} cannot be read")
        nbytes = int(self._library.call("ggml_nbytes", address))
        flat = torch.empty(nbytes // 4)
        self._library.call("ggml_backend_tensor_get", address, flat.data_ptr(), 0, nbytes)
        shape = tuple(tensor.ne)[::-1]
        strides = [step // 4 for step in tuple(tensor.nb)[::-1]]
        return flat.as_strided(shape, strides).contiguous()


def _numbers(array: NDArray[np.int32]) -> Any:
    """A pointer to them; the array must live as long."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_int32))
