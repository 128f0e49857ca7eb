"""Who imports whom, read from the source with `ast`: nothing is imported to find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = {
    "blend": ROOT / "blend",
    "blend_retrieval": ROOT / "retrieval" / "blend_retrieval",
    "blend_kernels": ROOT / "kernels" / "blend_kernels",
}


class Import(NamedTuple):
    """`module` imports `target`; `typing_only` under `if TYPE_CHECKING`, `lazy` inside a function."""

    module: str
    target: str
    typing_only: bool
    lazy: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of our packages by dotted name."""
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of every module."""
    return tuple(entry for name, path in modules().items() for entry in _of_module(name, path))


def _of_module(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, typing_only, lazy in _walk(tree, False, False):
        direct = isinstance(node, ast.Import)
        for target in [alias.name for alias in node.names] if direct else _from_targets(node, package):
            yield Import(name, target, typing_only, lazy)


def _from_targets(node: ast.ImportFrom, package: str) -> list[str]:
    base = node.module or ""
    if node.level:
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    # `from package import module` imports the module, `from module import name` the module it is in.
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names]


def _walk(node: ast.AST, typing_only: bool, lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, typing_only, lazy
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(child, True, lazy)
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _walk(child, typing_only, inside)


def top(target: str) -> str:
    """First part of a dotted name."""
    return target.partition(".")[0]


def importers(package: str) -> set[str]:
    """Modules that import the package at run time, lazily or not."""
    return {entry.module for entry in imports() if top(entry.target) == package and not entry.typing_only}
