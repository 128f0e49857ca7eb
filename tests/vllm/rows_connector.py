"""A connector for proofs alone: it hands each request's ticket to the stage that recomputes rows in vLLM's own model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from blend.integrations.vllm.contract import Load, Site
from blend.integrations.vllm.rows_stage import RecomputedRows

STAGES: list[RecomputedRows] = []


@dataclass
class Loads(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


class RowsConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._pending = vllm_config, dict[str, Load]()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not (request.kv_transfer_params or {}).get("ticket"):
            return 0, False
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            stop, ids = request.num_prompt_tokens - 1, tuple(blocks.get_block_ids()[0])
            ticket = request.kv_transfer_params["ticket"]
            start = stop - num_external_tokens
            self._pending[request.request_id] = Load(
                request.request_id, ticket, tuple(request.prompt_token_ids), ids, start, stop
            )

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._pending = Loads(list(self._pending.values())), {}
        return loads

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = self._config.compilation_config.static_forward_context
        names = tuple(kv_caches)
        site = Site(self._config, names, tuple(layers[name] for name in names), self._config.cache_config.block_size)
        STAGES[:] = [RecomputedRows(site, self._config.kv_transfer_config.kv_connector_extra_config)]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            STAGES[0].fill(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
