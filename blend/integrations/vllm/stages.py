"""Which stage fills a request's blocks: the connector's option "stage" names it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blend.integrations.vllm.contract import MakeStage

STAGES = {
    "copied": "blend.integrations.vllm.copied:CopiedKV",
    "rows": "blend.integrations.vllm.rows_stage:RecomputedRows",
}
"""Where each stage is made, by the name that the option "stage" gives."""
_OPTIONS = {"stage", "load"}


def stage_of(options: Mapping[str, Any]) -> MakeStage:
    """What makes the stage that these options name. Raises `ValueError` for unknown options and values."""
    stage, load = options.get("stage", "copied"), options.get("load")
    if stage not in STAGES:
        raise ValueError(f"kvblend: there is no stage {stage!r}; choose {' or '.join(STAGES)}")
    if load not in (None, "async", "sync"):
        raise ValueError(f"kvblend: load is {load!r}; choose async or sync")
    module, _, name = STAGES[stage].partition(":")
    make: MakeStage = getattr(import_module(module), name)
    known = _OPTIONS | make.options
    if unknown := sorted(set(options) - known):
        raise ValueError(f"kvblend: stage {stage} has no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return make


def options_of(config: Any) -> Mapping[str, Any]:
    """The connector's options in a `VllmConfig`."""
    transfer = getattr(config, "kv_transfer_config", None)
    return {} if transfer is None else transfer.kv_connector_extra_config or {}


def rows_options(config: Any) -> Mapping[str, Any] | None:
    """The connector's options in a vLLM that blends with its own model; None for any other. config: its `VllmConfig`."""
    options = options_of(config)
    return options if options.get("stage") == "rows" else None
