"""Number formats of spreadsheets: shows a value as a person sees it in its cell.

In: a format's code, such as `#,##0.00;[Red]-#,##0.00`, and the number or text that a cell stores. Out: the text of the cell.
`date_formats` shows dates and times, `digit_places` other numbers, `number_fractions` those with a slash.

A code has up to four sections: for positive numbers, negative ones, zero and text. Section 18.8.31 of ECMA-376 describes
them. Signs follow the English (US) locale, as in the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, localcontext
from functools import cached_property, lru_cache

from blend_retrieval.readers.sheets.date_formats import DATE_KINDS, Token, shown_date, with_parts_of_seconds
from blend_retrieval.readers.sheets.digit_places import DigitPlaces
from blend_retrieval.readers.sheets.number_fractions import shown_fraction

GENERAL = "General"
_MOST_SECTIONS = 4
_SIGNIFICANT_DIGITS = 15  # that spreadsheets keep of a number
_PLAIN_EXPONENTS = range(-10, 21)  # powers of ten of numbers that are shown without one
_ROUNDING = Context(prec=_SIGNIFICANT_DIGITS, rounding=ROUND_HALF_UP)
_CONTEXT = Context(prec=700, rounding=ROUND_HALF_UP)
_INTEGER = re.compile(r"-?\d+")
_TOKEN = re.compile(
    r"""
    "(?P<quoted>[^"]*)"? | \\(?P<escaped>.) | (?P<blank>_.) | (?P<fill>\*.) | \[(?P<bracket>[^\]]*)\]
    | (?P<general>general) | (?P<ampm>am/pm|a/p|上午/下午) | (?P<exponent>e[+-])
    | (?P<date>y+|m+|d+|h+|s+|e+|b+|g+) | (?P<digit>[0\#?]) | (?P<point>\.) | (?P<comma>,) | (?P<percent>%)
    | (?P<slash>/) | (?P<text>@) | (?P<literal>.)
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_CONDITION = re.compile(r"(<=|>=|<>|<|>|=)\s*(-?[\d.]+(?:E[+-]?\d+)?)", re.IGNORECASE)
_CURRENCY = re.compile(r"\$([^-]*(?:-(?![0-9A-Fa-f]+$)[^-]*)*)(?:-([0-9A-Fa-f]+))?$")
_COLOUR = re.compile(r"black|blue|cyan|green|magenta|red|white|yellow|color *\d+", re.IGNORECASE)
_SECTION_END = re.compile(r'"[^"]*"?|\\.|_.|\*.|\[[^\]]*\]|(;)', re.DOTALL)


@dataclass(frozen=True)
class _Section:
    """One section of a code. locale: the number of the Windows locale that it names, or 0."""

    tokens: tuple[Token, ...]
    condition: tuple[str, Decimal] | None
    is_coloured: bool
    locale: int

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its tokens."""
        return frozenset(token.kind for token in self.tokens)

    @cached_property
    def places(self) -> DigitPlaces:
        """Its places for digits."""
        return DigitPlaces(self.tokens)

    @cached_property
    def is_date(self) -> bool:
        """Whether it shows dates or times."""
        return not self.kinds.isdisjoint(DATE_KINDS) and self.kinds.isdisjoint({"digit", "general"})

    @cached_property
    def is_unclear(self) -> bool:
        """Whether letters of dates stand before places for digits, which no spreadsheet writes."""
        kinds = [token.kind for token in self.tokens]
        dates = [place for place, kind in enumerate(kinds) if kind in DATE_KINDS]
        digits = [place for place, kind in enumerate(kinds) if kind == "digit"]
        return bool(dates and digits) and dates[0] < digits[0]

    @cached_property
    def slash(self) -> int | None:
        """The place of its first slash."""
        for place, token in enumerate(self.tokens):
            if token.kind == "slash":
                return place
        return None


class NumberFormat:
    """A format code, ready to show values. A code that is none shows them as `General` does."""

    def __init__(self, code: str) -> None:
        sections = [_section(text) for text in _sections(code or GENERAL)]
        is_last_for_text = "text" in sections[-1].kinds or len(sections) == _MOST_SECTIONS
        self._text = sections.pop() if is_last_for_text else None
        self._sections = sections[:3]
        self._is_general = code in ("", GENERAL)

    def is_date(self) -> bool:
        """Whether numbers are shown as dates or times."""
        return bool(self._sections) and self._sections[0].is_date

    def shown_text(self, text: str) -> str:
        """A text as it is shown."""
        if self._text is None or (not self._sections and len(self._text.tokens) <= 1):
            return text
        return _filled_in(self._text.tokens, text)

    def shown_number(self, stored: str, from_1904: bool = False) -> str:
        """A number as it is shown, with blanks for what its format leaves free.

        stored: the number's digits, as the file has them.
        from_1904: whether dates count from 1904 instead of 1900.
        """
        if self._is_general and stored.strip("-0"):
            return general(stored)
        value = _decimal(stored)
        section = self._section_for(value)
        if section is None or value is None or section.is_unclear:
            return general(stored)
        with localcontext(_CONTEXT):
            if section.is_date:
                date = shown_date(section.tokens, value, section.locale, from_1904)
                return general(stored) if date is None else date
            shown = _shown(section, abs(value), stored)
            return f"-{shown.lstrip()}" if self._needs_sign(section, value, shown) else shown

    def _section_for(self, value: Decimal | None) -> _Section | None:
        sections = self._sections
        if value is None or not sections:
            return None
        conditions = [section.condition for section in sections[:2]]
        if not any(conditions):
            place = 1 if value < 0 else 2 if value == 0 else 0
            return sections[place] if place < len(sections) else sections[0]
        for section in sections[:2]:
            if section.condition and _holds(section.condition, value):
                return section
        place = 2 if all(conditions) else 1
        return sections[place] if place < len(sections) else None

    def _needs_sign(self, section: _Section, value: Decimal, shown: str) -> bool:
        """Whether the format shows a negative number's sign by itself. In a section for negative numbers the code has it."""
        if value >= 0:
            return False
        if section.condition:
            operator, bound = section.condition
            is_for_negatives = operator in ("<", "<=") and bound <= 0
        else:
            is_for_negatives = section is not self._sections[0] and not self._sections[0].condition
        only_digits = not re.search(r"[^\d.,%\s]", shown)
        return not is_for_negatives or (section.is_coloured and only_digits)


@lru_cache(maxsize=1 << 10)
def number_format(code: str) -> NumberFormat:
    """The format with this code."""
    return NumberFormat(code)


def general(stored: str) -> str:
    """A number in the format `General`, in a cell that is wide enough: with up to fifteen significant digits."""
    if _INTEGER.fullmatch(stored):
        return stored
    value = _decimal(stored)
    if value is None:
        return stored
    if value == 0:
        return "0"
    exponent = value.adjusted()
    if exponent in _PLAIN_EXPONENTS:
        plain = f"{value:f}"
        return plain.rstrip("0").rstrip(".") if "." in plain else plain
    sign, digits, _ = value.normalize().as_tuple()
    first, *following = map(str, digits)
    decimals = "".join(following)
    mantissa = f"{first}.{decimals}".rstrip(".")
    minus = "-" if sign else ""
    return f"{minus}{mantissa}E{exponent:+03d}"


def _decimal(stored: str) -> Decimal | None:
    """The number, rounded to the digits that spreadsheets keep of it, or None."""
    try:
        value = Decimal(stored)
    except InvalidOperation:
        return None
    if not value.is_finite():
        return None
    return _ROUNDING.plus(value)


def _holds(condition: tuple[str, Decimal], value: Decimal) -> bool:
    operator, bound = condition
    results = {
        "<": value < bound,
        "<=": value <= bound,
        ">": value > bound,
        ">=": value >= bound,
        "=": value == bound,
        "<>": value != bound,
    }
    return results[operator]


def _sections(code: str) -> list[str]:
    start = 0
    sections = []
    for match in _SECTION_END.finditer(code):
        if match[1]:
            sections.append(code[start : match.start()])
            start = match.end()
    return [*sections, code[start:]][:_MOST_SECTIONS]


def _section(code: str) -> _Section:
    tokens: list[Token] = []
    condition = None
    is_coloured = False
    locale = 0
    for match in _TOKEN.finditer(code):
        kind = match.lastgroup or "literal"
        if kind != "bracket":
            tokens.append(_token(kind, match))
            continue
        inside = match["bracket"]
        if currency := _CURRENCY.match(inside):
            tokens.append(Token("literal", currency[1]))
            locale = int(currency[2] or "0", 16) or locale
        elif re.fullmatch(r"h+|m+|s+", inside, re.IGNORECASE):
            tokens.append(Token("elapsed", inside.lower()))
        elif clause := _CONDITION.fullmatch(inside.strip()):
            condition = clause[1], Decimal(clause[2])
        is_coloured = is_coloured or _COLOUR.fullmatch(inside) is not None
    return _Section(tuple(with_parts_of_seconds(tokens)), condition, is_coloured, locale)


def _token(kind: str, match: re.Match[str]) -> Token:
    if kind in ("quoted", "escaped"):
        return Token("literal", match[kind])
    if kind == "blank":
        return Token("literal", " ")
    if kind == "fill":
        return Token("literal", "")
    return Token(kind, match[0])


def _shown(section: _Section, value: Decimal, stored: str) -> str:
    """A number without its sign."""
    tokens = section.tokens
    if not section.kinds.isdisjoint({"general", "text"}):
        number = general(stored.strip().removeprefix("-"))
        return _filled_in(tokens, number)
    if section.slash is not None:
        fraction = shown_fraction(tokens, section.slash, value)
        if fraction is not None:
            return fraction
    return section.places.filled(value)


def _filled_in(tokens: Sequence[Token], value: str) -> str:
    """A value among the signs of its section, in which `General` or `@` stands for it."""
    pieces = [value if token.kind in ("general", "text") else token.text for token in tokens]
    return "".join(pieces)
