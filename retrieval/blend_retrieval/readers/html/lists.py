"""The numbers of HTML's lists, which `start`, `value`, `reversed` and `type` change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

# Noncharacters around a label, which no text holds. The converter numbers items itself: its number is replaced behind it.
_OPENS, _CLOSES = "\ufdd0", "\ufdd1"
_LABEL = re.compile(rf"(?:-?\d+[.)] )?{_OPENS}([^{_CLOSES}]*){_CLOSES}\s*")
_INTEGER = re.compile(r"\s*([+-]?\d{1,9})")
_STYLE = re.compile(r"list-style(?:-type)?\s*:[^;:]*?\b(none|(?:lower|upper)-(?:alpha|latin|roman))", re.IGNORECASE)
_TYPES = {
    "a": "lower-alpha",
    "A": "upper-alpha",
    "i": "lower-roman",
    "I": "upper-roman",
    "lower-latin": "lower-alpha",
    "upper-latin": "upper-alpha",
}
_CLASSES = {  # of docutils
    "loweralpha": "lower-alpha",
    "upperalpha": "upper-alpha",
    "lowerroman": "lower-roman",
    "upperroman": "upper-roman",
}
_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)
_LARGEST_ROMAN = 3999


def mark_numbers(tree: LexborHTMLParser) -> None:
    """Write the label of each item into lists that are not simply numbered upwards; `with_numbers` ends the work."""
    for ordered in tree.css("ol"):
        items = [child for child in ordered.iter() if child.tag == "li"]
        style = _style(ordered)
        numbers = _numbers(ordered, items)
        first = numbers[0] if numbers else 0
        counts_up = numbers == list(range(first, first + len(numbers)))
        is_plain = counts_up and not style and not _is_in_a_cell(ordered)
        if is_plain:
            if items and "value" in items[0].attributes:
                ordered.attrs["start"] = str(first)
            continue
        for item, number in zip(items, numbers, strict=True):
            _open(item, f"{_OPENS}{_label(number, style)}{_CLOSES}")


def with_numbers(markdown: str) -> str:
    """The converted page with the labels of `mark_numbers` in the place of its own numbers."""
    return _LABEL.sub(r"\1 ", markdown) if _OPENS in markdown else markdown


def _numbers(ordered: LexborNode, items: list[LexborNode]) -> list[int]:
    step = -1 if "reversed" in ordered.attributes else 1
    number = _integer(ordered, "start", len(items) if step < 0 else 1)
    numbers = []
    for item in items:
        number = _integer(item, "value", number)
        numbers.append(number)
        number += step
    return numbers


def _integer(node: LexborNode, attribute: str, default: int) -> int:
    digits = _INTEGER.match(node.attributes.get(attribute) or "")
    return int(digits[1]) if digits else default


def _style(ordered: LexborNode) -> str:
    """The style of a list's labels: "" for plain numbers."""
    attributes = ordered.attributes
    in_style = _STYLE.search(attributes.get("style") or "")
    if in_style:
        name = in_style[1].lower()
        return _TYPES.get(name, name)
    classes = (attributes.get("class") or "").split()
    in_class = next((_CLASSES[name] for name in classes if name in _CLASSES), "")
    return in_class or _TYPES.get(attributes.get("type") or "", "")


def _is_in_a_cell(ordered: LexborNode) -> bool:
    """Whether the list stands in a cell of a table, where the converter writes no numbers."""
    outer = ordered.parent
    while outer is not None and outer.tag not in ("td", "th"):
        outer = outer.parent
    return outer is not None


def _label(number: int, style: str) -> str:
    if style == "none":
        return "-"
    kind = style.rpartition("-")[2]
    label = str(number)
    if kind == "alpha" and number > 0:
        label = _letters(number)
    elif kind == "roman" and 0 < number <= _LARGEST_ROMAN:
        label = _roman(number)
    return f"{label.upper() if style.startswith('upper') else label}."


def _letters(number: int) -> str:
    letters = ""
    while number > 0:
        number, place = divmod(number - 1, 26)
        letters = chr(ord("a") + place) + letters
    return letters


def _roman(number: int) -> str:
    numeral = ""
    for value, letters in _ROMAN:
        times, number = divmod(number, value)
        numeral += letters * times
    return numeral


def _open(item: LexborNode, label: str) -> None:
    first = item.first_child
    if first is None:
        item.insert_child(label)
    else:
        first.insert_before(label)
