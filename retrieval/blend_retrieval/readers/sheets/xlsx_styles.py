"""Strings and styles of Excel workbooks."""

from __future__ import annotations

import re
from typing import NamedTuple
from xml.etree import ElementTree as ET

from blend_retrieval.readers.base import UnreadableError
from blend_retrieval.readers.sheets.number_formats import GENERAL
from blend_retrieval.readers.sheets.package import DAMAGE, Package
from blend_retrieval.readers.sheets.xml_elements import children, local_name

_ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")
_DATE = "yyyy-mm-dd"
_HEIGHTS = {"superscript": "^", "subscript": "~"}
_OFF = ("0", "false", "none")
# Formats that files name by number alone. Those that the reader's country would decide are in ISO 8601.
_BUILT_IN = {
    0: GENERAL,
    1: "0",
    2: "0.00",
    3: "#,##0",
    4: "#,##0.00",
    5: '"$"#,##0_);\\("$"#,##0\\)',
    6: '"$"#,##0_);[Red]\\("$"#,##0\\)',
    7: '"$"#,##0.00_);\\("$"#,##0.00\\)',
    8: '"$"#,##0.00_);[Red]\\("$"#,##0.00\\)',
    9: "0%",
    10: "0.00%",
    11: "0.00E+00",
    12: "# ?/?",
    13: "# ??/??",
    14: _DATE,
    15: "d-mmm-yy",
    16: "d-mmm",
    17: "mmm-yy",
    18: "h:mm AM/PM",
    19: "h:mm:ss AM/PM",
    20: "h:mm",
    21: "h:mm:ss",
    22: f"{_DATE} h:mm",
    32: "h:mm",
    33: "h:mm:ss",
    37: "#,##0_);(#,##0)",
    38: "#,##0_);[Red](#,##0)",
    39: "#,##0.00_);(#,##0.00)",
    40: "#,##0.00_);[Red](#,##0.00)",
    41: '_(* #,##0_);_(* (#,##0);_(* "-"_);_(@_)',
    42: '_("$"* #,##0_);_("$"* (#,##0);_("$"* "-"_);_(@_)',
    43: '_(* #,##0.00_);_(* (#,##0.00);_(* "-"??_);_(@_)',
    44: '_("$"* #,##0.00_);_("$"* (#,##0.00);_("$"* "-"??_);_(@_)',
    45: "mm:ss",
    46: "[h]:mm:ss",
    47: "mm:ss.0",
    48: "##0.0E+0",
    49: "@",
    **dict.fromkeys((27, 28, 29, 30, 31, 36, 50, 51, 52, 53, 54, 57, 58), _DATE),
    **dict.fromkeys((34, 35, 55, 56), f"{_DATE} h:mm:ss"),
}


class Style(NamedTuple):
    """How a cell shows its value: the code of its number format, and whether it is struck through."""

    code: str = GENERAL
    is_struck: bool = False

    def is_formatted(self) -> bool:
        """Whether the cell has a format of its own."""
        return self.code != GENERAL


def styles(package: Package, path: str | None) -> list[Style]:
    """The styles of a workbook, by their numbers."""
    if path is None:
        return []
    root = package.xml(path)
    codes = dict(_BUILT_IN)
    fonts: list[bool] = []
    formats: list[Style] = []
    for group in root:
        name = local_name(group)
        if name == "numFmts":
            for element in group:
                number = int(element.get("numFmtId", 0))
                codes[number] = element.get("formatCode", "")
        elif name == "fonts":
            fonts = [_is_on(font, "strike") for font in group]
        elif name == "cellXfs":
            formats = [_style(element, codes, fonts) for element in group]
    return formats


def _style(element: ET.Element, codes: dict[int, str], fonts: list[bool]) -> Style:
    font = int(element.get("fontId") or 0)
    code = codes.get(int(element.get("numFmtId") or 0), GENERAL)
    return Style(code, font < len(fonts) and fonts[font])


def shared_strings(package: Package, path: str | None) -> list[str]:
    """The strings that cells name by number. Raises `UnreadableError` if they are damaged."""
    if path is None:
        return []
    strings = []
    try:
        with package.open(path) as stream:
            for _, element in ET.iterparse(stream):
                if local_name(element) == "si":
                    strings.append(plain_string(element))
                    element.clear()
    except DAMAGE:
        raise UnreadableError(f"is damaged: {path} is missing or no XML") from None
    return strings


def plain_string(string: ET.Element | str) -> str:
    """A string with the marks of its runs: `^2^` for raised signs, `~2~` for lowered ones, `~~31~~` for struck ones.

    Pronunciations, which stand above Japanese words, are left out.
    """
    if isinstance(string, str):
        return _unescaped(string)
    pieces = []
    for child in children(string, "t", "r"):
        if local_name(child) == "t":
            pieces.append(_unescaped(child.text or ""))
        else:
            pieces.append(_run(child))
    return "".join(pieces)


def _run(run: ET.Element) -> str:
    text = "".join(child.text or "" for child in children(run, "t"))
    text = _unescaped(text)
    properties = next(children(run, "rPr"), None)
    if properties is None or not text.strip():
        return text
    for height in children(properties, "vertAlign"):
        mark = _HEIGHTS.get(height.get("val", ""), "")
        text = f"{mark}{text}{mark}"
    return struck(text) if _is_on(properties, "strike") else text


def _is_on(properties: ET.Element, name: str) -> bool:
    return any(child.get("val", "1") not in _OFF for child in children(properties, name))


def struck(text: str) -> str:
    """A text that is struck through."""
    return f"~~{text.strip()}~~" if text.strip() else text


def _unescaped(text: str) -> str:
    if "_x" not in text:
        return text
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
