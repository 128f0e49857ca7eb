"""Compute chunk caches: batched forward passes right after the shared prefix, whose own KV is dropped.

A chunk behind the real prefix leaves the attention sink where every prompt has it: once, at the start. Chunks of models with
recurrent layers run one by one, because padding would enter the state. Every prompt computes their first rows anew; the
layers' operators of the other rows are kept. `without_positions` belongs here too, for codecs of few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from blend.config import BATCH_TOKENS
from blend.errors import PromptError
from blend.layout import lead_of
from blend.model.cache import BlendedCache, LayerRotation, Run
from blend.model.passes import RowRequest, RowSteps, run_steps
from blend.model.recurrent import Operator
from blend.types import ChunkCache
from blend_kernels import Deltas, Turn, rotate_keys

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.model.row_decoder import RowDecoder


class ChunkEncoder:
    """Computes chunk caches behind one prefix. The prefix runs once, when its KV is first needed.

    Args:
        decoder: the model.
        prefix: token ids in front of every chunk; at least one.
        batch_tokens: most tokens of one forward pass, padding included.
        corpus: see `CacheIdentity`.

    Raises:
        PromptError: the prefix is empty, or too long for the model.

    """

    def __init__(
        self, decoder: RowDecoder, prefix: Sequence[int], batch_tokens: int = BATCH_TOKENS, *, corpus: str = ""
    ) -> None:
        self.decoder = decoder
        self.prefix_tokens = tuple(prefix)
        self.identity = replace(decoder.identity(self.prefix_tokens), corpus=corpus)
        if not self.prefix_tokens:
            raise PromptError("chunks need a prefix of at least one token in front of them")
        decoder.check_length(len(self.prefix_tokens))
        self._batch_tokens = batch_tokens

    def encode(self, chunks: Sequence[Sequence[int]]) -> Iterator[tuple[int, ChunkCache]]:
        """Compute the caches of these chunks, in order of length.

        Args:
            chunks: token ids of each chunk.

        Yields:
            The chunk's index and its cache, on the decoder's device.

        Raises:
            PromptError: a chunk is empty, or does not fit behind the prefix.

        """
        for index, chunk in enumerate(chunks):
            if not chunk:
                raise PromptError(f"chunk {index} is empty; drop it before encoding")
            self.decoder.check_length(len(self.prefix_tokens) + len(chunk))
        for batch in self.batches(chunks):
            caches = self._encode_batch([chunks[index] for index in batch])
            yield from zip(batch, caches, strict=True)

    def batches(self, chunks: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of chunks of similar length, so that little is padded: what `encode` runs in one forward pass each."""
        batch: list[int] = []
        lengths = list(map(len, chunks))
        for index in sorted(range(len(chunks)), key=lengths.__getitem__):
            tokens = (len(batch) + 1) * lengths[index]
            is_full = self.decoder.recurrent or tokens > self._batch_tokens
            if batch and is_full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _encode_batch(self, chunks: Sequence[Sequence[int]]) -> list[ChunkCache]:
        if self.decoder.recurrent:
            (chunk,) = chunks
            decoder = cast("Decoder", self.decoder)
            steps = self.steps(chunk, len(chunk) + len(self.prefix_tokens))
            return [run_steps(steps, lambda request: decoder.prefill([request]))]
        longest = max(map(len, chunks))
        # Padding stands behind the real tokens, where causal attention never looks; any id will do.
        padded = []
        for chunk in chunks:
            padding = [chunk[-1]] * (longest - len(chunk))
            padded.append([*chunk, *padding])
        ids = torch.tensor(padded, device=self.decoder.device)
        start = len(self.prefix_tokens)
        cache = self.decoder.new_cache(start + longest)
        self._put_prefix(cache, len(chunks))
        self.decoder.encode_rows(ids, start, cache)
        return [_cut(cache, row, start, len(chunk)) for row, chunk in enumerate(chunks)]

    def _put_prefix(self, cache: BlendedCache, batch: int) -> None:
        put_states(self.decoder, self.prefix, cache)
        prefix = self.prefix
        for layer, keys, values in zip(cache.layers, prefix.keys, prefix.values, strict=True):
            batch_keys = keys.expand(batch, *keys.shape)
            batch_values = values.expand(batch, *values.shape)
            layer.write_run(0, batch_keys, batch_values)

    @property
    def has_prefix(self) -> bool:
        """Whether the prefix was run."""
        return "prefix" in vars(self)

    @cached_property
    def prefix(self) -> ChunkCache:
        """The KV of the prefix itself."""
        ids = torch.tensor([self.prefix_tokens], device=self.decoder.device)
        cache = self.decoder.new_cache(ids.shape[1])
        self.decoder.encode_rows(ids, 0, cache)
        return self._beginning(cache)

    def _beginning(self, cache: BlendedCache) -> ChunkCache:
        rows = len(self.prefix_tokens)
        return replace(_cut(cache, 0, 0, rows), states=cache.states(rows) or ())

    def steps(self, chunk: Sequence[int], most_rows: int) -> RowSteps[ChunkCache]:
        """One chunk's cache for a scheduler: yields rows for `Decoder.prefill`, as `Blender.steps` does."""
        start = len(self.prefix_tokens)
        self.decoder.check_length(start + len(chunk))
        if not self.has_prefix:
            cache = self.decoder.new_cache(start)
            yield from self._pieces(self.prefix_tokens, 0, cache, most_rows)
            self.prefix = self._beginning(cache)
        cache = self.decoder.new_cache(start + len(chunk))
        self._put_prefix(cache, 1)
        if not self.decoder.recurrent:
            yield from self._pieces(chunk, start, cache, most_rows)
            return _cut(cache, 0, start, len(chunk))
        lead = lead_of(len(chunk))
        operators = dict[int, Operator]()

        def on_operator(layer: int, operator: Operator) -> None:
            earlier = operators.get(layer)
            operators[layer] = operator if earlier is None else earlier.followed_by(operator)

        yield from self._pieces(chunk[:lead], start, cache, most_rows)
        yield from self._pieces(chunk[lead:], start + lead, cache, most_rows, on_operator)
        tensors: list[tuple[Tensor, ...]] = [()] * len(cache.layers)
        for index, operator in operators.items():
            tensors[index] = operator.tensors
        computed = _cut(cache, 0, start, len(chunk))
        return replace(computed, lead=lead, operators=tuple(tensors))

    def _pieces(
        self,
        ids: Sequence[int],
        start: int,
        cache: BlendedCache,
        most_rows: int,
        on_operator: Callable[[int, Operator], None] | None = None,
    ) -> RowSteps[None]:
        tokens = torch.tensor([ids], device=self.decoder.device)
        for first in range(0, len(ids), most_rows):
            piece = tokens[:, first : first + most_rows]
            begin = start + first
            run = Run.consecutive(begin, begin + piece.shape[1], tokens.device)
            yield RowRequest(piece, run, cache, on_operator=on_operator)


def put_states(decoder: RowDecoder, beginning: ChunkCache, cache: BlendedCache) -> None:
    """Put the recurrent states of a prompt's beginning into the prompt's cache, and keep them there."""
    if not beginning.states:
        return
    for index, layer in decoder.recurrent.items():
        carried = cache.carried(index)
        carried.put(beginning.tokens, layer.state(beginning.states[index]))
        carried.mark()


def _cut(cache: BlendedCache, row: int, start: int, length: int) -> ChunkCache:
    """Own copies of one batch row's `length` tokens."""
    span = slice(start, start + length)
    keys = tuple(layer.keys[row, :, span].clone() for layer in cache.layers)
    values = tuple(layer.values[row, :, span].clone() for layer in cache.layers)
    return ChunkCache(keys, values, start)


def without_positions(cache: ChunkCache, rotations: Sequence[LayerRotation]) -> ChunkCache:
    """The same cache with positions taken out of all that is rotated, float32. rotations: of the decoder it is of."""
    device = cache.keys[0].device
    positions = torch.arange(cache.start, cache.start + cache.tokens, device=device)
    back = Deltas(-positions)

    def rotated_back(state: Tensor, turn: Turn | None) -> Tensor:
        out = torch.empty_like(state, dtype=torch.float32)
        return rotate_keys(state, back, turn, out)

    keys = map(rotated_back, cache.keys, [rotation.keys for rotation in rotations])
    values = map(rotated_back, cache.values, [rotation.values for rotation in rotations])
    return replace(cache, keys=tuple(keys), values=tuple(values), unrotated=True)
