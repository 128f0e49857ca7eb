"""Modules' documentation strings as Markdown. Run as a program, so that what the modules do on import stays out of ours.

    python -I stdlib_render.py MODULE...      one JSON object a line: {"module", "markdown"} or {"module", "error"}

Imports nothing but the standard library. What depends on the machine or the run (addresses, the order of sets) is left out.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULE_LIMIT, MEMBER_LIMIT = 2300, 800  # characters of a documentation string that are kept
LEAST = 24  # characters below which a documentation string says nothing
MODULE_CHARACTERS = 5600  # characters of a document, about 1,250 tokens
SIGNATURE_LIMIT = 110
_VOLATILE = re.compile(r" at 0x[0-9a-fA-F]+|^(?:frozen)?set\(|^\{.+\}$", re.DOTALL)


def render(module: ModuleType, name: str) -> str:
    """One document: the module's own words, then its public functions and classes, as far as they fit."""
    blocks = [f"# {name}", trim(inspect.getdoc(module) or "", MODULE_LIMIT)]
    size = sum(map(len, blocks))
    for block in members(module, name):
        if size + len(block) <= MODULE_CHARACTERS:
            blocks.append(block)
            size += len(block)
    return "\n\n".join(filter(None, blocks)) + "\n"


def members(module: ModuleType, name: str) -> Iterator[str]:
    """A section for every documented public member, in the order in which the module lists them."""
    names = getattr(module, "__all__", None) or sorted(vars(module))
    for member in dict.fromkeys(names):
        value = inspect.getattr_static(module, member, None)
        if member.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if getattr(value, "__module__", None) == "typing" and name != "typing":
            continue
        yield from sections(f"{name}.{member}", value, 2)


def sections(name: str, value: Any, level: int) -> Iterator[str]:
    """A heading with the signature, and the words of a member; a class's methods follow under headings of their own."""
    words = trim(documentation(value), MEMBER_LIMIT)
    if len(words) >= LEAST:
        yield f"{'#' * level} {name}{signature(value)}\n\n{words}"
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    for method, raw in vars(value).items():
        function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        if not method.startswith("_") and (inspect.isroutine(function) or isinstance(function, property)):
            yield from sections(f"{name.rpartition('.')[2]}.{method}", function, level + 1)


def documentation(value: Any) -> str:
    """The member's own documentation string, cleaned; one that a class took over from its base is nobody's."""
    words = value.__doc__ if isinstance(value.__doc__, str) else ""
    if inspect.isclass(value) and any(words == base.__doc__ for base in value.__mro__[1:]):
        return ""
    return inspect.cleandoc(words)


def signature(value: Any) -> str:
    """The parameters as far as they are known, short, and worth knowing; defaults that differ between runs are `...`."""
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return ""
    try:
        found = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    parameters = [stable(each) for each in found.parameters.values() if each.name not in ("self", "cls")]
    line = str(found.replace(parameters=parameters, return_annotation=found.empty))
    return line if len(line) <= SIGNATURE_LIMIT else ""


def stable(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter without annotation, and without a default that depends on the run."""
    parameter = parameter.replace(annotation=parameter.empty)
    if parameter.default is parameter.empty or not _VOLATILE.search(repr(parameter.default)):
        return parameter
    return parameter.replace(default=...)


def trim(words: str, limit: int) -> str:
    """What fits into `limit` characters: whole paragraphs, or lines where paragraphs would leave out over half."""
    words = words.replace("\t", "    ").strip()
    if len(words) <= limit:
        return words
    kept = words[:limit].rpartition("\n\n")[0]
    if len(kept) < limit // 2:
        kept = words[:limit].rpartition("\n")[0] or words[:limit].rpartition(" ")[0]
    return kept.rstrip()


def main(names: list[str], write: Callable[[str], Any] = sys.stdout.write) -> None:
    """Write one line for every module."""
    for name in names:
        try:
            result = {"module": name, "markdown": render(importlib.import_module(name), name)}
        except Exception as error:  # any module may fail to import, for example for want of a C library
            result = {"module": name, "error": f"{type(error).__name__}: {error}"}
        write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
