"""The fields of HTML's forms as a reader of the page sees them: typed values, ticked boxes, chosen entries, bars."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

_ROLES = "[role=checkbox], [role=radio], [role=switch], [role=option], [aria-pressed]"
_FIELDS = f"input, select, textarea, progress, meter, {_ROLES}"
_BOXES = ("checkbox", "radio")
_UNTYPED = ("hidden", "submit", "button", "reset", "image", "password")
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_INLINE = ("-text", "label", "span", "a", "b", "strong", "i", "em", "code", "small")
_TICKS = {"true": "[x] ", "false": "[ ] ", "mixed": "[-] "}


def write_fields(tree: LexborHTMLParser) -> None:
    """Write the fields as text: [x] and [ ] for boxes, the chosen entries of lists, "30 of 100" for bars."""
    for field in tree.css(_FIELDS):
        if _is_hidden(field):
            field.decompose()
        elif field.tag == "input":
            _write_input(field)
        elif field.tag == "select":
            field.replace_with(_choice(field))
        elif field.tag in ("progress", "meter"):
            field.replace_with(_bar(field))
        elif field.tag != "textarea":  # the converter keeps its lines
            _tick(field)


def _is_hidden(field: LexborNode) -> bool:
    return "hidden" in field.attributes or _HIDING.search(field.attributes.get("style") or "") is not None


def _write_input(field: LexborNode) -> None:
    kind = (field.attributes.get("type") or "").lower()
    value = field.attributes.get("value") or ""
    if kind in _BOXES:
        is_ticked = "checked" in field.attributes
        if is_ticked or not _steers_the_page(field):
            field.replace_with(_apart(field, "[x]" if is_ticked else "[ ]"))
    elif value and kind not in _UNTYPED:
        field.replace_with(value)


def _apart(box: LexborNode, state: str) -> str:
    """A box's state, with blanks to the words that touch it."""
    before = " " if _words(box.prev, "prev")[-1:].isalnum() else ""
    after = " " if _words(box.next, "next")[:1].isalnum() else ""
    return before + state + after


def _steers_the_page(box: LexborNode) -> bool:
    """Whether a box stands for itself in the page, without words: themes hide such boxes, and open their menus by them."""
    parent = box.parent
    return parent is not None and parent.tag == "body" and not _words(box.prev, "prev") and not _words(box.next, "next")


def _words(node: LexborNode | None, way: str) -> str:
    """The words of the text, label or emphasis that is nearest to a box on one side, or ""."""
    while node is not None and node.tag == "-text" and not _line(node.text()):
        node = getattr(node, way)
    return _line(node.text()) if node is not None and node.tag in _INLINE else ""


def _choice(field: LexborNode) -> str:
    """The chosen entries. Where none is chosen, a closed list shows its first, and the others as the choice that it gives."""
    options = field.css("option")
    chosen = [_entry(option) for option in options if "selected" in option.attributes]
    size = field.attributes.get("size") or "1"
    is_open = "multiple" in field.attributes or size != "1"
    if is_open:
        if not chosen:
            return ", ".join(f"[ ] {_entry(option)}" for option in options)
        return ", ".join(chosen)
    if chosen:
        return chosen[-1]
    first, *alternatives = [_entry(option) for option in options] or [""]
    return f"{first} (or: {', '.join(alternatives)})" if alternatives else first


def _entry(option: LexborNode) -> str:
    words = _line(option.attributes.get("label") or option.text())
    group = option.parent
    if group is None or group.tag != "optgroup":
        return words
    named = _line(group.attributes.get("label") or "")
    return f"{named}: {words}" if named else words


def _bar(field: LexborNode) -> str:
    """How far a bar goes, with the words that stand in its place where none can be drawn."""
    words = _line(field.text())
    value = _line(field.attributes.get("value") or "")
    if not value:
        return words
    share = f"{value} of {_line(field.attributes.get('max') or '1')}"
    return f"{share} ({words})" if words else share


def _tick(field: LexborNode) -> None:
    """Open an element that plays a box with its state."""
    attributes = field.attributes
    states = (attributes.get(name) for name in ("aria-checked", "aria-selected", "aria-pressed"))
    tick = next((_TICKS[state] for state in states if state in _TICKS), None)
    if tick is None:
        return
    first = field.first_child
    if first is None:
        field.insert_child(tick)
    else:
        first.insert_before(tick)


def _line(words: str) -> str:
    return " ".join(words.split())
