"""XHTML in the spelling of HTML. An HTML parser ignores the slash of <title/>, and takes all that follows for the title."""

from __future__ import annotations

import re
from html import escape
from itertools import islice

from blend_retrieval.readers.base import UnreadableError

_NAMESPACE = "http://www.w3.org/1999/xhtml"
_PREFIXED = (_NAMESPACE, "http://www.w3.org/1998/Math/MathML", "http://www.w3.org/2000/svg")
_SIGNS = re.compile(
    rf"\A\s*<\?xml\s|<!DOCTYPE\s+[\w:]+\s+PUBLIC\s+[\"'][^\"']*XHTML|<(?:\w+:)?html\s[^>]*{re.escape(_NAMESPACE)}",
    re.IGNORECASE,
)
_SIGNS_WITHIN = 4096  # characters
_VOID_NAMES = (
    "area base basefont bgsound br col command embed frame hr img input keygen link meta param source track wbr"
)
_VOID = frozenset(_VOID_NAMES.split())
_ATTRIBUTES = r"(?:\s+[\w:.-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*"
_SCRIPT = r"<(?:[\w-]+:)?(?P<script>script|style)\b(?P<about>(?:\"[^\"<]*\"|'[^'<]*'|[^'\"<>])*)(?<!/)>"
_MARKUP = re.compile(
    rf"{_SCRIPT}(?P<program>.*?)(?:</(?:[\w-]+:)?(?P=script)\s*>|\Z)|"
    r"<!--.*?(?:-->|\Z)"
    r"|<!\[CDATA\[(?P<characters>.*?)(?:\]\]>|\Z)"
    r"|<\?.{0,4096}?\?>"
    rf"|<(?P<name>[A-Za-z_][\w:.-]*)(?P<attributes>{_ATTRIBUTES})(?P<slash>/?)>"
    r"|</(?P<ended>[A-Za-z_][\w:.-]*)\s*>",
    re.DOTALL,
)
_SUBSET = re.compile(r"(<!DOCTYPE[^\[>]*)\[(.*?)\]\s*>", re.DOTALL | re.IGNORECASE)
_SUBSET_WITHIN = 1 << 15  # characters
_ENTITY = re.compile(r"<!ENTITY\s+([\w.-]+)\s+(?:\"([^\"]*)\"|'([^']*)')\s*>")
_LONGEST_ENTITY = 1000  # characters; a longer one stays as it is
_MOST_ENTITIES = 1000
_MOST_GROWTH = 16 << 20  # characters that entities add
_PREFIX = re.compile(r"xmlns:([\w.-]+)\s*=\s*[\"']([^\"']*)[\"']")


def is_xhtml(text: str) -> bool:
    """Whether a page says that it is XHTML, by an XML declaration, its document type or its namespace."""
    return _SIGNS.search(text[:_SIGNS_WITHIN]) is not None


def html_of_xhtml(text: str) -> str:
    """The page with an end tag for every element, so that an HTML parser builds the tree that an XML parser would.

    Character data is escaped, entities that the page declares are replaced, and the prefixes of XHTML, MathML and SVG removed.
    A page with mistakes stays readable, because nothing but these spellings is changed.
    """
    subset = _SUBSET.search(text, 0, _SUBSET_WITHIN)
    if subset is not None:
        text = text[: subset.start()] + subset[1] + ">" + text[subset.end() :]
        text = _with_entities(text, subset[2])
    prefixes = {prefix for prefix, namespace in _PREFIX.findall(text) if namespace in _PREFIXED}

    def spelled(match: re.Match[str]) -> str:
        if match["script"]:  # may hold anything that looks like markup
            return f"<{match['script']}{match['about']}>{match['program']}</{match['script']}>"
        if match["characters"] is not None:
            return escape(match["characters"])
        if match["ended"]:
            ended = _local(match["ended"], prefixes)
            return "" if ended in _VOID else f"</{ended}>"
        if not match["name"]:
            return "" if match[0].startswith("<?") else match[0]
        name = _local(match["name"], prefixes)
        start = f"<{name}{match['attributes'].rstrip()}>"
        is_closed = match["slash"] and name not in _VOID
        return f"{start}</{name}>" if is_closed else start

    return _MARKUP.sub(spelled, text)


def _with_entities(text: str, subset: str) -> str:
    """The text with the values of its entities, which may name those that are declared behind them.

    Raises `UnreadableError` if they would make a long text of a short one.
    """
    entities = {name: double or single for name, double, single in _ENTITY.findall(subset)}
    growth = 0
    for name, value in islice(entities.items(), _MOST_ENTITIES):
        sign = f"&{name};"
        if len(value) <= _LONGEST_ENTITY and sign in text:
            growth += text.count(sign) * len(value)
            if growth > _MOST_GROWTH:
                raise UnreadableError("declares entities that repeat themselves: its text would be too long")
            text = text.replace(sign, value)
    return text


def _local(name: str, prefixes: set[str]) -> str:
    prefix, _, local = name.partition(":")
    return local if prefix in prefixes else name
