"""Files of results that grow while they are measured: JSON Lines, one object a line, added to and never rewritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blend.errors import DatasetError


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, none where there is no file; a line that a kill cut short is dropped.

    Raises `DatasetError` for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DatasetError(f"{path}: cannot be read ({reason}); name a file of results") from error
    return [found for line in text.splitlines() if isinstance(found := _parsed(line), dict)]


def append_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Add these objects in one write, so that a stop leaves at most one line half written and processes may share the file.

    Begins a line of its own where the file ends in a half-written one.
    """
    text = "".join(json.dumps(one) + "\n" for one in objects)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None
