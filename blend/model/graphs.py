"""Passes of few rows as CUDA graphs: one launch in place of hundreds, which take the host longer than the GPU.

A graph repeats its launches on the same memory. So token ids, positions and the prompt of each row stand in buffers that stay
where they are, and a table says where the prompts' caches lie (`blend_kernels.CacheAddresses`). One graph for each number of
rows then serves every prompt. Fewer rows are padded; padded rows write nowhere.

A pass is cut into parts of a few layers. The first layers then run while the host launches later ones, and while the stored KV
of those is placed.

A graph is compared with the same pass run eagerly, bit by bit, before it is used. If they differ, or the model cannot be
captured, all passes of this decoder run eagerly, and the log says why once.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from blend.errors import first_line
from blend.model.addressed_pass import MOST_PROMPTS, MOST_WATCHED, AddressedPass, Part, Result, Watch
from blend.model.cache import BlendedCache, LayerRotation, Run
from blend.model.driver import RowDriver
from blend.model.passes import OnLayer, RowRequest, nothing
from blend_kernels import CacheAddresses, CacheShape, LayerBuffers

LOG = logging.getLogger("kvblend.graphs")

# Rows of a graph. More rows keep a GPU busy longer than launching them eagerly takes, and padding would cost more than that.
BUCKETS = (1, 2, 4, 8, 16, *range(64, 1025, 64))
EAGER_USES = 2  # passes of so many rows run eagerly before their graph is captured, which takes some ten times as long
FREE_BYTES = 2**30  # that a capture leaves
# Relative error of a graph's result against an ordinary pass, in the Euclidean norm: on an H100 4 to 6 % in bfloat16, with
# random weights of 32 layers. Results that have nothing to do with each other are 140 % apart.
MOST_APART = 0.2


Capture = Callable[[AddressedPass], tuple[Result, list[Part]]]
"""Takes a pass. Returns the tensors with its result, and the parts that one after another repeat the pass into them."""


class _Graph(NamedTuple):
    """A captured pass: its input, its result, and the parts that run it."""

    forward: AddressedPass
    result: Result
    parts: list[Part]

    def replay(self, await_layer: OnLayer = nothing) -> Result:
        """Run it. await_layer: as in `RowRequest`."""
        for part in self.parts:
            await_layer(part.layers - 1)
            part.replay()
        return self.result


class _Key(NamedTuple):
    """Which graph: so many rows, and what is observed."""

    rows: int
    watch: Watch | None = None


class RowGraphs:
    """The graphs of one decoder, one for each bucket of rows, and for each kind of question.

    Use it in the thread that runs the decoder. That thread captures, too, between two passes: a capture in another one would
    break what draws random numbers on the GPU meanwhile.

    Args:
        driver: whose passes they are.
        rotations: of its layers.
        capture: captures work on the device; by default as a CUDA graph.

    Attributes:
        off: why no graph is used, or None.
        capturing: whether it runs passes for itself alone.

    """

    def __init__(self, driver: RowDriver, rotations: Sequence[LayerRotation], capture: Capture | None = None) -> None:
        self._driver = driver
        self._rotations = rotations
        self._capture = capture or CudaCapture()
        shapes = [CacheShape(*rotation.key_shape, rotation.value_shape[1]) for rotation in rotations]
        self._addresses = CacheAddresses(MOST_PROMPTS, shapes, driver.device, driver.dtype)
        self._graphs: dict[_Key, _Graph] = {}
        self._uses: Counter[_Key] = Counter()
        self.off = _why_never(driver)
        self.capturing = False

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that have a graph for logits."""
        return tuple(sorted(key.rows for key in self._graphs if key.watch is None))

    @torch.inference_mode()
    def logits(self, requests: Sequence[RowRequest]) -> Tensor | None:
        """`RowDriver.prefill` of these requests by a graph; None if there is none, so that they must run eagerly."""
        key = self._key(requests)
        if key is None or not self._has(key):
            return None
        logits = self._replay(key, requests).logits
        assert logits is not None
        if key.rows > MOST_PROMPTS:
            return logits.clone()
        ends = accumulate(request.run.rows for request in requests)
        pairs = zip(requests, ends, strict=True)
        return torch.cat([logits[end - request.outputs : end] for request, end in pairs])

    @torch.inference_mode()
    def watched(self, request: RowRequest, watch: Watch) -> Result | None:
        """The attention that the prompt's keys receive from these rows; None if they must run eagerly."""
        key = self._key([request], watch)
        if key is None or not self._has(key):
            return None
        result = self._replay(key, [request])
        assert result.masses is not None
        logits = None if result.logits is None else result.logits.clone()
        masses = result.masses[:, :, : request.run.stop].clone()
        return Result(logits, masses)

    def will_watch(self, rows: int, watch: Watch) -> bool:
        """Whether `watched` will run a pass of so many rows, if its cache is a plain one."""
        bucket = _bucket(rows)
        return self.off is None and bucket is not None and _Key(bucket, watch) in self._graphs

    def capture_next(self) -> bool:
        """Capture one more graph: of what prompts used, then of the next larger bucket. False if there is none left."""
        if self.off is not None or self._driver.reads_caches is not True:
            return False
        keys = [*self._uses, *map(_Key, BUCKETS)]
        key = next((key for key in keys if key not in self._graphs), None)
        return key is not None and self._take(key)

    def capture(self, bucket: int, watch: Watch | None = None) -> bool:
        """Capture the graph of a bucket and compare it. False if that fails, which switches all graphs off."""
        return self._take(_Key(bucket, watch))

    def _key(self, requests: Sequence[RowRequest], watch: Watch | None = None) -> _Key | None:
        """The graph that computes these rows, or None if none can."""
        if self.off is not None or self._driver.reads_caches is not True:
            return None
        bucket = _bucket(sum(request.run.rows for request in requests))
        if bucket is None or not all(map(_is_plain, requests)):
            return None
        if watch is not None:
            return _Key(bucket, watch) if requests[0].run.stop <= MOST_WATCHED else None
        if bucket > MOST_PROMPTS and (len(requests) > 1 or requests[0].outputs > 1):
            return None
        return _Key(bucket)

    def _has(self, key: _Key) -> bool:
        """Whether there is a graph; after some uses it is captured here."""
        if key in self._graphs:
            return True
        self._uses[key] += 1
        return self._uses[key] > EAGER_USES and self._take(key)

    def _replay(self, key: _Key, requests: Sequence[RowRequest]) -> Result:
        """Run the graph over these rows. Its result is overwritten by the next run."""
        self._assign(requests)
        graph = self._graphs[key]
        graph.forward.fill(requests)

        def await_layer(layer: int) -> None:
            for request in requests:
                request.await_layer(layer)

        result = graph.replay(await_layer)
        for request in requests:
            for layer in request.cache.layers:
                layer.length = max(layer.length, request.run.stop)
        return result

    def _take(self, key: _Key) -> bool:
        self.capturing = True
        try:
            with self._driver.lock:
                self._graphs[key] = self._checked(key)
        except Exception as error:  # whatever a model or driver raises: the eager pass remains
            self.off = first_line(error) or type(error).__name__
            self._graphs.clear()
            LOG.warning(
                "kvblend: no CUDA graphs on this machine, passes run eagerly: %s (please report it with `blend env`)",
                self.off,
            )
        finally:
            self.capturing = False
        return key in self._graphs

    @torch.inference_mode()
    def _checked(self, key: _Key) -> _Graph:
        """Capture a graph and compare it with eager passes over other caches. Raises RuntimeError if they differ."""
        forward = AddressedPass(self._driver, self._addresses, *key)
        requests = self._trial(key, seed=1)
        self._assign(requests)
        forward.fill(requests)
        graph = _Graph(forward, *self._capture(forward))
        for seed in (2, 3):  # caches that lie elsewhere
            requests = self._trial(key, seed)
            self._assign(requests)
            forward.fill(requests)
            eager = [*_tensors(forward.run()), *_fresh_rows(requests, forward.depth)]
            eager = [tensor.clone() for tensor in eager]
            for kv in _fresh_rows(requests, forward.depth):
                kv.zero_()
            replayed = [*_tensors(graph.replay()), *_fresh_rows(requests, forward.depth)]
            if not all(map(_same_bits, replayed, eager)):
                raise RuntimeError(f"the graph of {key.rows} rows differs from the eager pass")
            if graph.result.logits is not None:
                self._compare(requests, graph.result.logits)
        return graph

    def _compare(self, requests: Sequence[RowRequest], logits: Tensor) -> None:
        """Raise RuntimeError unless logits agree with those of an ordinary pass as well as another kernel's can."""
        ordinary = RowDriver.prefill(self._driver, requests).float()
        difference = logits[: ordinary.shape[0]].float() - ordinary
        error = float(difference.norm() / ordinary.norm())
        if not error <= MOST_APART:
            raise RuntimeError(f"the graph's pass differs from the ordinary one by {error:.1%}")

    def _trial(self, key: _Key, seed: int) -> list[RowRequest]:
        """Rows behind random caches: one less than the bucket, so that one is padded, of two prompts where it may be."""
        driver = self._driver
        device = driver.device
        count = max(1, key.rows - 1)
        alone = key.rows > MOST_PROMPTS or key.watch is not None or count == 1
        shares = (count,) if alone else (count // 2, count - count // 2)
        random = torch.Generator(device).manual_seed(seed)
        requests = []
        for rows in shares:
            start = 30 + 13 * seed
            run = Run.consecutive(start, start + rows, device)
            cache = BlendedCache(driver.kv_layers, run.stop + seed)
            for layer, rotation in zip(cache.layers, self._rotations, strict=True):
                kv = []
                for heads, dim in (rotation.key_shape, rotation.value_shape):
                    numbers = torch.randn((1, heads, run.stop, dim), generator=random, device=device)
                    kv.append(numbers.to(driver.dtype))
                layer.write_run(0, *kv)
            ids = torch.randint(driver.vocabulary, (1, rows), generator=random, device=device)
            gives_all = key.rows <= MOST_PROMPTS and key.watch is None
            requests.append(RowRequest(ids, run, cache, outputs=rows if gives_all else 1))
        return requests

    def _assign(self, requests: Sequence[RowRequest]) -> None:
        caches = []
        for request in requests:
            caches.append([LayerBuffers(layer.keys, layer.values) for layer in request.cache.layers])
        self._addresses.assign(caches)


class CudaCapture:
    """Captures CUDA graphs, which share the memory of their intermediate results: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: AddressedPass) -> tuple[Result, list[Part]]:
        """Run once on a side stream, which compiles kernels and makes workspaces, then capture there, part by part."""
        if torch.cuda.mem_get_info()[0] + _reserved() < FREE_BYTES:
            raise RuntimeError("too little GPU memory is free for CUDA graphs")
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward.run()
        torch.cuda.synchronize()
        # What is freed during a capture would break it. And a workspace of cuBLAS that a graph shared with other streams would
        # be written by both at once: without one, the capture makes its own.
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
        cuts = forward.cuts
        graphs = list[torch.cuda.CUDAGraph]()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut(layer: int) -> None:
            if layer in cuts:
                graphs[-1].capture_end()
                begin()

        forward.before_layer = cut
        try:
            with torch.cuda.stream(stream):
                begin()
                try:
                    result = forward.run()
                finally:
                    graphs[-1].capture_end()
        finally:
            forward.before_layer = nothing
            torch._C._cuda_clearCublasWorkspaces()
        ends = [*cuts, forward.depth]
        pairs = zip(ends, graphs, strict=True)
        return result, [Part(end, graph.replay) for end, graph in pairs]


def _reserved() -> int:
    """Bytes that torch holds and does not use."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _why_never(driver: RowDriver) -> str | None:
    """Why no pass of this model can be a graph."""
    if driver.recurrent:
        return "the model has recurrent layers"
    if driver.kv_layers < len(driver.layers):
        return "layers of the model share keys and values"
    if not driver.last_row_only:
        return "the model computes the logits of all rows"
    return None


def _is_plain(request: RowRequest) -> bool:
    """Whether nothing but rows and logits is asked for, over a cache that has its buffers."""
    hooks = request.narrowings or request.observe or request.on_operator
    layer = request.cache.layers[0]
    has_buffers = layer.is_initialized and request.run.stop <= layer.capacity
    return not hooks and has_buffers and request.mask == "exact" and request.token_ids.shape[0] == 1


def _bucket(rows: int) -> int | None:
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def _tensors(result: Result) -> list[Tensor]:
    return [tensor for tensor in result if tensor is not None]


def _fresh_rows(requests: Sequence[RowRequest], depth: int) -> Iterator[Tensor]:
    """Views of the KV that these requests' last rows wrote in so many layers."""
    for request in requests:
        count = request.run.rows
        for layer in range(depth):
            for kv in request.cache.view(layer):
                yield kv[:, :, kv.shape[2] - count :]


def _same_bits(first: Tensor, second: Tensor) -> bool:
    first_bytes = first.contiguous().view(torch.uint8)
    second_bytes = second.contiguous().view(torch.uint8)
    return torch.equal(first_bytes, second_bytes)
