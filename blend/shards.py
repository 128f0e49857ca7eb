"""A precompute by the workers of a Ray cluster, each of which computes one share of the caches after another.

Workers write straight into the shared store. Every node needs kvblend, and the same model and store under the same names:
a store on a disk that all nodes mount, or at an address such as s3://bucket/name.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.config import Share
from blend.errors import ConfigError, WorkersError, first_line
from blend.stopwatch import Progress
from blend.types import CacheKind
from blend_retrieval.installation import install_command

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.layout import Tokens
    from blend.rag import Rag
    from blend.types import CacheKey

_CONNECT_S = 10.0  # for a cluster to accept a connection
_START_S = 1800.0  # until a first worker has loaded its model
_RETRIES = 3  # how often Ray restarts a worker, and retries what it was computing
_BATCHES = 4  # per worker: fewer show no progress, more pad more
_OBJECT_BYTES = 100 << 20  # of a Ray started here: caches go to the store, Ray passes on little


class RayWorker:
    """Runs on a node: a decoder and the store, loaded by the first call so that errors arrive as they were raised."""

    def __init__(self, recipe: dict[str, Any], prefix: Tokens) -> None:
        self.recipe = recipe
        self.prefix = prefix
        self.library: ChunkLibrary | None = None

    def begin(self) -> tuple[str, ...]:
        """Load everything; returns the namespaces of the caches."""
        from blend.chunks.library import ChunkLibrary
        from blend.rag import Rag

        if self.library is None:
            rag = Rag(**self.recipe)
            config = rag.corpus_config
            self.library = ChunkLibrary(rag.decoder, rag.store, self.prefix, config.batch_tokens, corpus=config.name)
        return _namespaces(self.library)

    def compute(self, variants: Sequence[CacheKey]) -> int:
        """Compute and store those of these caches that the store lacks; returns the tokens of all."""
        self.begin()
        assert self.library
        self.library.compute(self.library.missing_of(variants))
        return _tokens(variants)


class RayCluster(NamedTuple):
    """A Ray cluster that this process is connected to. resources: of each of the `workers`."""

    ray: Any
    place: str
    workers: int
    resources: dict[str, float]

    def precompute(self, rag: Rag, library: ChunkLibrary, missing: Sequence[CacheKey], progress: Progress) -> int:
        """Compute and store caches on the workers; returns their tokens. Raises what a worker raises, and `WorkersError`."""
        shares = self._shares(library, missing)
        progress("encode", 0, _tokens(missing))
        if not shares:
            return 0
        kind = self.ray.remote(
            max_restarts=_RETRIES, max_task_retries=_RETRIES, scheduling_strategy="SPREAD", **self.resources
        )(RayWorker)
        workers = [kind.remote(rag.recipe(), library.prefix) for _ in range(min(self.workers, len(shares)))]
        try:
            return self._run(workers, shares, library, progress)
        finally:
            for worker in workers:
                self.ray.kill(worker)

    def _shares(self, library: ChunkLibrary, missing: Sequence[CacheKey]) -> list[list[CacheKey]]:
        """The caches in shares by digest, isolated ones first: questions can be answered with them already."""
        whole = Share(1, self.workers * _BATCHES)
        shares: dict[tuple[int, int], list[CacheKey]] = {}
        kinds = list(CacheKind)
        for variant in missing:
            share = kinds.index(variant.kind), whole.number_of(library.key(variant))
            shares.setdefault(share, []).append(variant)
        return [shares[share] for share in sorted(shares)]

    def _run(self, workers: list[Any], shares: list[list[CacheKey]], library: ChunkLibrary, progress: Progress) -> int:
        """Hand every idle worker the next share until all are done."""
        from ray.util import ActorPool

        pool = ActorPool(workers)
        for _ in workers:
            pool.submit(lambda worker, _: worker.begin.remote(), None)
        for share in shares:
            pool.submit(lambda worker, share: worker.compute.remote(share), share)
        computed = 0
        total = sum(map(_tokens, shares))
        deadline = time.monotonic() + _START_S
        while pool.has_next():
            result = self._next(pool, deadline)
            deadline = math.inf
            if isinstance(result, int):
                computed += result
                progress("encode", computed, total)
            elif result != _namespaces(library):
                raise WorkersError(
                    "a worker would compute other caches than this process (other weights, configuration, dtype or kvblend): "
                    "make model and kvblend the same on all nodes"
                )
        return computed

    def _next(self, pool: Any, deadline: float) -> Any:
        """The result of the next call that ends. A signal interrupts the wait."""
        while time.monotonic() < deadline:
            try:
                return pool.get_next_unordered(timeout=1.0)
            except TimeoutError:
                continue
            except SystemError as error:  # Ray's wrapper around an exception of a signal handler
                raise error.__cause__ or error from None
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except (
                self.ray.exceptions.RayError
            ):  # killed, out of memory, or its machine is gone, and restarts did not help
                raise WorkersError(
                    f"a worker was lost {_RETRIES + 1} times: see Ray's logs for the reason (out of memory?); "
                    "what was computed is stored, run the same command again to go on"
                ) from None
        need = ", ".join(f"{amount:g} {name.removeprefix('num_')}" for name, amount in self.resources.items())
        raise WorkersError(
            f"{self.place} has started no worker with {need} within {_START_S:g} s: see `ray status`, or ask for fewer with "
            "--ray-workers"
        )


@contextmanager
def ray_cluster(address: str, workers: int | None, *, on_gpu: bool) -> Iterator[RayCluster]:
    """Connect to the Ray cluster at `address`; if that and $RAY_ADDRESS are empty, start one on this machine.

    workers: by default one for every GPU, or one for every machine if there are none or `on_gpu` is false. Raises
    `ConfigError` if Ray is not installed or nothing listens there, `WorkersError` for other errors of Ray.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(f"--ray needs Ray: {install_command('ray')}") from None
    _require_listener(address)
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    joined = address or os.environ.get("RAY_ADDRESS")
    local = {} if joined else {"include_dashboard": False, "object_store_memory": _OBJECT_BYTES}
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="ERROR", **local)
    except Exception as error:  # Ray raises all kinds of exceptions
        reason = first_line(error)[:200]
        what = f"no Ray cluster answers at {joined}" if joined else "Ray cannot be started on this machine"
        raise WorkersError(f"{what} ({reason}); see `ray status`, or use --shard") from None
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
        with redirect_stdout(sys.stderr):  # Ray prints what happens to workers
            yield _cluster_of(ray, address, workers, on_gpu)
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise `ConfigError` if nothing listens at the address: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):  # none, or a word of Ray's such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}); see `ray status` on its head node") from None


def _cluster_of(ray: Any, address: str, workers: int | None, on_gpu: bool) -> RayCluster:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    gpus = int(sum(node.get("GPU", 0) for node in nodes)) if on_gpu else 0
    count = workers or gpus or len(nodes) or 1
    place = f"the Ray cluster at {address}" if address else "the Ray cluster"
    if gpus:
        return RayCluster(ray, place, count, {"num_gpus": 1})
    # A decoder on a CPU computes with all cores that it is given.
    cores = [node["CPU"] for node in nodes]
    share = int(min([*cores, sum(cores) / count]))
    return RayCluster(ray, place, count, {"num_cpus": max(1, share)})


def _namespaces(library: ChunkLibrary) -> tuple[str, ...]:
    """The same wherever weights, configuration, dtype and surrogate context are the same."""
    encoders = (library.isolated, library.contextual)
    return tuple(encoder.identity.namespace for encoder in encoders if encoder is not None)


def _tokens(variants: Sequence[CacheKey]) -> int:
    return sum(len(variant.chunk) for variant in variants)
