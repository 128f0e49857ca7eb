"""Documentation strings of modules as Markdown. Runs as a program, so imports do not affect the caller's process.

    python -I stdlib_render.py MODULE...      one JSON object a line: {"module", "markdown"} or {"module", "error"}

Imports nothing but the standard library. Leaves out values that differ between runs (addresses, the order of sets).
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

MODULE_LIMIT, MEMBER_LIMIT = 2300, 800  # characters of a documentation string that are kept
LEAST = 24  # characters; shorter documentation strings are useless
MODULE_CHARACTERS = 5200  # characters of a document, about 1,200 tokens
SIGNATURE_LIMIT = 110
_UNDERLINE = re.compile(r"^[ \t]*(?:=+|-+)[ \t]*(?:\n|\Z)", re.MULTILINE)
_COMMENT = re.compile(r"^ {0,3}(?=#)", re.MULTILINE)
_VOLATILE = re.compile(r" at 0x[0-9a-fA-F]+|^(?:frozen)?set\(|^\{.+\}$", re.DOTALL)


class Section(NamedTuple):
    """One member's heading and text; level 2 is a function or a class, level 3 a method."""

    level: int
    markdown: str


def render(module: ModuleType, name: str) -> str:
    """One document: the module's own text, then as many public members as fit, methods last."""
    opening = f"# {name}\n\n{trim(inspect.getdoc(module) or '', MODULE_LIMIT)}".rstrip()
    documented = list(members(module, name))
    room = MODULE_CHARACTERS - len(opening)
    chosen = set()
    for section in sorted(documented, key=attrgetter("level")):
        if len(section.markdown) <= room:
            chosen.add(section)
            room -= len(section.markdown)
    texts = [section.markdown for section in documented if section in chosen]
    return "\n\n".join([opening, *texts]) + "\n"


def members(module: ModuleType, name: str) -> Iterator[Section]:
    """A section for every documented public member, in the order of the module."""
    names = getattr(module, "__all__", None) or sorted(vars(module))
    for member in dict.fromkeys(names):
        value = inspect.getattr_static(module, member, None)
        is_code = inspect.isclass(value) or inspect.isroutine(value)
        if member.startswith("_") or not is_code:
            continue
        if getattr(value, "__module__", None) == "typing" and name != "typing":
            continue
        yield from sections(f"{name}.{member}", value, 2)


def sections(name: str, value: Any, level: int) -> Iterator[Section]:
    """A member's heading with signature, and its text; a class's methods follow under their own headings."""
    words = trim(documentation(value), MEMBER_LIMIT)
    if len(words) >= LEAST:
        yield Section(level, f"{'#' * level} {name}{signature(value)}\n\n{words}")
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    class_name = name.rpartition(".")[2]
    for method, raw in vars(value).items():
        function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        is_member = inspect.isroutine(function) or isinstance(function, property)
        if is_member and not method.startswith("_"):
            yield from sections(f"{class_name}.{method}", function, level + 1)


def documentation(value: Any) -> str:
    """The member's own documentation string, cleaned; "" if a class inherits it from its base."""
    words = value.__doc__ if isinstance(value.__doc__, str) else ""
    bases = value.__mro__[1:] if inspect.isclass(value) else ()
    if words in [base.__doc__ for base in bases]:
        return ""
    return inspect.cleandoc(words)


def signature(value: Any) -> str:
    """The parameters, if they are known and short. Defaults that differ between runs are `...`."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    try:
        full = inspect.signature(value)
    except (ValueError, TypeError):  # of a property, and of functions in C
        return ""
    parameters = full.parameters.values()
    shown = [stable(parameter) for parameter in parameters if not bound(parameter)]
    line = str(full.replace(parameters=shown, return_annotation=full.empty))
    return line if len(line) <= SIGNATURE_LIMIT else ""


def bound(parameter: inspect.Parameter) -> bool:
    """Whether the parameter is the object or class of a method."""
    is_class = parameter.name == "type" and parameter.kind is parameter.POSITIONAL_ONLY
    return is_class or parameter.name in ("self", "cls")


class Omitted:
    """A default that is shown as `...`."""

    def __repr__(self) -> str:
        return "..."


def stable(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter without annotation, and without a default that differs between runs or is code."""
    default = parameter.default
    is_volatile = callable(default) or _VOLATILE.search(repr(default))
    if is_volatile and default is not parameter.empty:
        default = Omitted()
    return parameter.replace(annotation=parameter.empty, default=default)


def trim(words: str, limit: int) -> str:
    """As much text as fits into `limit` characters: whole paragraphs, or lines if paragraphs would drop over half."""
    # Avoid accidental Markdown headings: remove underlines, indent comments of examples.
    words = _UNDERLINE.sub("", words.replace("\t", "    "))
    words = _COMMENT.sub("    ", words).strip()
    if len(words) <= limit:
        return words
    head = words[:limit]
    paragraphs = head.rpartition("\n\n")[0]
    if len(paragraphs) >= limit // 2:
        return paragraphs.rstrip()
    lines = head.rpartition("\n")[0] or head.rpartition(" ")[0]
    return lines.rstrip()


def main(names: list[str], write: Callable[[str], Any] = sys.stdout.write) -> None:
    """Write one line for every module."""
    for name in names:
        try:
            module = importlib.import_module(name)
            result = {"module": name, "markdown": render(module, name)}
        except Exception as error:  # any module may fail to import, for example without a C library
            result = {"module": name, "error": f"{type(error).__name__}: {error}"}
        write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
