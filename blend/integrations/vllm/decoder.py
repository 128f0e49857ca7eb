"""A vLLM worker's model as kvblend's decoder: it runs rows over the cache blocks of a request, or over scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import replace
from enum import Enum
from typing import TypeVar

import torch

from blend.integrations.vllm.row_model import RowModel, runs, slots_of
from blend.model.attention import AttentionCall
from blend.model.cache import KV, BlendedCache, BlendedLayer, LayerRotation, Run
from blend.model.passes import Halt, OnLayer, RowRequest, nothing
from blend.model.row_decoder import RowDecoder
from blend.types import CacheIdentity

Result = TypeVar("Result")


class Pause(Enum):
    """Why passes stop for a step of the engine: a pass was run, or they wait for the store."""

    PASS = "pass"
    STORE = "store"


Passes = Generator[Pause, None, Result]
"""Runs rows, and stops behind each pass."""
_UNLIMITED = "CPU_ATTN"  # takes any number of sequences; other attention backends have buffers for vLLM's own number


class PagedLayer(BlendedLayer):
    """One layer of a `PagedCache`."""

    def new_buffer(self, states: torch.Tensor) -> torch.Tensor:
        """As its base does, but zeroed."""
        # Zeros: whole layers are written to the blocks, and attention may multiply masked values, so NaN must not be there.
        return states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))


class PagedCache(BlendedCache):
    """A prompt's KV in buffers, copied to blocks layer by layer; fresh rows are written to both.

    Args:
        layers: number of layers.
        capacity: rows of the prompt.
        blocks: of the engine; without them it lies in scratch memory.
        start: the first row that is written to the blocks. The last one of all is not.

    Attributes:
        in_blocks: the layers whose stored KV the engine's blocks hold.
        shift: added to the rotary positions.

    """

    layer = PagedLayer

    def __init__(self, layers: int, capacity: int, blocks: tuple[int, ...] = (), start: int = 0) -> None:
        super().__init__(layers, capacity)
        self.capacity = capacity
        self.blocks = blocks
        self.start = start
        self.stop = capacity - 1 if blocks else capacity
        self.in_blocks: set[int] = set()
        self.shift = 0

    def tables(self, batch: int, block_size: int) -> list[tuple[int, ...]]:
        """The blocks of each prompt of a batch."""
        if self.blocks:
            return [self.blocks]
        count = -(-self.capacity // block_size)
        return [tuple(range(row * count, (row + 1) * count)) for row in range(batch)]


class PagedDecoder(RowDecoder):
    """A `RowDecoder`. fingerprint, kept_as: name and dtype under which its caches are stored. rotations: as measured."""

    def __init__(
        self, model: RowModel, fingerprint: str, kept_as: str, rotations: tuple[LayerRotation, ...] = ()
    ) -> None:
        self.model = model
        self._fingerprint = fingerprint
        self.kept_as = kept_as
        self.rotations = rotations
        self.layers = model.layers
        self.workers = model.workers.size
        self.is_first = model.workers.rank == 0
        self._config = model.config.model_config
        self.name = str(self._config.model)

    def named(self, fingerprint: str, kept_as: str) -> PagedDecoder:
        """The same decoder, its caches under another fingerprint and dtype."""
        return PagedDecoder(self.model, fingerprint, kept_as, self.rotations)

    @property
    def fingerprint(self) -> str:
        """The name under which its caches are stored."""
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._config.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._config.get_vocab_size())

    @property
    def context_length(self) -> int | None:
        """Of the longest prompt that the engine takes."""
        return int(self._config.max_model_len)

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What, besides a chunk's tokens, determines its cache."""
        return CacheIdentity(self.fingerprint, self.kept_as, prefix)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The first worker's values."""
        return self.model.workers.agreed(values)

    def together(self, step: Callable[[], Hashable]) -> None:
        """Do a step in every worker; raises `WorkersError` where it failed in another one."""
        self.model.workers.together(step)

    def from_first(self, request: RowRequest | None) -> RowRequest | None:
        """Rows over scratch memory of the first worker, with the KV before them, in all workers; None where it has none."""
        if self.workers == 1:
            return request
        about = None
        if request is not None:
            cache = _paged(request)
            about = (request.token_ids.cpu(), request.positions.cpu(), cache.capacity, cache.get_seq_length())
        about = self.model.workers.from_first(about)
        if about is None:
            return None
        ids, positions, capacity, rows = about
        if request is None:
            run = Run.read(positions.to(self.device))
            request = RowRequest(ids.to(self.device), run, self.new_cache(capacity))
            nothing = self.no_rows()
            request.cache.begin(nothing.keys, nothing.values, rows)
        for layer in request.cache.layers if rows else ():
            layer.write_run(0, *map(self.agreed, layer.view()))
        return request

    @property
    def most_rows(self) -> int:
        """Rows of a pass: as many as a step of chunked prefill has."""
        return int(self.model.config.scheduler_config.max_num_batched_tokens)

    def new_cache(self, capacity: int) -> PagedCache:
        """An empty cache in scratch memory."""
        return PagedCache(len(self.layers), capacity)

    def encode_rows(self, token_ids: torch.Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of consecutive tokens `[batch, n]` at positions `start...` into `cache`."""
        run = Run.consecutive(start, start + token_ids.shape[1], token_ids.device)
        self.run_rows(RowRequest(token_ids, run, cache))

    def watch_attention(
        self,
        token_ids: torch.Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        last_layer: int | None = None,
        await_layer: OnLayer = nothing,
    ) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; their KV is written.

        await_layer: see `RowRequest`.
        """
        last = len(self.layers) - 1 if last_layer is None else last_layer
        self._kv_at(RowRequest(token_ids, run, cache, observe=observe, await_layer=await_layer), last)

    def run_rows(self, request: RowRequest) -> None:
        """All `passes`."""
        for _ in self.passes(request):
            pass

    def passes(self, request: RowRequest) -> Passes[torch.Tensor]:
        """Compute rows into their cache's buffers and blocks, and return logits of the last row `[batch, vocab]`.

        Without somebody who observes them only rows that the blocks lack, in the last layer only KV, and no logits. Rows that
        a narrowing drops run up to its layer. The others run again from the first layer, to the same KV.
        """
        if request.observe is not None:
            logits = self.logits(request)
            yield Pause.PASS
            return logits
        cache = _paged(request)
        rows = request.positions
        for narrowing in request.narrowings:
            fresh = [self._kv_at(piece, narrowing.layer, write=False) for piece in self._pieces(request, rows)]
            keys, values = zip(*fresh, strict=True)
            rows = narrowing.choose(torch.cat(keys, 2), torch.cat(values, 2))
            yield Pause.PASS
        for piece in self._pieces(request, rows[(rows >= cache.start) & (rows < cache.stop)]):
            self._kv_at(piece, len(self.layers) - 1)
            yield Pause.PASS
        return torch.empty((1, 0), device=self.device)

    def logits(self, request: RowRequest) -> torch.Tensor:
        """Compute rows in every layer; next-token logits of the last of them, `[batch, vocab]`."""
        for piece in self._pieces(request, request.positions):
            hidden = self._run(piece)
        return self.model.logits(hidden.view(*piece.token_ids.shape, -1)[:, -1])

    def settle(self, cache: BlendedCache) -> None:
        """Copy every layer of a prompt to the blocks that is not there yet: the last one, and all where no row ran."""
        assert isinstance(cache, PagedCache)
        for index in range(len(self.layers)):
            self._copy_stored(cache, index, [cache.blocks])

    def _pieces(self, request: RowRequest, rows: torch.Tensor) -> Iterator[RowRequest]:
        """These rows of a request in ascending pieces that fit a pass: each reads what those before it wrote."""
        batch = request.token_ids.shape[0]
        most_sequences = self.model.config.scheduler_config.max_num_seqs
        backend = self.layers[0].get_attn_backend().get_name()
        most_tokens = max(1, self.most_rows // batch)
        most_runs = most_tokens if backend == _UNLIMITED else max(1, most_sequences // batch)
        for piece in torch.split(rows, most_tokens):
            cuts = [int(torch.searchsorted(piece, first)) for first, _ in runs(piece)[most_runs::most_runs]]
            for part in torch.tensor_split(piece, cuts):
                if part.shape[0]:
                    ids = request.token_ids[:, torch.searchsorted(request.positions, part)]
                    yield replace(request, token_ids=ids, run=Run.read(part), narrowings=())

    def _kv_at(self, request: RowRequest, layer: int, *, write: bool = True) -> KV:
        """Run rows up to this layer; their KV there, `[batch, kv_heads, rows, head_dim]`. write: it is kept, too."""
        try:
            self._run(request, layer, write=write)
        except Halt as halt:
            return halt.fresh
        raise AssertionError("the model has no such layer")

    def _run(self, request: RowRequest, last: int | None = None, *, write: bool = True) -> torch.Tensor:
        """One pass; hidden states `[batch x rows, hidden]`. Raises `Halt` in layer `last`, whose KV is written if `write`."""
        cache = _paged(request)
        batch = request.token_ids.shape[0]
        tables = cache.tables(batch, self.model.block_size)

        def by_prompt(states: torch.Tensor) -> torch.Tensor:
            return states.view(batch, -1, *states.shape[1:]).transpose(1, 2)

        def on_layer(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            request.await_layer(index)
            self._copy_stored(cache, index, tables)
            fresh = (by_prompt(key), by_prompt(value))
            if index == last and not write:
                raise Halt(fresh)
            keys, values = cache.layers[index].write_rows(request.run, *fresh)
            if request.observe is not None:
                impl = self.layers[index].impl
                rule = {"softcap": getattr(impl, "logits_soft_cap", None) or None, "scale": float(impl.scale)}
                queries = by_prompt(self.model.workers.all_heads(query))
                request.observe(AttentionCall(index, queries, keys, values, request.run.shared, rule))
            if index == last:
                if cache.blocks:
                    slots = slots_of(request.positions, tables, self.model.block_size)
                    self.model.write(index, key, value, slots)
                raise Halt(fresh)

        return self.model.run(
            request.token_ids, request.positions, tables, on_layer, in_scratch=not cache.blocks, shift=cache.shift
        )

    def _copy_stored(self, cache: PagedCache, index: int, tables: list[tuple[int, ...]]) -> None:
        """Copy a layer's stored KV to the blocks, unless the engine's have it."""
        layer = cache.layers[index]
        last = min(cache.stop, layer.length)
        if index in cache.in_blocks or cache.start >= last:
            return
        rows = torch.arange(cache.start, last, device=self.device)
        keys, values = (part[:, :, cache.start : last].transpose(1, 2).flatten(0, 1) for part in layer.view())
        self.model.write(index, keys, values, slots_of(rows, tables, self.model.block_size))
        if cache.blocks:
            cache.in_blocks.add(index)


def _paged(request: RowRequest) -> PagedCache:
    assert isinstance(request.cache, PagedCache)
    return request.cache
