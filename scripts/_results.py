"""The one JSON file of benchmark rows: several commands write to it, and one that was stopped resumes."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _paths import ROOT

Row = dict[str, Any]


class Results:
    """Rows in lists under names, and whatever else the file holds.

    file: read when it exists, and complete again after every `put`; None keeps the rows in memory. Raises SystemExit for a
    file that is no JSON object.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.held: dict[str, Any] = _read(file) if file is not None and file.exists() else {}

    def rows(self, table: str) -> list[Row]:
        """The rows under this name."""
        found: list[Row] = self.held.setdefault(table, [])
        return found

    def find(self, table: str, key: Mapping[str, object]) -> Row | None:
        """The row that says the same as `key` about everything in it."""
        return next((row for row in self.rows(table) if all(row.get(k) == v for k, v in key.items())), None)

    def put(self, table: str, key: Mapping[str, object], row: Mapping[str, object]) -> None:
        """Write a row in place of the one with this key, or behind the others."""
        old, new = self.find(table, key), {**key, **row}
        if old is None:
            self.rows(table).append(new)
        else:
            self.rows(table)[self.rows(table).index(old)] = new
        self.save()

    def begin(self, options: argparse.Namespace, free: Collection[str]) -> None:
        """Note options, machine, command and code. Raises SystemExit where the rows had other options or another machine.

        free: options that may differ, because each row says them itself or they do not matter.
        """
        from blend.eval.machine import describe_machine

        given = {key: value for key, value in vars(options).items() if key not in free}
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
        machine = asdict(describe_machine())
        held = {"options": settings, "machine": machine, **self.held}
        if held["options"] != settings:
            raise SystemExit(f"{self.file} was measured with other options: name another file")
        if any(held["machine"].get(name) != machine[name] for name in ("cpu", "gpu", "versions")):
            raise SystemExit(f"{self.file} was measured on another machine or with other versions: name another file")
        self.held |= {"options": settings, "machine": machine, "command": " ".join(sys.argv)}
        self.held["code"] = sorted({*self.held.get("code", ()), code_digest()})

    def save(self) -> None:
        """Write the file, whole at any moment."""
        if self.file is None:
            return
        draft = self.file.with_name(f".{self.file.name}.{os.getpid()}.part")
        draft.write_text(json.dumps(self.held, indent=1), encoding="utf-8")
        draft.replace(self.file)


def _read(file: Path) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} holds no results ({str(error).splitlines()[0]}): name another file") from None
    if not isinstance(held, dict):
        raise SystemExit(f"{file} holds no results: name another file")
    return held


def code_digest() -> str:
    """Of all code that a figure depends on, so that a file shows which rows were measured with the same."""
    digest = hashlib.sha256()
    for folder in ("blend", "kernels", "scripts"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix in ("", ".py"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def markdown(heads: str, rows: Iterable[Sequence[object]], *, names: int = 1) -> Iterator[str]:
    """A Markdown table behind an empty line. heads: joined by " | ". names: columns to the left. None is a dash."""
    yield from ("", f"| {heads} |", f"|{'---|' * names}{'--:|' * (heads.count(' | ') + 1 - names)}")
    yield from (f"| {' | '.join('-' if cell is None else str(cell) for cell in row)} |" for row in rows)


def say(line: str) -> None:
    """Print progress; results go to standard output."""
    print(line, file=sys.stderr, flush=True)
