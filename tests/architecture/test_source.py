"""Rules of the source text that no linter states."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from places import REPOSITORY

FOLDERS = ("blend", "retrieval/blend_retrieval", "kernels/blend_kernels")
LONGEST = 500  # lines of a file
# What these libraries have under an underscore is documented, or has no other name.
PUBLIC = "_replace _asdict _fields _make _getframe _exit _attn_implementation _name_or_path _ntuple_diskusage"


@cache
def trees(*folders: str) -> dict[str, ast.Module]:
    """The syntax of every Python file below these folders, by path."""
    files = sorted(file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    return {str(file.relative_to(REPOSITORY)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _holding(text: str) -> set[str]:
    return {path for path in trees(*FOLDERS) if text in (REPOSITORY / path).read_text(encoding="utf-8")}


def test_a_class_name_means_one_thing():
    homes = defaultdict(list)
    for path, tree in trees("blend").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_file_is_too_long():
    lines = {path: len((REPOSITORY / path).read_text(encoding="utf-8").splitlines()) for path in trees(*FOLDERS)}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_tests_use_the_public_surface():
    assert {path for path, tree in trees("tests").items() if _private(tree)} == set()


def _private(tree: ast.Module) -> set[str]:
    """Private attributes of other objects that a test reads, sets or patches by name."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not _is_own(node.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "setattr" in node.func.attr:
            texts = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            names |= {text.rpartition(".")[2] for text in texts[:1]}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - set(PUBLIC.split()) - own


def _is_own(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else value
    return isinstance(called, ast.Name) and called.id in ("self", "cls", "super")


def test_only_the_driver_registers_attention_and_nothing_is_patched_on_import():
    assert _holding("ALL_ATTENTION_FUNCTIONS") == {"blend/model/driver.py"}


def test_a_default_is_written_once():
    homes = defaultdict(list)
    for path, tree in trees(*FOLDERS).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.startswith("DEFAULT_"):
                homes[node.id].append(path)
            elif isinstance(node, ast.FunctionDef):
                for name in _literal_defaults(node.args) & {"max_new_tokens", "max_tokens", "chunk_tokens", "top_k"}:
                    homes[name] += [path, "a signature"]
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def _literal_defaults(arguments: ast.arguments) -> set[str]:
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults = [*zip(placed[len(placed) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    defaults += [(arg, value) for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
    return {arg.arg for arg, value in defaults if isinstance(value, ast.Constant) and value.value is not None}


def test_files_come_to_their_place_through_one_writer_a_package():
    """`path.replace(target)` has one argument, the method of texts two; `mkstemp` is how drafts are made by hand."""
    movers = set()
    for path, tree in trees(*FOLDERS).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                moves = node.func.attr == "replace" and len(node.args) == 1
                if moves or node.func.attr in ("mkstemp", "NamedTemporaryFile"):
                    movers.add(Path(path).name)
    assert movers == {"files.py", "generations.py"}
