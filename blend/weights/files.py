"""Which files of a checkpoint transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# In the order in which transformers looks for them; an index names the files of a divided checkpoint.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def checkpoint_files(find: Callable[[str], Path | None]) -> list[Path] | None:
    """The files with a checkpoint's weights, sorted by name; None where there are none or not all of them.

    find: where a file of this name lies, None where it is not. Other files that look like weights (a second format of the same
    weights, an optimizer's state) are not loaded and not counted.
    """
    name = next((name for name in _NAMES if find(name) is not None), None)
    if name is None:
        return None
    names = _named_by(find(name)) if name.endswith(".index.json") else [name]
    files = [find(one) for one in names]
    return [file for file in files if file is not None] if names and None not in files else None


def _named_by(index: Path | None) -> list[str]:
    with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
        held: Any = json.loads(index.read_bytes()) if index is not None else {}
        return sorted({str(name) for name in held["weight_map"].values()})
    return []
