"""Roles of Sphinx and its extensions, which docutils lacks."""

from __future__ import annotations

import re
from typing import Any

_USED = re.compile(r":([a-zA-Z][\w:+.-]*):`|`:([a-zA-Z][\w:+.-]*):|default-role::[ ]+([a-zA-Z][\w:+.-]*)")
_TITLED = re.compile(r"(.+?)(\s*)<[^<>]*>", re.DOTALL)
_TEXTS = frozenset(
    ["ref", "doc", "term", "any", "numref", "abbr", "dfn", "guilabel", "menuselection", "download", "index", "eq"]
)
_NOT_IMPLEMENTED = ("index", "named-reference", "anonymous-reference", "uri-reference", "footnote-reference", "target")
_CALLED = ("func", "meth")
_NUMBER = re.compile(r"#?\d+")


def register_roles(text: str) -> None:
    """Make docutils read every role that is used in a text."""
    from docutils.parsers.rst import languages, roles

    english = languages.get_language("en")
    names = {match.expand(r"\1\2\3").lower() for match in _USED.finditer(text)}
    for name in names:
        is_unknown = name not in english.roles and name not in roles._roles
        if is_unknown or english.roles.get(name) in _NOT_IMPLEMENTED:
            roles.register_local_role(name, _shown)


def _shown(name: str, raw: str, text: str, *_place: Any, **_options: Any) -> tuple[list[Any], list[Any]]:
    """The text that a reader of the built page sees: `pump.start()` for :func:`~pump.start`, Fees for :ref:`Fees <fees>`."""
    from docutils import nodes, utils

    role = name.lower().rpartition(":")[2]
    words = utils.unescape(text)
    titled = _TITLED.fullmatch(words)
    if titled is not None and not titled[2] and role not in _TEXTS:  # vector<int>
        titled = None
    if titled is not None:
        words = titled[1]
    elif role in _CALLED and not words.endswith(")"):
        words = f"{words}()"
    words = words.lstrip("!~") if len(words) > 1 else words
    if role == "guilabel":
        words = re.sub("&(.)", r"\1", words)
    if _NUMBER.fullmatch(words) and role not in _TEXTS:
        return [nodes.inline(raw, f"{role} {words}")], []
    node = nodes.inline if role in _TEXTS or titled is not None else nodes.literal
    return [node(raw, words)], []
