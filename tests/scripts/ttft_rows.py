"""The rows that `scripts/bench_ttft --shape` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METHODS = ["full", "reuse", "query_guided 5 %", "query_guided 15 %", "hkvd 15 %"]


def held(file: Path) -> dict[str, Any]:
    """The file as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(file.read_text(), parse_constant=refuse)
    return found
