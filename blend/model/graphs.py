"""Passes of few rows as CUDA graphs: one launch in place of hundreds, which take the host longer than the GPU.

A graph repeats its launches on the same memory. So token ids, positions and the prompt of each row stand in buffers that stay
where they are, and a table says where the prompts' caches lie (`blend_kernels.CacheAddresses`). One graph for each number of
rows then serves every prompt. Fewer rows are padded; padded rows write nowhere.

A graph is compared with the same pass run eagerly, bit by bit, before it is used. If they differ, or the model cannot be
captured, all passes of this decoder run eagerly, and the log says why once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers.cache_utils import Cache

from blend.config import MaskMode
from blend.errors import first_line
from blend.model.cache import KV, BlendedCache, Run
from blend.model.forward import LayerQuery, PassLayer, RowRequest, same_memory
from blend_kernels import CacheAddresses, attend_rows, write_rows

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

LOG = logging.getLogger("kvblend.graphs")

BUCKETS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024)  # rows of a graph
MOST_PROMPTS = 16  # in a pass of at most as many rows; larger passes are of one prompt
MOST_KEYS = 16_384  # that graphs cut into parts; of longer prompts each part is longer
EAGER_USES = 2  # passes of so many rows run eagerly before their graph is captured, which takes some ten times as long
FREE_BYTES = 2**30  # that a capture leaves
LEAST_AGREEMENT = 0.05  # of a graph's logits with those of an ordinary pass: relative error in the Euclidean norm

Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""Takes work on fixed buffers. Returns the tensor with its result, and what repeats the work into it."""


class AddressedPass:
    """A `DrivenPass` over rows and caches that device memory names.

    Args:
        decoder: runs the rows.
        addresses: of the prompts' caches.
        rows: how many, padded ones included.

    """

    def __init__(self, decoder: Decoder, addresses: CacheAddresses, rows: int) -> None:
        self._decoder, self._addresses, self._rows = decoder, addresses, rows
        self._token_ids = torch.zeros((1, rows), dtype=torch.int64, device=decoder.device)
        self._positions = torch.full((rows,), -1, dtype=torch.int64, device=decoder.device)
        self._prompts = torch.zeros_like(self._positions)
        self._last = torch.zeros_like(self._positions[:1])
        self._fresh: tuple[int, KV] | None = None
        self._cache = Cache(layers=[PassLayer(self, index) for index in range(decoder.kv_layers)])

    def fill(self, requests: Sequence[RowRequest]) -> None:
        """Take the rows of these requests."""
        counts = [request.positions.shape[0] for request in requests]
        count = sum(counts)
        self._token_ids[:, :count] = torch.cat([request.token_ids for request in requests], dim=1)
        self._positions[:count] = torch.cat([request.positions for request in requests])
        self._positions[count:] = -1
        self._last.fill_(count - 1)
        if len(requests) > 1:
            prompts = [number for number, rows in enumerate(counts) for _ in range(rows)]
            self._prompts[:count] = torch.tensor(prompts).to(self._prompts.device, non_blocking=True)
        else:
            self._prompts.zero_()

    def run(self) -> torch.Tensor:
        """Run the rows. Returns logits of all of them `[rows, vocab]`, or in large passes of the last one `[1, vocab]`."""
        decoder = self._decoder
        arguments = {decoder.cache_argument: self._cache}
        if self._rows > MOST_PROMPTS:
            arguments["logits_to_keep"] = self._last
        positions = self._positions.clamp_min(0)[None]
        with decoder.driven(self):
            out = decoder.model(input_ids=self._token_ids, position_ids=positions, use_cache=True, **arguments)
        return out.logits[0]  # type: ignore[no-any-return]

    def length(self, layer: int) -> int:
        """None that the host knows."""
        return 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write a layer's fresh KV into the caches. Returns it, as a sign for `attend`."""
        write_rows(self._addresses, layer, keys, values, self._positions, self._prompts)
        self._fresh = layer, (keys, values)
        return keys, values

    def attend(self, attention: LayerQuery) -> torch.Tensor:
        """Attention of the rows over their caches, `[batch, rows, heads, value_dim]`."""
        if self._fresh is None or not all(map(same_memory, self._fresh[1], (attention.key, attention.value))):
            raise RuntimeError("the model changes the keys and values that its cache returned")
        out: torch.Tensor = attend_rows(
            self._addresses,
            self._fresh[0],
            attention.query,
            self._positions,
            self._prompts,
            most_keys=MOST_KEYS,
            **attention.rule,
        )
        return out.transpose(1, 2)


class _Graph(NamedTuple):
    """A captured pass: its input, its result, and what runs it."""

    forward: AddressedPass
    logits: torch.Tensor
    replay: Callable[[], None]


class RowGraphs:
    """The graphs of one decoder, one for each bucket of rows.

    Use it in the thread that runs the decoder. That thread captures, too, between two passes: a capture in another one would
    break what draws random numbers on the GPU meanwhile.

    Args:
        decoder: whose passes they are.
        capture: captures work on the device; by default as a CUDA graph.

    Attributes:
        off: why no graph is used, or None.

    """

    def __init__(self, decoder: Decoder, capture: Capture | None = None) -> None:
        self._decoder, self._capture = decoder, capture or CudaCapture()
        self._addresses = CacheAddresses(MOST_PROMPTS, decoder.kv_layers, decoder.device, decoder.dtype)
        self._graphs: dict[int, _Graph] = {}
        self._uses: Counter[int] = Counter()
        self.off = _why_never(decoder)

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that have a graph."""
        return tuple(sorted(self._graphs))

    @torch.inference_mode()
    def logits(self, requests: Sequence[RowRequest], mask: MaskMode = "exact") -> torch.Tensor | None:
        """`RowDriver.prefill` of these requests by a graph; None if there is none, so that they must run eagerly."""
        bucket = self._bucket(requests, mask)
        if bucket is None or not self._has(bucket):
            return None
        for request in requests:
            if request.await_layer is not None:
                request.await_layer(self._decoder.kv_layers - 1)
        graph = self._graphs[bucket]
        self._assign([request.cache for request in requests])
        graph.forward.fill(requests)
        graph.replay()
        for request in requests:
            _count_rows(request)
        if bucket > MOST_PROMPTS:
            return graph.logits.clone()
        ends = list(accumulate(request.positions.shape[0] for request in requests))
        pairs = zip(requests, ends, strict=True)
        return torch.cat([graph.logits[end - request.outputs : end] for request, end in pairs])

    def capture_next(self) -> bool:
        """Capture the graph of one more bucket, the smallest first. False if there is none left."""
        if self.off is not None or self._decoder.reads_caches is not True:
            return False
        bucket = next((bucket for bucket in BUCKETS if bucket not in self._graphs), None)
        return bucket is not None and self.capture(bucket)

    def _bucket(self, requests: Sequence[RowRequest], mask: MaskMode) -> int | None:
        """The bucket of these rows, or None if no graph computes them."""
        if self.off is not None or mask != "exact" or self._decoder.reads_caches is not True:
            return None
        rows = sum(request.positions.shape[0] for request in requests)
        bucket = next((bucket for bucket in BUCKETS if rows <= bucket), None)
        if bucket is None or not all(map(_is_plain, requests)):
            return None
        if bucket > MOST_PROMPTS and (len(requests) > 1 or requests[0].outputs > 1):
            return None
        return bucket

    def _has(self, bucket: int) -> bool:
        """Whether there is a graph; after some uses it is captured here."""
        if bucket in self._graphs:
            return True
        self._uses[bucket] += 1
        return self._uses[bucket] > EAGER_USES and self.capture(bucket)

    def capture(self, bucket: int) -> bool:
        """Capture the graph of a bucket and compare it. False if that fails, which switches all graphs off."""
        try:
            with self._decoder.lock:
                self._graphs[bucket] = self._checked(bucket)
        except Exception as error:  # whatever a model or driver raises: the eager pass remains
            self.off = first_line(error) or type(error).__name__
            self._graphs.clear()
            LOG.warning(
                "kvblend: no CUDA graphs on this machine, passes run eagerly: %s (please report it with `blend env`)",
                self.off,
            )
        return bucket in self._graphs

    @torch.inference_mode()
    def _checked(self, bucket: int) -> _Graph:
        """Capture a graph and compare it with eager passes over other caches. Raises RuntimeError if they differ."""
        forward = AddressedPass(self._decoder, self._addresses, bucket)
        graph: _Graph | None = None
        for seed in (1, 2, 3):
            requests = self._trial(bucket, seed)
            self._assign([request.cache for request in requests])
            forward.fill(requests)
            eager = forward.run().clone()
            written = [kv.clone() for kv in _fresh_rows(requests)]
            if graph is None:  # over the first caches; the others lie elsewhere
                graph = _Graph(forward, *self._capture(forward.run))
                continue
            for kv in _fresh_rows(requests):
                kv.zero_()
            graph.replay()
            if not all(map(_same_bits, (graph.logits, *_fresh_rows(requests)), (eager, *written))):
                raise RuntimeError(f"the graph of {bucket} rows differs from the eager pass")
            self._compare(requests, graph.logits)
        assert graph is not None
        return graph

    def _compare(self, requests: Sequence[RowRequest], logits: torch.Tensor) -> None:
        """Raise RuntimeError unless logits agree with those of an ordinary pass as well as another kernel's can."""
        ordinary = self._decoder.prefill_eagerly(requests).float()
        ours = logits[: sum(request.outputs for request in requests)].float()
        error = float((ours - ordinary).norm() / ordinary.norm())
        if not error <= LEAST_AGREEMENT:
            raise RuntimeError(f"the graph's pass differs from the ordinary one by {error:.1%}")

    def _trial(self, bucket: int, seed: int) -> list[RowRequest]:
        """Rows behind random caches: one less than the bucket, so that one is padded, of two prompts where it may be."""
        decoder, count = self._decoder, max(1, bucket - 1)
        shares = (count,) if bucket > MOST_PROMPTS or count == 1 else (count // 2, count - count // 2)
        random = torch.Generator(decoder.device).manual_seed(seed)
        requests = []
        for rows in shares:
            start = 30 + 13 * seed
            run = Run.consecutive(start, start + rows, decoder.device)
            cache = decoder.new_cache(run.stop + seed)
            for layer, rotation in zip(cache.layers, decoder.rotations, strict=True):
                shapes = ((1, heads, run.stop, dim) for heads, dim in (rotation.key_shape, rotation.value_shape))
                drawn = [torch.randn(shape, generator=random, device=decoder.device) for shape in shapes]
                if rotation.width:
                    layer.write_run(0, *(part.to(decoder.dtype) for part in drawn))
            ids = torch.randint(decoder.vocabulary, (1, rows), generator=random, device=decoder.device)
            requests.append(RowRequest.of(ids, run, cache, outputs=rows if bucket <= MOST_PROMPTS else 1))
        return requests

    def _assign(self, caches: Sequence[BlendedCache]) -> None:
        for number, cache in enumerate(caches):
            layers = cache.layers
            self._addresses.assign(number, [layer.keys for layer in layers], [layer.values for layer in layers])
        self._addresses.upload()


class CudaCapture:
    """Captures CUDA graphs, which share the memory of their intermediate results: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run once on a side stream, which compiles kernels and makes workspaces, then capture there."""
        if torch.cuda.mem_get_info()[0] + _reserved() < FREE_BYTES:
            raise RuntimeError("too little GPU memory is free for CUDA graphs")
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            logits = run()
        return logits, graph.replay


def _reserved() -> int:
    """Bytes that torch holds and does not use."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _why_never(decoder: Decoder) -> str | None:
    """Why no pass of this model can be a graph."""
    if decoder.recurrent:
        return "the model has recurrent layers"
    if decoder.kv_layers < len(decoder.layers):
        return "layers of the model share keys and values"
    if "logits_to_keep" not in (decoder.last_row_only or {}):
        return "the model computes the logits of all rows"
    return None


def _is_plain(request: RowRequest) -> bool:
    """Whether nothing but rows and logits is asked for, over a cache that has its buffers."""
    hooks = request.narrowings or request.observe or request.on_operator
    layer = request.cache.layers[0]
    return (
        not hooks
        and request.run is not None
        and request.token_ids.shape[0] == 1
        and layer.on_rows is None
        and (layer.is_initialized and request.run.stop <= layer.capacity)
    )


def _count_rows(request: RowRequest) -> None:
    """The host's part of writing rows: how many are in use."""
    assert request.run is not None
    for layer in request.cache.layers:
        layer.length = max(layer.length, request.run.stop)


def _fresh_rows(requests: Sequence[RowRequest]) -> Iterator[torch.Tensor]:
    """Views of the KV that these requests' last rows wrote."""
    for request in requests:
        count = request.positions.shape[0]
        for layer in range(len(request.cache.layers)):
            for kv in request.cache.view(layer):
                yield kv[:, :, kv.shape[2] - count :]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
