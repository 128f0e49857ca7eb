"""A prompt's KV in llama.cpp's cells.

Stored chunks are placed into buffers here, as for any decoder, and sent to llama.cpp once. From then on its cells hold the
prompt. Rows that it computes are read back only if somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blend.integrations.llamacpp.context import BatchRows, Context, ContextFullError, OnAttention
from blend.integrations.llamacpp.rows import halves_of, pieces_of, rows_in, runs_of, waves_of
from blend.integrations.llamacpp.state import KVRows
from blend.layout import Span
from blend.model.cache import KV, BlendedCache, BlendedLayer, LayerRotation
from blend.model.passes import OnLayer, RowRequest

WAVE_ROWS = 24  # most rows of a wave of several runs; measured in docs/llamacpp.md
Positions = NDArray[np.int64]


class CellLayout(NamedTuple):
    """What a cache must know of its decoder: the shape of each layer's keys and values, and the dtype of its buffers."""

    rotations: tuple[LayerRotation, ...]
    dtype: torch.dtype


class CellLayer(BlendedLayer):
    """One layer of a `CellCache`. Its buffers are brought up to date when they are asked for."""

    def __init__(self, capacity: int) -> None:
        self._buffers: dict[str, Any] = {}
        self.refresh: Callable[[], Callable[[], None] | None] = lambda: None
        super().__init__(capacity)

    def _buffer(self, name: str) -> Any:
        if (read_back := self.refresh()) is not None:
            read_back()
        return self._buffers.get(name)

    @property
    def keys(self) -> Any:
        """`[batch, kv_heads, capacity, head_dim]`."""
        return self._buffer("keys")

    @keys.setter
    def keys(self, buffer: Any) -> None:
        self._buffers["keys"] = buffer

    @property
    def values(self) -> Any:
        """`[batch, kv_heads, capacity, head_dim]`."""
        return self._buffer("values")

    @values.setter
    def values(self, buffer: Any) -> None:
        self._buffers["values"] = buffer

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows. The buffers may have fewer than are in use: those of the cells alone."""
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, self.capacity + self.capacity // 2)
        if self.is_initialized:
            for name, buffer in self._buffers.items():
                larger = self.new_buffer(buffer)
                larger[:, :, : buffer.shape[2]] = buffer
                self._buffers[name] = larger

    def new_buffer(self, states: Tensor) -> Tensor:
        """A zeroed buffer: a row of zeros is one that was never written."""
        return states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))


class _BufferRows(Sequence[KVRows]):
    """Rows of buffers, each layer copied only when it is asked for."""

    def __init__(self, layers: Sequence[Any], span: Span) -> None:
        self._layers = layers
        self._span = slice(*span)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        layer = self._layers[index]
        return tuple(part[0, :, self._span].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values))


def _nothing() -> None:
    pass


class CellCache(BlendedCache):
    """A prompt's KV in cells of a context.

    Args:
        context: llama.cpp's.
        layout: of its layers.
        capacity: rows to reserve in the buffers.

    """

    layer = CellLayer

    def __init__(self, context: Context, layout: CellLayout, capacity: int) -> None:
        super().__init__(len(layout.rotations), capacity)
        self._context = context
        self._layout = layout
        self._sequences: list[int] = []  # its own, and with windowed layers a second one; see `_keep_all`
        self._is_sent = False
        self._held = np.zeros(capacity, bool)  # the rows whose KV the cells hold
        self._unread = np.zeros(capacity, bool)  # those of them that the buffers lack
        self._release: Any = _nothing
        read_back = WeakMethod(self._read_back)  # no circle: a forgotten cache frees its cells at once
        for layer in self.layers:
            layer.refresh = read_back

    # Sending

    def send(self, await_layer: OnLayer) -> None:
        """Send the stored rows to llama.cpp, once all layers are placed."""
        if self._is_sent:
            return
        await_layer(len(self.layers) - 1)
        self._is_sent = True
        if not self._sequences:
            self._open()
        if self.layers[0].is_initialized:
            written = self._written()
            self._put(np.arange(len(written)), self._rows(0, len(written)))
            self._held[: len(written)] = written

    def _open(self) -> None:
        context = self._context
        self._sequences = [context.take() for _ in range(2 if context.model.window else 1)]
        self._release = finalize(self, _abandon, context, self._sequences)

    @property
    def sequence(self) -> int:
        """Its sequence."""
        return self._sequences[0]

    def _written(self) -> NDArray[np.bool_]:
        """Which rows the buffers hold, up to the last of them."""
        layer = self.layers[0]
        rows = layer.length
        marks = [part[0, :, :rows].ne(0).any(-1).any(0) for part in (layer.keys, layer.values)]
        written = (marks[0] | marks[1]).numpy()
        last = np.flatnonzero(written)[-1:]
        return written[: int(last[0]) + 1 if len(last) else 0]  # type: ignore[no-any-return]

    def _rows(self, start: int, stop: int) -> Sequence[KVRows]:
        """Rows of the buffers, layer by layer."""
        return _BufferRows(self.layers, Span(start, stop))

    def _put(self, positions: Positions, rows: Sequence[KVRows]) -> None:
        """Write rows to cells that belong to this cache."""
        if not len(positions):
            return
        context = self._context
        start, stop = int(positions[0]), int(positions[-1]) + 1
        with context.spare(1) as (spare,):
            context.set_state(spare, context.state_format.pack(positions, rows, spare))
            self._take_over(spare, [Span(start, stop)])

    def _take_over(self, source: int, runs: Sequence[Span]) -> None:
        """Take the cells of these rows from another sequence, in the place of those that were there."""
        for run in runs:
            for sequence in self._sequences:
                self._context.drop(sequence, *run)
                self._context.lend(source, sequence, *run)

    # Passes

    def compute(
        self, request: RowRequest, wave_rows: int = WAVE_ROWS, on_attention: OnAttention | None = None
    ) -> Tensor:
        """Compute rows in waves; logits of the last `outputs` of them, `[outputs, vocab]`. Raises `PromptError`."""
        wanted_rows = self._prepare(request)
        logits = []
        with self._context.lock:
            # No pass has more rows than llama.cpp computes together: it then shows each layer once, and reuses no cell that has
            # left a window.
            most_rows = self._context.options.ubatch
            runs = pieces_of(runs_of(wanted_rows.positions.tolist()), most_rows)
            most_runs = max(1, self._context.unused - 2)
            for wave in waves_of(runs, self._is_alone, min(wave_rows, most_rows), most_runs):
                logits.append(self._run_fitting(wave, wanted_rows, on_attention))
        self._count(wanted_rows)
        return torch.cat(logits)

    def look(self, request: RowRequest, wave_rows: int, on_attention: OnAttention) -> list[KV]:
        """Compute rows without keeping them.

        Returns:
            Their KV, layer by layer, `[1, kv_heads, rows, head_dim]`; undefined above a layer where `on_attention` ended it.

        Raises:
            PromptError: the cells are full.

        """
        self.send(request.await_layer)
        with self._context.lock:
            copy = self.clone()
            try:
                copy.compute(request, wave_rows, on_attention)
                return copy._kv_at(request.positions.numpy())
            finally:
                copy.free()

    def follows(self, request: RowRequest) -> bool:
        """Whether these rows are the next ones of the prompt, in one piece."""
        return self._is_sent and not self._context.model.window and request.run.start == self.get_seq_length()

    def _prepare(self, request: RowRequest) -> _Requested:
        """Send what is stored, and make room for rows that are to be kept."""
        self.send(request.await_layer)
        wanted_rows = _Requested.of(request)
        self._grow(int(wanted_rows.positions[-1]) + 1)
        if wanted_rows.positions[0] >= self.get_seq_length():
            self._free_buffers()
        return wanted_rows

    def _count(self, wanted_rows: _Requested) -> None:
        """Count rows that were computed as in use."""
        for layer in self.layers:
            layer.length = max(layer.length, int(wanted_rows.positions[-1]) + 1)

    def _is_alone(self, run: Span) -> bool:
        return not bool(self._held[run.start : run.stop].all())

    def _run_fitting(self, wave: list[Span], wanted_rows: _Requested, on_attention: OnAttention | None) -> Tensor:
        """Compute a wave, in halves if the free cells are too few: fresh rows need cells before they replace others."""
        try:
            return self._run_wave(wave, wanted_rows, on_attention)
        except ContextFullError:
            if not any(self._held[run.start : run.stop].any() for run in wave) or rows_in(wave) == 1:
                raise
            halves = halves_of(wave)
        return torch.cat([self._run_fitting(half, wanted_rows, on_attention) for half in halves])

    def _run_wave(self, wave: list[Span], wanted_rows: _Requested, on_attention: OnAttention | None) -> Tensor:
        """Compute a wave; its rows take the place of those that were there."""
        context = self._context
        follows = context.last_position(self.sequence) + 1 == wave[0].start
        if len(wave) == 1 and follows:
            logits = context.run(wanted_rows.batch(wave, [self.sequence]), on_attention)
            for guard in self._sequences[1:]:
                context.lend(self.sequence, guard, *wave[0])
        else:
            self._drop_blank(wave)
            with context.spare(len(wave)) as spares:
                logits = self._run_apart(wave, spares, wanted_rows, on_attention)
                for run, spare in zip(wave, spares, strict=True):
                    self._take_over(spare, [run])
        self._mark(wave)
        return logits

    def _drop_blank(self, wave: Sequence[Span]) -> None:
        """Free the cells of zeros in the place of rows that never had KV; the pass is to compute them."""
        for run in wave:
            blank = np.flatnonzero(~self._held[run.start : run.stop]) + run.start
            for span in runs_of(blank.tolist()):
                for sequence in self._sequences:
                    self._context.drop(sequence, *span)

    def _mark(self, runs: Sequence[Span]) -> None:
        """These rows are fresh in the cells."""
        for run in runs:
            self._held[run.start : run.stop] = self._unread[run.start : run.stop] = True

    def _run_apart(
        self, runs: Sequence[Span], spares: Sequence[int], wanted_rows: _Requested, on_attention: OnAttention | None
    ) -> Tensor:
        """Compute runs in spare sequences, to which the cells of all earlier rows are lent."""
        self._fill(runs[-1].start)
        for run, spare in zip(runs, spares, strict=True):
            self._context.lend(self.sequence, spare, 0, run.start)
        return self._context.run(wanted_rows.batch(runs, spares), on_attention)

    def _fill(self, stop: int) -> None:
        """Rows of zeros up to this one where there is none: llama.cpp wants each sequence without a gap at its end."""
        last = self._context.last_position(self.sequence)
        if last + 1 >= stop:
            return
        positions = np.arange(last + 1, stop)
        zeros = []
        for rotation in self._layout.rotations:
            widths = (np.prod(shape) for shape in (rotation.key_shape, rotation.value_shape))
            keys, values = (torch.zeros((len(positions), int(width)), dtype=self._layout.dtype) for width in widths)
            zeros.append((keys, values))
        self._put(positions, zeros)

    # Reading back

    def _read_back(self) -> None:
        """Bring the buffers up to date."""
        rows = np.flatnonzero(self._unread)
        if not len(rows):
            return
        self._unread[:] = False  # first: what follows asks for the buffers
        with self._context.lock:
            self._write(rows, self._kv_at(rows))

    def _kv_at(self, rows: Positions) -> list[KV]:
        """The KV of these rows, layer by layer, out of the cells."""
        groups = []
        context = self._context
        with context.spare(1) as (spare,):
            for group in self._groups(rows):
                for run in runs_of(group.tolist()):
                    context.lend(self.sequence, spare, *run)
                groups.append(self._kv_of(spare, group))
                context.drop(spare)
        return groups[0] if len(groups) == 1 else [_joined(parts) for parts in zip(*groups, strict=True)]

    def _groups(self, rows: Positions) -> Iterator[Positions]:
        """Rows that one state holds: llama.cpp leaves out those that are behind the window of the last one."""
        window = self._context.model.window
        while len(rows):
            count = int(np.searchsorted(rows, rows[0] + window)) if window else len(rows)
            yield rows[:count]
            rows = rows[count:]

    def _kv_of(self, sequence: int, positions: Positions) -> list[KV]:
        """The KV of a sequence that holds exactly these rows. They fit a window."""
        state_format = self._context.state_format
        caches = state_format.unpack(self._context.state(sequence))
        kvs = []
        for layer, rotation in enumerate(self._layout.rotations):
            cache, place = state_format.order[layer]
            rows = caches[cache]
            if not np.array_equal(rows.positions, positions):
                raise RuntimeError("llama.cpp's state lacks rows that it was asked for")
            depth = len(rows.raw) // 2
            types = state_format.types(layer)
            shapes = (rotation.key_shape, rotation.value_shape)
            keys, values = (
                kind.decode(rows.raw[place + part * depth])
                .to(self._layout.dtype)
                .view(1, -1, *shapes[part])
                .transpose(1, 2)
                for part, kind in enumerate(types)
            )
            kvs.append((keys, values))
        return kvs

    def _write(self, positions: Positions, kvs: Sequence[KV]) -> None:
        rows = torch.from_numpy(positions)
        self.reserve(int(positions[-1]) + 1)
        for layer, (keys, values) in zip(self.layers, kvs, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys.index_copy_(2, rows, keys)
            layer.values.index_copy_(2, rows, values)

    def save(self, token_ids: Sequence[int], file: Path) -> int:
        """Write the first rows, whose token ids these are, as a file of llama.cpp's; its bytes, 0 if it cannot be written."""
        self.send(_placed)
        with self._context.lock, self._context.spare(1) as (spare,):
            self._context.lend(self.sequence, spare, 0, len(token_ids))
            return self._context.save(spare, np.array(token_ids, np.int32), file)

    # What a `BlendedCache` does

    def _grow(self, rows: int) -> None:
        lacking = rows - len(self._held)
        if lacking > 0:
            self._held, self._unread = (
                np.pad(mask, (0, max(lacking, rows // 2))) for mask in (self._held, self._unread)
            )

    def _free_buffers(self) -> None:
        """The prompt is there and goes on: its rows are read from the cells if anybody wants them."""
        if self.layers[0].is_initialized:
            self._unread |= self._held
            self._whole = None
            for layer in self.layers:
                layer.keys = layer.values = None
                layer.is_initialized = False

    def blank(self, rows: Tensor) -> None:
        """Zero the KV at these positions in every layer."""
        super().blank(rows)
        self._held[rows.numpy()] = False
        if self._is_sent:
            for run in runs_of(rows.tolist()):
                self._put(np.arange(*run), self._rows(*run))

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows of every layer."""
        super().truncate(length)
        self._held[length:] = self._unread[length:] = False
        for sequence in self._sequences:
            self._context.drop(sequence, length, -1)

    def clone(self, room: int = 0) -> CellCache:
        """An independent copy of the rows in use, over the same cells."""
        self.send(_placed)
        rows = self.get_seq_length()
        copy = CellCache(self._context, self._layout, rows + room)
        copy._open()
        copy._is_sent = True
        for sequence in copy._sequences:
            self._context.lend(self.sequence, sequence, 0, rows)
        copy._held[:rows] = self._held[:rows]
        copy._unread[:rows] = self._held[:rows]
        for layer in copy.layers:
            layer.length = rows
        return copy

    def free(self) -> None:
        """Free buffers and cells now; it must not be read any more."""
        self._unread[:] = False
        self._held[:] = False
        super().free()
        self._release()
        self._sequences = []
        self._is_sent = False
        self._release = _nothing


def _placed(_: int) -> None:
    pass


def _joined(parts: Sequence[KV]) -> KV:
    """One layer's KV of several groups of rows."""
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


def _abandon(context: Context, sequences: Sequence[int]) -> None:
    for sequence in sequences:
        context.abandon(sequence)


class _Requested(NamedTuple):
    """Rows that are computed: positions and token ids `[rows]`, and the first position whose logits are wanted."""

    positions: Positions
    token_ids: NDArray[np.int32]
    first_output: int

    @classmethod
    def of(cls, request: RowRequest) -> _Requested:
        """Those of a request."""
        positions = request.positions.numpy()
        first_output = int(positions[-request.outputs]) if request.outputs else int(positions[-1]) + 1
        return cls(positions, request.token_ids[0].numpy().astype(np.int32), first_output)

    def batch(self, runs: Sequence[Span], sequences: Sequence[int]) -> BatchRows:
        """The rows of these runs, each in its sequence."""
        positions = np.concatenate([np.arange(*run, dtype=np.int32) for run in runs])
        owners = np.repeat(np.array(sequences, np.int32), [run.length for run in runs])
        token_ids = self.token_ids[np.searchsorted(self.positions, positions)]
        return BatchRows(token_ids, positions, owners, positions >= self.first_output)


def compute_following(requests: Sequence[RowRequest], caches: Sequence[CellCache]) -> Tensor:
    """Compute the next rows of several prompts in one pass, as `CellCache.follows` allows.

    Returns:
        Logits of the last `outputs` rows of each, `[outputs, vocab]`.

    Raises:
        PromptError: the cells are full.

    """
    requested = []
    batches = []
    for request, cache in zip(requests, caches, strict=True):
        rows = cache._prepare(request)
        requested.append(rows)
        batches.append(rows.batch(runs_of(rows.positions.tolist()), [cache.sequence]))
    fields = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
    logits = caches[0]._context.run(BatchRows(*fields))
    for rows, cache in zip(requested, caches, strict=True):
        cache._mark(runs_of(rows.positions.tolist()))
        cache._count(rows)
    return logits
