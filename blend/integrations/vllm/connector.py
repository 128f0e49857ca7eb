"""The KV connector: vLLM loads it by `kv_connector_module_path`, in its scheduler and in every worker process.

Written for vLLM 0.32. In the scheduler it decides about loads and counts them; in a worker it has a stage do them.
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
    Load,
    LoadScheduler,
    Signer,
    Site,
    refuse,
    refuse_version,
)
from blend.integrations.vllm.stage import FinishedLoads, LoadRunner, stage_of

COUNTERS = {
    "prompts_blended": "Prompts whose KV came from chunk caches, at least in part.",
    "prompts_uncorrected": "Blended prompts with more rows recomputed because their caches have no KV correction yet.",
    "fallbacks_cold": "Prompts of which the store held nothing: all rows were computed.",
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

    def loaded(self, figures: Iterable[Mapping[str, Any]], failed: int) -> None:
        """Loads have ended. figures: of each that succeeded."""
        self.add(fallbacks_failed=failed)
        for load in figures:
            cold = load.get("reason") == "cold"
            self.add(
                prompts_blended=int(not cold),
                fallbacks_cold=int(cold),
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
class StepLoads(KVConnectorMetadata):  # type: ignore[misc]
    """From scheduler to workers: loads that begin in one step. alone: no request computes anything in it."""

    loads: tuple[Load, ...] = ()
    alone: bool = False


@dataclass
class WorkerOutput(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler: failed requests, figures of the others, and whether work is left for idle steps."""

    failed: set[str] = field(default_factory=set)
    unfinished: bool = False
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerOutput:
        """Of several workers: what failed in one has failed."""
        figures = dict(self.figures)
        for request, load in other.figures.items():
            figures[request] = {**figures.get(request, {}), **load}
        return WorkerOutput(self.failed | other.failed, self.unfinished or other.unfinished, figures)


class KVBlendConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads blended KV for prompts with a ticket.

    Options in `kv_connector_extra_config`: stage, which fills the blocks; load, "async" during the batch, the default where the
    stage can, or "sync" before it; and the stage's own. Raises `ValueError`, in one line, for what is not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_version(vllm_version)
        refuse(vllm_config, kv_cache_config)
        self._options: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self._stage = stage_of(self._options)
        self._apart = self._stage.apart and self._options.get("load") != "sync"
        self._scheduler = LoadScheduler(Signer.of(vllm_config))
        self._runner: LoadRunner | None = None
        self._finished = FinishedLoads()
        self._counts = LoadStats()
        self._figures: dict[str, dict[str, Any]] = {}
        # In the scheduler as the worker last reported, in the worker as it last reported to the scheduler.
        self._unfinished = False

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many rows are loaded, and whether during the batch."""
        rows = self._scheduler.rows(request, num_computed_tokens)
        return rows, bool(rows) and self._apart

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there for a load, or for none."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)
        if num_external_tokens > 0:
            self._figures[request.request_id] = {}

    def build_connector_meta(self, scheduler_output: Any) -> StepLoads:
        """For the workers, of this step."""
        return StepLoads(self._scheduler.taken(), alone=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        output = connector_output.kv_connector_worker_meta
        if isinstance(output, WorkerOutput):
            self._scheduler.failed(output.failed)
            self._unfinished = output.unfinished
            loads = {request: load for request, load in output.figures.items() if request not in output.failed}
            self._counts.loaded(loads.values(), len(output.failed))
            for request in loads.keys() & self._figures.keys():
                self._figures[request] = {name: value for name, value in loads[request].items() if name != DAMAGED}

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
        """The cache is allocated: make the stage."""
        modules = self._vllm_config.compilation_config.static_forward_context
        names = tuple(sorted(kv_caches, key=extract_layer_index))
        block_size = self._vllm_config.cache_config.block_size
        site = Site(self._vllm_config, names, tuple(modules[name] for name in names), block_size)
        options = {name: value for name, value in self._options.items() if name in self._stage.options}
        self._runner = LoadRunner(self._stage(site, options), block_size, apart=self._apart)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        step = self._get_connector_metadata()
        assert isinstance(step, StepLoads)
        assert self._runner is not None
        for load in step.loads:
            self._runner.start(load)
        if not step.loads:
            self._runner.rest(alone=step.alone)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No sends; requests whose load during the batch has ended."""
        if self._runner is None:
            return None, None
        self._finished = self._runner.done()
        ended = self._finished.failed.keys() | self._finished.figures.keys()
        return None, ended if ended and self._apart else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the failed loads among them."""
        return set().union(*self._finished.failed.values())

    def build_connector_worker_meta(self) -> WorkerOutput | None:
        """For the scheduler: it must remember failed requests, or it would load them again without end."""
        before = self._unfinished
        self._unfinished = self._runner is not None and self._runner.unfinished
        failed = set(self._finished.failed)
        figures = self._finished.figures
        changed = failed or figures or before != self._unfinished
        return WorkerOutput(failed, self._unfinished, figures) if changed else None

    def shutdown(self) -> None:
        """The process ends."""
        if self._runner is not None:
            self._runner.close()

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
