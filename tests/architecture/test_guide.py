"""What guides a newcomer names only what is there: docs/development.md, and the docstring of each package."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from places import REPOSITORY

SOURCES = ("blend", "retrieval/blend_retrieval", "kernels/blend_kernels")
ROOTS = ("", "blend", "blend/serve", "retrieval/blend_retrieval", "kernels", "kernels/blend_kernels")
GUIDE = REPOSITORY / "docs" / "development.md"
SECTIONS = ("Find your way", "How to add", "From a prompt to its cache")
# Names of other libraries, of files in a store, and of arguments.
FOREIGN = {"transformers", "torch", "kernels", "retrieval", "update", "True", "None", "from_pretrained"}


@cache
def identifiers() -> frozenset[str]:
    """Everything that the sources define: modules, packages, classes, functions, attributes, fields and constants."""
    names = set[str]()
    for path in (file for folder in SOURCES for file in (REPOSITORY / folder).rglob("*.py")):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return frozenset(names)


def exists(name: str, package: Path) -> bool:
    """Whether a name in backticks is a file, a module or an identifier."""
    if "/" in name:
        places = (REPOSITORY / root / name for root in ROOTS)
        return any(place.exists() or place.with_name(f"{place.name}.py").exists() for place in places)
    words = name.removesuffix("()").split(".")
    return (package / f"{words[0]}.py").is_file() or all(word in identifiers() for word in words)


def absent(text: str, package: Path) -> list[str]:
    named = re.findall(r"`([A-Za-z_][\w./]*(?:\(\))?)`", text)
    return [name for name in named if name not in FOREIGN and not exists(name, package)]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_guide_names_what_is_there(title):
    section = re.search(rf"^## {title}\n(.*?)^## ", GUIDE.read_text(encoding="utf-8"), re.S | re.M)
    assert absent(section[1], REPOSITORY / "blend") == []


def packages() -> list[str]:
    files = (file for folder in SOURCES for file in (REPOSITORY / folder).rglob("__init__.py"))
    return sorted(str(file.parent.relative_to(REPOSITORY)) for file in files)


@pytest.mark.parametrize("package", packages())
def test_a_package_has_a_front_door(package):
    folder = REPOSITORY / package
    door = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert door.count("\n") >= 2, "the docstring says what to read first, what comes in and what goes out"
    assert absent(door, folder) == []


def test_a_name_that_is_not_there_is_noticed():
    assert absent("`Blender.steps`, `store/backend`, `no_such_name`, `blend/nowhere.py`", REPOSITORY / "blend") == [
        "no_such_name",
        "blend/nowhere.py",
    ]
