"""A precompute on a Ray cluster: workers that hold a decoder, forward passes handed to whoever is free.

The workers write straight into the store that they share; this process divides the documents, writes the index, decides on the
surrogate context and measures the KV correction. What a lost worker had in hand is given to another. Cluster nodes need kvblend
installed, and must see model and store under the same names as this process: the store on a disk that all mount, or at an
address such as s3://bucket/name, whose credentials they have.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.chunks.library import ChunkLibrary, Tokens
from blend.chunks.work import Pass, Work, tokens_of
from blend.errors import ConfigError, WorkersError
from blend.many.shards import Compute, Computed
from blend.timing import Progress

if TYPE_CHECKING:
    from blend.rag import Rag

ANSWER_S = 10.0  # for a cluster to take a connection
WAIT_S = 1800.0  # until a cluster has given a first worker, and that has loaded its model
ATTEMPTS = 3  # workers that may be lost over one batch; and so many times all of them while they load the model
BATCH = 4  # forward passes that a worker is handed at once: on an accelerator one takes a fraction of a second
OBJECT_BYTES = 100 << 20  # of a Ray that is started here: caches go to the store, and what is passed on is small
OnLoss = Callable[[str], None]


class Cluster(NamedTuple):
    """A Ray cluster that this process is connected to. place: in words. workers: how many, with what each is given."""

    place: str
    workers: int
    resources: dict[str, float]


class Worker:
    """What runs on a node: a decoder and the store, loaded when the first call comes, so that errors come back as they are."""

    def __init__(self, recipe: dict[str, Any], prefix: Tokens) -> None:
        self._recipe, self._prefix = recipe, prefix
        self._library: ChunkLibrary | None = None

    def begin(self) -> tuple[str, ...]:
        """Load everything; the namespaces that the caches will be in."""
        from blend.rag import Rag

        rag = Rag(**self._recipe)
        config = rag.corpus_config
        self._library = ChunkLibrary(rag.decoder, rag.store, self._prefix, config.batch_tokens, corpus=config.name)
        return namespaces(self._library)

    def compute(self, passes: list[Pass]) -> Computed:
        """Compute and store what the store lacks of these."""
        assert self._library is not None
        counts = [self._library.compute_pass(one) for one in passes]
        return Computed(sum(counts), sum(tokens_of(one) for one, count in zip(passes, counts, strict=True) if count))


@contextmanager
def cluster(address: str, workers: int | None, *, on_gpu: bool) -> Iterator[Cluster]:
    """Connect to the cluster at `address`, or start one on this machine where that is empty and $RAY_ADDRESS is not set.

    workers: by default one for every GPU, or one for every machine where there are none, or `on_gpu` does not want any.
    Raises `ConfigError` when Ray is not installed or nothing listens there, `WorkersError` for what else Ray says.
    """
    ray = _ray()
    _require_answer(address)
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    joined = address or os.environ.get("RAY_ADDRESS")
    local = {} if joined else {"include_dashboard": False, "object_store_memory": OBJECT_BYTES}
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="ERROR", **local)
    except Exception as error:  # Ray raises every kind, a plain Exception where it is too slow to start
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        what = f"no Ray cluster answers at {joined}" if joined else "Ray cannot be started on this machine"
        raise WorkersError(f"{what} ({reason}); see `ray status`, or use --shard") from None
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own in the place
        with redirect_stdout(sys.stderr):  # where a thread of Ray's tells what happened to workers
            yield _crew_of(ray, address, workers, on_gpu)
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise `ConfigError` where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):  # none, or a word of Ray's such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}); see `ray status` on its head node") from None


def _crew_of(ray: Any, address: str, workers: int | None, on_gpu: bool) -> Cluster:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    gpus = int(sum(node.get("GPU", 0) for node in nodes)) if on_gpu else 0
    count = workers or gpus or len(nodes) or 1
    place = f"the Ray cluster at {address}" if address else "the Ray cluster"
    if gpus:
        return Cluster(place, count, {"num_gpus": 1})
    # A decoder on a CPU computes with all cores that it is given.
    cores = min((int(min(node["CPU"], sum(n["CPU"] for n in nodes) / count)) for node in nodes), default=1)
    return Cluster(place, count, {"num_cpus": max(1, cores)})


def compute_on(rag: Rag, where: Cluster, on_loss: OnLoss) -> Compute:
    """Who runs the passes of a share on the cluster. on_loss: told in a line about every worker that was lost."""
    return lambda work, passes, progress: _Crew(rag, where, work, on_loss).run(passes, progress)


def namespaces(library: ChunkLibrary) -> tuple[str, ...]:
    """Of isolated and contextual caches: the same wherever weights, configuration, dtype and surrogate context are the same."""
    encoders = (library.isolated, library.contextual)
    return tuple(encoder.identity.namespace for encoder in encoders if encoder is not None)


class _Task(NamedTuple):
    """What a worker has in hand; no passes while it loads."""

    worker: Any
    passes: tuple[Pass, ...] = ()


@dataclass
class _Crew:
    """Workers on one precompute."""

    rag: Rag
    where: Cluster
    work: Work
    on_loss: OnLoss
    _busy: dict[Any, _Task] = field(default_factory=dict)
    _begun: bool = False  # whether any worker has loaded its model
    _losses: Counter[tuple[Pass, ...]] = field(default_factory=Counter)

    def run(self, passes: list[Pass], progress: Progress) -> Computed:
        """Have all passes computed. Raises what a worker raises, and `WorkersError` when too many are lost."""
        size = min(BATCH, -(-len(passes) // self.where.workers)) or 1
        queue = deque(tuple(passes[at : at + size]) for at in range(0, len(passes), size))
        total, seen, done = sum(map(tokens_of, passes)), 0, Computed()
        progress("encode", 0, total)
        for _ in range(min(self.where.workers, len(queue))):
            self._hire()
        try:
            while self._busy:
                task, found = self._next(queue)
                done = Computed(done.caches + found.caches, done.tokens + found.tokens)
                seen += sum(map(tokens_of, task.passes))
                progress("encode", seen, total)
        finally:
            for task in self._busy.values():
                _ray().kill(task.worker)
        return done

    def _next(self, queue: deque[tuple[Pass, ...]]) -> tuple[_Task, Computed]:
        """A call that came to its end; its worker is given more to do. What a lost one had in hand is queued again."""
        ray, ref = _ray(), self._ended()
        task = self._busy.pop(ref)
        try:
            result = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError:  # killed, out of memory, or its machine is gone
            self._lost(task, queue)
            return _Task(task.worker), Computed()
        if not task.passes:
            self._check(result)
        self._hand_out(task.worker, queue)
        return task, Computed(*result) if task.passes else Computed()

    def _hire(self) -> None:
        recipe, prefix = self.rag.recipe(), self.work.library.prefix
        # Never restarted by Ray: a worker that comes back has lost its decoder, and what it had in hand goes to another.
        kind = _ray().remote(max_restarts=0, scheduling_strategy="SPREAD", **self.where.resources)(Worker)
        worker = kind.remote(recipe, prefix)
        self._busy[worker.begin.remote()] = _Task(worker)

    def _ended(self) -> Any:
        """A call that has ended, whatever its end."""
        deadline = time.monotonic() + WAIT_S
        ready: list[Any] = []
        while not ready and (self._begun or time.monotonic() < deadline):
            ready = self._wait()
        if ready:
            return ready[0]
        asked = ", ".join(f"{amount:g} {name.removeprefix('num_')}" for name, amount in self.where.resources.items())
        raise WorkersError(
            f"{self.where.place} has given no worker with {asked} that is ready, for {WAIT_S:g} s: "
            "see `ray status`, or ask for fewer with --ray-workers"
        )

    def _wait(self) -> list[Any]:
        """A call that has ended, if one does within a second. A signal ends it, as it ends everything else."""
        try:
            ready, _ = _ray().wait(list(self._busy), num_returns=1, timeout=1.0)
        except SystemError as error:  # what Ray makes of an exception that a signal handler raised meanwhile
            raise error.__cause__ or error from None
        return list(ready)

    def _hand_out(self, worker: Any, queue: deque[tuple[Pass, ...]]) -> None:
        if queue:
            passes = queue.popleft()
            self._busy[worker.compute.remote(list(passes))] = _Task(worker, passes)
        else:
            _ray().kill(worker)

    def _lost(self, task: _Task, queue: deque[tuple[Pass, ...]]) -> None:
        self._losses[task.passes] += 1
        if self._losses[task.passes] >= (ATTEMPTS if task.passes else ATTEMPTS * self.where.workers):
            what = "over the same batch" if task.passes else "while they loaded the model"
            raise WorkersError(
                f"{self._losses[task.passes]} workers were lost {what}: see the logs of Ray for why (out of memory?); "
                "what was computed is stored, run the same command again to go on"
            )
        if task.passes:
            queue.appendleft(task.passes)
        self.on_loss("a worker was lost; what it had in hand is given to another")
        if queue:
            self._hire()

    def _check(self, found: tuple[str, ...]) -> None:
        if found != namespaces(self.work.library):
            raise WorkersError(
                "a worker would compute other caches than this process (other weights, configuration, dtype or kvblend): "
                "make model and kvblend the same on all nodes"
            )
        self._begun = True


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'kvblend[ray]'") from None
    return ray
