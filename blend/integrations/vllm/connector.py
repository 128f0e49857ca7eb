"""The KV connector: vLLM loads this class by `kv_connector_module_path`, in its scheduler and in every worker process.

Made after vLLM 0.32. In the scheduler it offers rows and remembers failures (`offers`); in a worker it has a stage
fill blocks (`contract`, `stages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.models.utils import extract_layer_index

from blend.integrations.vllm.connector_metrics import Counts, Metrics
from blend.integrations.vllm.contract import DAMAGED, Load, Site
from blend.integrations.vllm.loads import Done, Loads
from blend.integrations.vllm.offers import Offers
from blend.integrations.vllm.refusals import refuse, refuse_version
from blend.integrations.vllm.signature import PARAMETER, Signer
from blend.integrations.vllm.stages import stage_of


@dataclass
class StepLoads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Loads that begin in one step, from the scheduler to the workers. alone: no request computes anything in it."""

    loads: tuple[Load, ...] = ()
    alone: bool = False


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Of one step, from a worker to the scheduler: requests whose load failed; whether there is work left for idle steps.

    figures: of requests whose load did well, where this worker has some.
    """

    failed: set[str] = field(default_factory=set)
    unfinished: bool = False
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """Of several workers: what failed in one has failed."""
        figures = {key: {**self.figures.get(key, {}), **one} for key, one in other.figures.items()}
        return WorkerNews(self.failed | other.failed, self.unfinished or other.unfinished, {**self.figures, **figures})


class KVBlend(KVConnectorBase_V1):  # type: ignore[misc]
    """Blended KV for prompts of which a ticket says that there is some.

    Options, in `kv_connector_extra_config`: stage, who fills the blocks; load, "async" beside the batch, which is the default
    where the stage can, or "sync" before it; and those of the stage. Raises `ValueError`, in one line, for what it is not for.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_version(vllm_version)
        refuse(vllm_config, kv_cache_config)
        self._options: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self._make_stage = stage_of(self._options)
        self._apart = self._make_stage.apart and self._options.get("load") != "sync"
        self._offers = Offers(Signer.of(vllm_config))
        self._loads: Loads | None = None
        self._done = Done(set(), set(), set(), {})
        self._counts, self._figures = Counts(), dict[str, dict[str, Any]]()
        # In the scheduler as the worker last told, in the worker as the scheduler was last told.
        self._unfinished = False

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many rows are offered, and whether they are loaded beside the batch."""
        rows = self._offers.rows(request, num_computed_tokens)
        return rows, bool(rows) and self._apart

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """An offer was taken up, or not."""
        self._offers.allocated(request, blocks.get_block_ids()[0], num_external_tokens)
        if num_external_tokens > 0:
            self._figures[request.request_id] = {}

    def build_connector_meta(self, scheduler_output: Any) -> StepLoads:
        """What the workers are to do in this step."""
        return StepLoads(self._offers.taken(), alone=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, WorkerNews):
            self._offers.failed(told.failed)
            self._unfinished = told.unfinished
            done = {key: one for key, one in told.figures.items() if key not in told.failed}
            self._counts.loaded(done.values(), len(told.failed))
            for key in done.keys() & self._figures.keys():
                self._figures[key] = {name: value for name, value in done[key].items() if name != DAMAGED}

    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on with its steps when all requests have ended: their chunks are yet to be stored.

        Not where the engine may be put to sleep: its weights may be gone when no request is there.
        """
        return self._unfinished and not self._vllm_config.model_config.enable_sleep_mode

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may go at once: nothing is taken out of them. The middleware puts the figures into the reply."""
        if request.request_id in self._offers.refused:
            self._counts.add("fallbacks_refused")
        self._offers.finished(request)
        figures = self._figures.pop(request.request_id, None)
        return False, {PARAMETER: figures} if figures else None

    def get_kv_connector_stats(self) -> Counts | None:
        """What was counted since the last time, by the scheduler alone: workers tell it what they did."""
        found, self._counts = self._counts, Counts()
        return None if found.is_empty() else found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        """As they came to vLLM's server."""
        return Counts(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> Metrics:
        """For vLLM's `/metrics`."""
        return Metrics(*given)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache is there: now there is something to fill."""
        modules = self._vllm_config.compilation_config.static_forward_context
        names = tuple(sorted(kv_caches, key=extract_layer_index))
        block_size = self._vllm_config.cache_config.block_size
        site = Site(self._vllm_config, names, tuple(modules[name] for name in names), block_size)
        mine = {name: value for name, value in self._options.items() if name in self._make_stage.options}
        self._loads = Loads(self._make_stage(site, mine), block_size, apart=self._apart)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        told = self._get_connector_metadata()
        assert isinstance(told, StepLoads)
        assert self._loads is not None
        for load in told.loads:
            self._loads.start(load)
        if not told.loads:
            self._loads.rest(alone=told.alone)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing is ever sent; requests whose load beside the batch has ended, well or not."""
        if self._loads is None:
            return None, None
        self._done = self._loads.done()
        return None, (self._done.requests if self._apart else None) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the failed ones among them."""
        return self._done.blocks

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """The failed ones themselves, for the scheduler to remember: else it would ask for them again without end."""
        before, self._unfinished = self._unfinished, self._loads is not None and self._loads.unfinished
        failed, figures = self._done.failed, self._done.figures
        news = failed or figures or before != self._unfinished
        return WorkerNews(failed, self._unfinished, figures) if news else None

    def shutdown(self) -> None:
        """The process ends."""
        if self._loads is not None:
            self._loads.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before the forward pass or are waited for by the scheduler."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is taken out of the cache."""

    def wait_for_save(self) -> None:
        """Nothing is taken out of the cache."""
