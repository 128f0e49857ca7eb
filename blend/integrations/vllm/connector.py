"""The KV connector: vLLM loads it by `kv_connector_module_path`, in its scheduler and in every worker process.

Written for vLLM 0.32 and 0.33, and for both of its model runners. In the scheduler it decides about loads and counts them; in a
worker it does them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.models.utils import extract_layer_index

from blend.integrations.vllm.contract import (
    DAMAGED,
    PARAMETER,
    LoadScheduler,
    Signer,
    Site,
    StepLoads,
    connector_options,
    refuse,
    refuse_version,
)
from blend.integrations.vllm.loads import FinishedLoads, LoadQueue, check_options, row_blender, row_model, rows_figures
from blend.integrations.vllm.workers import WorkerGroup

refuse_version(vllm_version)
COUNTERS = {
    "prompts_blended": "Prompts whose KV came from chunk caches, at least in part.",
    "prompts_uncorrected": "Blended prompts with more rows recomputed because their caches have no KV correction yet.",
    "fallbacks_cold": "Prompts of which the store held nothing: vLLM prefilled them.",
    "fallbacks_failed": "Prompts whose load failed: vLLM prefilled them.",
    "fallbacks_refused": "Requests whose ticket this vLLM's middleware did not sign: vLLM prefilled them.",
    "rows_prompt": "Rows of prompts that vLLM's own model blended.",
    "rows_recomputed": "Rows of these prompts that were computed.",
    "damaged_entries": "Damaged store entries that these prompts found; the log names each.",
}


class LoadStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts since the last report, by the names of `COUNTERS`."""

    def reset(self) -> None:
        """As its base says."""
        self.data = dict[str, Any]()

    def aggregate(self, other: LoadStats) -> LoadStats:
        """The sum of both."""
        return LoadStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def add(self, **counts: int) -> None:
        """Count; zeros are left out."""
        self.data = dict(Counter(self.data) + Counter(counts))

    def loaded(self, figures: Iterable[Mapping[str, Any]], failed: int, cold: int) -> None:
        """Loads have ended. figures: of each that succeeded. failed, cold: numbers of the others."""
        self.add(fallbacks_failed=failed, fallbacks_cold=cold)
        for load in figures:
            self.add(
                prompts_blended=1,
                prompts_uncorrected=int(load.get("uncorrected", False)),
                damaged_entries=load.get(DAMAGED, 0),
                rows_prompt=load.get("rows", 0),
                rows_recomputed=load.get("rows_computed", 0),
            )


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters in vLLM's `/metrics`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        counters = {
            name: self._counter_cls(name=f"vllm:kvblend_{name}", documentation=words, labelnames=self._labelnames)
            for name, words in COUNTERS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From scheduler to workers. alone: no request computes anything in this step."""

    step: StepLoads
    alone: bool


@dataclass
class WorkerOutput(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler: loads that ended, and whether work is left for idle steps. See `FinishedLoads`."""

    failed: set[str] = field(default_factory=set)
    cold: set[str] = field(default_factory=set)
    unfinished: bool = False
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerOutput:
        """Of several workers: what failed in one has failed."""
        figures = dict(self.figures)
        for request, load in other.figures.items():
            figures[request] = {**figures.get(request, {}), **load}
        unfinished = self.unfinished or other.unfinished
        return WorkerOutput(self.failed | other.failed, self.cold | other.cold, unfinished, figures)


class KVBlendConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads blended KV for prompts with a ticket.

    Options in `kv_connector_extra_config`: see docs/vllm.md. Raises `ValueError`, in one line, for what is not supported.

    Every load is declared asynchronous, also one that ends within the step: after a failed synchronous load vLLM's second model
    runner counts rows as computed that are not.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse(vllm_config, kv_cache_config)
        check_options(connector_options(vllm_config))
        self._scheduler = LoadScheduler(Signer.of(vllm_config))
        self._queue: LoadQueue | None = None
        self._finished = FinishedLoads()
        self._counts = LoadStats()
        self._figures: dict[str, dict[str, Any]] = {}
        # In the scheduler as the worker last reported, in the worker as it last reported to the scheduler.
        self._unfinished = False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        """None is required. VLLM may ask before it loads the weights: refuse as early."""
        refuse(vllm_config, None)
        check_options(connector_options(vllm_config))

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many rows are claimed, and whether the request waits for them."""
        rows = self._scheduler.rows(request, num_computed_tokens)
        if rows == 0 and self._scheduler.ticket(request) is not None:
            total = int(request.num_prompt_tokens)
            figures = self._figures.setdefault(request.request_id, {})
            figures |= rows_figures(total, num_computed_tokens, total - num_computed_tokens)
        return rows, rows > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there for a load, or for none."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)
        if num_external_tokens > 0:
            self._figures[request.request_id] = {}  # until the load has ended

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """For the workers, of this step."""
        return StepMetadata(self._scheduler.step(), alone=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        output = connector_output.kv_connector_worker_meta
        if isinstance(output, WorkerOutput):
            self._scheduler.ended(output.failed, output.figures)
            self._unfinished = output.unfinished
            loads = {request: load for request, load in output.figures.items() if request not in output.failed}
            self._counts.loaded(loads.values(), len(output.failed - output.cold), len(output.cold))
            for request in loads.keys() & self._figures.keys():
                self._figures[request] = {name: value for name, value in loads[request].items() if name != DAMAGED}
            for request in output.failed & self._figures.keys():
                self._figures[request] |= {"method": "full", "reason": "cold" if request in output.cold else "failed"}

    def has_pending_push_work(self) -> bool:
        """Whether the engine keeps stepping after all requests have ended, so that their chunks are stored.

        Not with sleep mode: the weights may be gone while no request is there.
        """
        return self._unfinished and not self._vllm_config.model_config.enable_sleep_mode

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are free at once; the middleware puts the figures into the reply."""
        if request.request_id in self._scheduler.refused:
            self._counts.add(fallbacks_refused=1)
        self._scheduler.finished(request)
        figures = self._figures.pop(request.request_id, None)
        return False, {PARAMETER: figures} if figures else None

    def get_kv_connector_stats(self) -> LoadStats | None:
        """Counts since the last call; only the scheduler counts."""
        counts = self._counts
        self._counts = LoadStats()
        return None if counts.is_empty() else counts

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadStats:
        """In vLLM's server."""
        return LoadStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> LoadMetrics:
        """For vLLM's `/metrics`."""
        return LoadMetrics(*arguments)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache is allocated: try the model out."""
        modules = self._vllm_config.compilation_config.static_forward_context
        names = tuple(sorted(kv_caches, key=extract_layer_index))
        layers = tuple(modules[name] for name in names)
        block_size = self._vllm_config.cache_config.block_size
        site = Site(self._vllm_config, names, layers, block_size, WorkerGroup.of(self._vllm_config))
        self._queue = LoadQueue(row_blender(row_model(site), connector_options(self._vllm_config)), block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Run a pass of a load, ahead of the engine's own pass."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        assert self._queue is not None
        step = metadata.step
        for load in step.loads:
            self._queue.add(load, step.now)
        self._queue.cancel(step.cancelled)
        self._queue.step(step.now, alone=metadata.alone)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No sends; requests whose load has ended."""
        if self._queue is None:
            return None, None
        self._finished = self._queue.done()
        return None, self._finished.requests or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the failed loads among them."""
        return set().union(*self._finished.failed.values())

    def build_connector_worker_meta(self) -> WorkerOutput | None:
        """For the scheduler: it must remember failed requests, or it would load them again without end."""
        before = self._unfinished
        self._unfinished = self._queue is not None and self._queue.unfinished
        finished = self._finished
        if not finished.requests and before == self._unfinished:
            return None
        return WorkerOutput(set(finished.failed), finished.cold, self._unfinished, finished.figures)

    def shutdown(self) -> None:
        """The process ends."""
        if self._queue is not None:
            self._queue.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before the forward pass, or the scheduler waits for them."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        """No KV is saved."""

    def wait_for_save(self) -> None:
        """No KV is saved."""


KVBlend = KVBlendConnector
"""The name that operators give vLLM as `kv_connector`."""
