"""kvblend's connector with the stage that recomputes rows, for proofs that look into the worker."""

from collections.abc import Mapping
from typing import Any

from blend.integrations.vllm.connector import KVBlend
from blend.integrations.vllm.contract import Site
from blend.integrations.vllm.stage import STAGES, RowStage

MADE: list[RowStage] = []


class SeenRows(RowStage):
    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        super().__init__(site, options)
        MADE.append(self)


STAGES["rows"] = SeenRows

__all__ = ["MADE", "KVBlend"]
