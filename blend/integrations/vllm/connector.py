"""The KV connector: vLLM loads it by `kv_connector_module_path`, in its scheduler and in every worker process.

Written for vLLM 0.32 and 0.33, and for both of its model runners. In the scheduler it decides about loads and counts them; in a
worker it does them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blend.errors import BlendError
from blend.integrations.vllm.contract import PARAMETER, Signer, refuse, refuse_version
from blend.integrations.vllm.loads import LoadQueue, row_blender
from blend.integrations.vllm.scheduler import LoadScheduler, Outcome, StepNews

refuse_version(vllm_version)
COUNTERS = {
    "prompts_blended": "Prompts whose KV came from chunk caches, at least in part.",
    "prompts_uncorrected": "Blended prompts with more rows recomputed because their caches have no KV correction yet.",
    "fallbacks_cold": "Prompts of which the store held nothing: vLLM prefilled them.",
    "fallbacks_failed": "Prompts whose load failed: vLLM prefilled them.",
    "fallbacks_refused": "Requests whose ticket this vLLM's middleware did not sign: vLLM prefilled them.",
    "rows_prompt": "Rows of prompts that vLLM's own model blended.",
    "rows_recomputed": "Rows of these prompts that were computed.",
    "rows_shared": "Rows of these prompts that came from caches which one of several prompts in flight has computed for all.",
    "rows_ahead": "Rows that were computed for such caches, apart from the prompts.",
    "damaged_entries": "Damaged store entries that these prompts found; the log names each.",
}


class LoadStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts since the last report, by the names of `COUNTERS`."""

    def aggregate(self, other: LoadStats) -> LoadStats:
        """The sum of both."""
        return LoadStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


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
    """From scheduler to workers."""

    step: StepNews


@dataclass
class WorkerOutput(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler: how loads ended, and whether work is left for idle steps."""

    outcomes: dict[str, Outcome]
    unfinished: bool

    def aggregate(self, other: WorkerOutput) -> WorkerOutput:
        """Of several workers: what failed in one has failed."""
        outcomes = self.outcomes | other.outcomes
        outcomes |= {request: outcome for request, outcome in self.outcomes.items() if "reason" in outcome.figures}
        return WorkerOutput(outcomes, self.unfinished or other.unfinished)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise what is refused as a `ValueError` of one line that names kvblend."""
    try:
        yield
    except BlendError as error:
        raise ValueError(f"kvblend: {error}") from error


class KVBlendConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads blended KV for prompts with a ticket.

    Options in `kv_connector_extra_config`: see docs/vllm.md. Raises `ValueError`, in one line, for what is not supported.

    Every load is declared asynchronous, also one that ends within the step: after a failed synchronous load vLLM's second model
    runner counts rows as computed that are not.

    Attributes:
        queue: in a worker, the loads.

    """

    queue: LoadQueue

    @refusals()
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse(vllm_config, kv_cache_config)
        self._scheduler = LoadScheduler(Signer(vllm_config))

    @classmethod
    @refusals()
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        """None is required. VLLM may ask before it loads the weights: refuse as early."""
        refuse(vllm_config, None)

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many rows are claimed, and whether the request waits for them."""
        rows = self._scheduler.claimed(request, num_computed_tokens)
        return rows, rows > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there for a load, or for none."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """For the workers, of this step."""
        return StepMetadata(self._scheduler.step(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        output = connector_output.kv_connector_worker_meta
        if output is not None:
            self._scheduler.ended(output.outcomes, unfinished=output.unfinished)

    def has_pending_push_work(self) -> bool:
        """Whether the engine keeps stepping after all requests have ended, so that their chunks are stored.

        Not with sleep mode: the weights may be gone while no request is there.
        """
        return self._scheduler.unfinished and not self._vllm_config.model_config.enable_sleep_mode

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are free at once; the middleware puts the figures into the reply."""
        figures = self._scheduler.finished(request)
        return False, {PARAMETER: figures} if figures else None

    def get_kv_connector_stats(self) -> LoadStats | None:
        """Counts since the last call; only the scheduler counts."""
        counts = +self._scheduler.counts
        self._scheduler.counts.clear()
        return LoadStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadStats:
        """In vLLM's server."""
        return LoadStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> LoadMetrics:
        """For vLLM's `/metrics`."""
        return LoadMetrics(*arguments)

    # In a worker.

    @refusals()
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache is allocated: try the model out."""
        self.queue = LoadQueue(row_blender(self._vllm_config, kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Run a pass of a load, behind the engine's own pass."""
        metadata: StepMetadata = self._get_connector_metadata()
        self.queue.step(metadata.step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No sends; requests whose load has ended."""
        return None, set(self.queue.outcomes) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the failed loads among them."""
        return self.queue.failed_blocks

    def build_connector_worker_meta(self) -> WorkerOutput:
        """For the scheduler: it must remember failed requests, or it would load them again without end."""
        return WorkerOutput(self.queue.outcomes, bool(self.queue.blender.background))

    def shutdown(self) -> None:
        """The process ends."""
        if hasattr(self, "queue"):
            self.queue.blender.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before the forward pass, or the scheduler waits for them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No KV is saved."""

    def wait_for_save(self) -> None:
        """No KV is saved."""


KVBlend = KVBlendConnector
"""The name that operators give vLLM as `kv_connector`."""
