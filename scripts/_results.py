"""The one JSON file of benchmark rows: several commands write to it, and one that was stopped resumes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
Item = TypeVar("Item")


class Results:
    """Rows in lists under names, and whatever else the file holds, which is whole after every `put`. None: in memory."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.content: dict[str, Any] = {}
        if file is not None and file.exists():
            try:
                self.content |= json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise SystemExit(f"{file} holds no results ({str(error).splitlines()[0]}): name another file") from None

    def rows(self, table: str) -> list[Row]:
        """The rows under this name."""
        rows: list[Row] = self.content.setdefault(table, [])
        return rows

    def find(self, table: str, key: Mapping[str, object]) -> Row | None:
        """The row that says the same as `key` about everything in it."""
        return next((row for row in self.rows(table) if all(row.get(k) == v for k, v in key.items())), None)

    def put(self, table: str, key: Mapping[str, object], row: Mapping[str, object]) -> None:
        """Write a row in place of the one with this key, or behind the others."""
        new = {**key, **row}
        rows = self.rows(table)
        old = self.find(table, key)
        if old is None:
            rows.append(new)
        else:
            rows[rows.index(old)] = new
        self.save()

    def begin(self, options: argparse.Namespace, free: Collection[str]) -> None:
        """Note options, machine and command. Raises SystemExit where others were noted. free: options that may differ."""
        from blend.eval.machine import describe_machine

        fixed = {key: value for key, value in vars(options).items() if key not in free}
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in fixed.items()}
        machine = asdict(describe_machine())
        if self.content.get("options", settings) != settings:
            raise SystemExit(f"{self.file} was measured with other options: name another file")
        before = self.content.get("machine", machine)
        if any(before.get(name) != machine[name] for name in ("cpu", "gpu", "versions")):
            raise SystemExit(f"{self.file} was measured on another machine or with other versions: name another file")
        self.content |= {"options": settings, "machine": machine, "command": " ".join(sys.argv)}

    def save(self) -> None:
        """Write the file, whole at any moment."""
        if self.file is None:
            return
        draft = self.file.with_name(f".{self.file.name}.{os.getpid()}.part")
        draft.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
        draft.replace(self.file)


def measure_and_show(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Results], None],
    tables: Callable[[Results], Iterable[str]],
) -> int:
    """A benchmark's command: measure what --json lacks, unless --show is given, and print the tables."""
    results = Results(options.json)
    if not options.show:
        measure(options, results)
    print("\n".join(tables(results)))
    return 0


def in_turns(items: Sequence[Item], turn: int) -> Sequence[Item]:
    """The items, in reverse order in every second turn, so that none always comes first."""
    return items if turn % 2 == 0 else items[::-1]


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values under these names, in the order in which these first appear."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def markdown(heads: str, rows: Iterable[Sequence[object]], *, names: int = 1) -> Iterator[str]:
    """A Markdown table behind an empty line. heads: joined by " | ". names: columns to the left. None is a dash."""
    yield from ("", f"| {heads} |", f"|{'---|' * names}{'--:|' * (heads.count(' | ') + 1 - names)}")
    yield from (f"| {' | '.join('-' if cell is None else str(cell) for cell in row)} |" for row in rows)


def say(line: str) -> None:
    """Print progress; results go to standard output."""
    print(line, file=sys.stderr, flush=True)
