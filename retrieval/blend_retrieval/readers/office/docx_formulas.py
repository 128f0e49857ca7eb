"""Formulas of Word files in one line, such as (a+b)/2 or x_1^2."""

from __future__ import annotations

from xml.etree.ElementTree import Element

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_FORMS = {  # the parts of an element, and how they are written
    "sSup": ("e sup", "{}^{}"),
    "sSub": ("e sub", "{}_{}"),
    "sSubSup": ("e sub sup", "{}_{}^{}"),
    "sPre": ("sub sup e", "_{}^{} {}"),
    "limLow": ("e lim", "{}_{}"),
    "limUpp": ("e lim", "{}^{}"),
}
_ROWS = {"m": "[{}]", "eqArr": "{}"}


def linear(element: Element) -> str:
    """A formula in one line."""
    name = element.tag.removeprefix(MATH)
    if name == "t":
        return element.text or ""
    if name.endswith("Pr"):
        return ""
    if name in _FORMS:
        parts, form = _FORMS[name]
        operands = [_operand(_part(element, part)) for part in parts.split()]
        return form.format(*operands)
    if name in _ROWS:
        rows = [row for row in element if row.tag in (f"{MATH}mr", f"{MATH}e")]
        return _ROWS[name].format("; ".join(map(_row, rows)))
    special = _SPECIAL.get(name)
    return special(element) if special else "".join(map(linear, element))


def _part(element: Element, name: str) -> str:
    part = element.find(MATH + name)
    return "" if part is None else linear(part)


def _row(row: Element) -> str:
    if row.tag == f"{MATH}e":
        return linear(row)
    return ", ".join(map(linear, row))


def _operand(formula: str) -> str:
    words = formula.strip()
    if len(words) < 2 or words.isalnum():
        return words
    return f"({words})"


def _sign(element: Element, name: str, default: str) -> str:
    """A sign among an element's properties."""
    for sign in element.iterfind(f"*/{MATH}{name}"):
        return sign.get(f"{MATH}val", "")
    return default


def _fraction(element: Element) -> str:
    above = _operand(_part(element, "num"))
    below = _operand(_part(element, "den"))
    if _sign(element, "type", "bar") == "noBar":
        return f"({above} over {below})"
    return f" {above}/{below}"  # the blank keeps 3 1/4 from becoming 31/4


def _root(element: Element) -> str:
    degree = _operand(_part(element, "deg"))
    radicand = _part(element, "e")
    return f"{_operand(radicand)}^(1/{degree})" if degree else f"√({radicand})"


def _delimited(element: Element) -> str:
    separator = _sign(element, "sepChr", "|")
    operands = map(linear, element.findall(f"{MATH}e"))
    opening = _sign(element, "begChr", "(")
    closing = _sign(element, "endChr", ")")
    return f"{opening}{separator.join(operands)}{closing}"


def _sum(element: Element) -> str:
    low = _operand(_part(element, "sub"))
    high = _operand(_part(element, "sup"))
    sign = _sign(element, "chr", "∫")
    if low:
        sign += f"_{low}"
    if high:
        sign += f"^{high}"
    return f"{sign} {_part(element, 'e')}"


def _function(element: Element) -> str:
    return f"{_part(element, 'fName')} {_operand(_part(element, 'e'))}"


def _accented(element: Element) -> str:
    return _operand(_part(element, "e")) + _sign(element, "chr", "\u0302")


_SPECIAL = {"f": _fraction, "rad": _root, "d": _delimited, "nary": _sum, "func": _function, "acc": _accented}
