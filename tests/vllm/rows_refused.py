"""kvblend's connector where vLLM's own model cannot recompute rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blend.integrations.vllm.connector import KVBlend
from blend.integrations.vllm.contract import ModelRefusedError, Site
from blend.integrations.vllm.rows_stage import RecomputedRows
from blend.integrations.vllm.stages import STAGES


class Refused(RecomputedRows):
    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        raise ModelRefusedError(
            "kvblend: vLLM's own model cannot recompute rows, because it is a test; use stage copied"
        )


STAGES["rows"] = f"{__name__}:Refused"

__all__ = ["KVBlend"]
