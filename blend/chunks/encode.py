"""Compute chunk caches: batched forward passes right after the shared prefix, whose own KV is dropped.

A chunk behind the real prefix leaves the attention sink where every prompt has it: once, at the start. Chunks of models with
recurrent layers run one by one, because padding would enter the state. Every prompt computes their first rows anew; the
layers' operators of the other rows are kept. Two small parts belong here too: `without_positions`, for codecs of few bits, and
the probe that tells whether two engines compute the same KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from blend.config import BATCH_TOKENS
from blend.errors import EntryDamagedError, PromptError
from blend.model.admission import probe_ids, tolerance
from blend.model.cache import BlendedCache, Deltas, LayerRotation, Rotation, Run
from blend.model.forward import RowRequest, RowSteps
from blend.model.precision import DTYPES
from blend.model.recurrent import Operator
from blend.types import ChunkCache, lead_of

if TYPE_CHECKING:
    from blend.model.decoder import Decoder, RowDecoder
    from blend.store.base import ChunkStore


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

    def encode(
        self, chunks: Sequence[Sequence[int]], on_tokens: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[tuple[int, ChunkCache]]:
        """Compute the caches of these chunks, in order of length.

        Args:
            chunks: token ids of each chunk.
            on_tokens: called in every layer with the tokens computed by then.

        Yields:
            The chunk's index and its cache, on the decoder's device.

        Raises:
            PromptError: a chunk is empty, or does not fit behind the prefix.

        """
        for index, chunk in enumerate(chunks):
            if not chunk:
                raise PromptError(f"chunk {index} is empty; drop it before encoding")
            self.decoder.check_length(len(self.prefix_tokens) + len(chunk))
        done = 0
        for batch in self.batches(chunks):
            mine = [chunks[i] for i in batch]
            yield from zip(batch, self._encode_batch(mine, beyond(done, on_tokens)), strict=True)
            done += sum(map(len, mine))

    def batches(self, chunks: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of chunks of similar length, so that little is padded: what `encode` runs in one forward pass each."""
        batch: list[int] = []
        for index in sorted(range(len(chunks)), key=lambda i: len(chunks[i])):
            full = self.decoder.recurrent or (len(batch) + 1) * len(chunks[index]) > self._batch_tokens
            if batch and full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _encode_batch(self, chunks: Sequence[Sequence[int]], on_tokens: Callable[[int], None]) -> list[ChunkCache]:
        if self.decoder.recurrent:
            (chunk,) = chunks
            return [self._alone(chunk)]
        tokens, longest = sum(map(len, chunks)), max(map(len, chunks))
        # Padding stands behind the real tokens, where causal attention never looks; any id will do.
        ids = torch.tensor([[*chunk, *[chunk[-1]] * (longest - len(chunk))] for chunk in chunks])
        start = len(self.prefix_tokens)
        cache = self.decoder.new_cache(start + longest)
        self._put_prefix(cache, len(chunks))
        with cache.watched(lambda layer, *_: on_tokens(tokens * layer // len(cache.layers))):
            self.decoder.encode_rows(ids.to(self.decoder.device), start, cache)
        return [_cut(cache, row, start, len(chunk)) for row, chunk in enumerate(chunks)]

    def _alone(self, chunk: Sequence[int]) -> ChunkCache:
        """One chunk's cache, with operators."""
        decoder, steps = cast("Decoder", self.decoder), self.steps(chunk, len(chunk) + len(self.prefix_tokens))
        try:
            request = next(steps)
            while True:
                request = steps.send(decoder.prefill([request]))
        except StopIteration as done:
            found: ChunkCache = done.value
            return found

    def _put_prefix(self, cache: BlendedCache, batch: int) -> None:
        put_states(self.decoder, self.prefix, cache)
        for layer, keys, values in zip(cache.layers, self.prefix.keys, self.prefix.values, strict=True):
            layer.write_run(0, keys.expand(batch, *keys.shape), values.expand(batch, *values.shape))

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
            cache = yield from self._pieces(self.prefix_tokens, 0, self.decoder.new_cache(start), most_rows)
            self.prefix = self._beginning(cache)
        cache = self.decoder.new_cache(start + len(chunk))
        self._put_prefix(cache, 1)
        if not self.decoder.recurrent:
            cache = yield from self._pieces(chunk, start, cache, most_rows)
            return _cut(cache, 0, start, len(chunk))
        lead, found = lead_of(len(chunk)), dict[int, Operator]()

        def on_operator(layer: int, operator: Operator) -> None:
            found[layer] = found[layer].followed_by(operator) if layer in found else operator

        yield from self._pieces(chunk[:lead], start, cache, most_rows)
        yield from self._pieces(chunk[lead:], start + lead, cache, most_rows, on_operator)
        operators = tuple(found[i].tensors if i in found else () for i in range(len(cache.layers)))
        return replace(_cut(cache, 0, start, len(chunk)), lead=lead, operators=operators)

    def _pieces(
        self,
        ids: Sequence[int],
        start: int,
        cache: BlendedCache,
        most_rows: int,
        on_operator: Callable[[int, Operator], None] | None = None,
    ) -> RowSteps[BlendedCache]:
        tokens = torch.tensor([ids], device=self.decoder.device)
        for first in range(0, len(ids), most_rows):
            piece = tokens[:, first : first + most_rows]
            run = Run.consecutive(start + first, start + first + piece.shape[1], tokens.device)
            yield RowRequest.of(piece, run, cache, on_operator=on_operator)
        return cache


def put_states(decoder: RowDecoder, beginning: ChunkCache, cache: BlendedCache) -> None:
    """Put the recurrent states of a prompt's beginning into the prompt's cache, and keep them there."""
    for index, layer in decoder.recurrent.items() if beginning.states else ():
        carried = cache.carried(index)
        carried.put(beginning.tokens, layer.state(beginning.states[index]))
        carried.mark()


def beyond(done: int, on_tokens: Callable[[int], None]) -> Callable[[int], None]:
    """Counts on from tokens that were done before."""
    return lambda tokens: on_tokens(done + tokens)


def _cut(cache: BlendedCache, row: int, start: int, length: int) -> ChunkCache:
    """Own copies of one batch row's `length` tokens."""
    span = slice(start, start + length)
    keys = tuple(layer.keys[row, :, span].clone() for layer in cache.layers)
    values = tuple(layer.values[row, :, span].clone() for layer in cache.layers)
    return ChunkCache(keys, values, start)


def without_positions(cache: ChunkCache, rotations: Sequence[LayerRotation]) -> ChunkCache:
    """The same cache with positions taken out of all that is rotated, float32. rotations: of the decoder it is of."""
    positions = torch.arange(cache.start, cache.start + cache.tokens, device=cache.keys[0].device)
    back = Deltas(-positions)

    def rotated_back(states: Sequence[torch.Tensor], turns: Sequence[Rotation]) -> tuple[torch.Tensor, ...]:
        return tuple(
            turn.apply(one[None], back, out=torch.empty_like(one, dtype=torch.float32)[None])[0]
            for one, turn in zip(states, turns, strict=True)
        )

    keys, values = (
        rotated_back(cache.keys, [r.keys for r in rotations]),
        rotated_back(cache.values, [r.values for r in rotations]),
    )
    return replace(cache, keys=keys, values=values, unrotated=True)


def leave_probe(store: ChunkStore, decoder: RowDecoder) -> None:
    """Keep the decoder's probe, unless it is there. Raises `StoreError` when the store cannot be written."""
    name = _name(decoder)
    if _read(store, name) is None:
        store.write_artifact(name, save(_probe(decoder)))


def take_held_dtype(store: ChunkStore, decoder: Decoder) -> None:
    """Use a store's caches of another dtype, if it has none of the decoder's and a probe shows that they are alike.

    Raises `StoreError` when the store cannot be read.
    """
    own = found = decoder.kept_as
    if _read(store, _name(decoder)) is not None:
        return
    try:
        for decoder.kept_as in (dtype for dtype in DTYPES if dtype != own):
            if gives_same_kv(store, decoder):
                found = decoder.kept_as
                break
    finally:  # a store that fails midway shares nothing
        decoder.kept_as = found


def gives_same_kv(store: ChunkStore, decoder: RowDecoder) -> bool:
    """Whether the store holds a probe under this decoder's name, and the decoder gives the same KV within rounding."""
    held = _read(store, _name(decoder))
    if held is None:
        return False
    mine = _probe(decoder)
    if {name: part.shape for name, part in mine.items()} != {name: part.shape for name, part in held.items()}:
        return False
    # Of entries' greatest difference; here all of a layer's are taken together. Both may round: the coarser dtype counts.
    most = max(tolerance(part.dtype) for some in (mine, held) for part in some.values()) / 5
    return all(bool(_far(part, held[name]) <= most) for name, part in mine.items())


def _far(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return float((mine.float() - other.float()).norm() / other.float().norm().clamp_min(1e-6))


def _probe(decoder: RowDecoder) -> dict[str, torch.Tensor]:
    ids = probe_ids(decoder.vocabulary).to(decoder.device)
    cache = decoder.new_cache(ids.shape[1])
    decoder.encode_rows(ids, 0, cache)
    views = [cache.view(index) for index in range(len(cache.layers))]
    return {
        f"{kind}.{i}": part[0].cpu().contiguous()
        for i, kv in enumerate(views)
        for kind, part in zip("kv", kv, strict=True)
    }


def _read(store: ChunkStore, name: str) -> dict[str, torch.Tensor] | None:
    try:
        content = store.read_artifact(name)
        return load(content) if content is not None else None
    except (EntryDamagedError, SafetensorError):
        return None


def _name(decoder: RowDecoder) -> str:
    return f"probe-{decoder.identity(()).namespace}"
