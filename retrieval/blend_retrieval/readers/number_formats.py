"""Number formats of spreadsheets: shows a value as a person sees it in its cell.

In: a format's code, such as `#,##0.00;[Red]-#,##0.00`, and the number or text that a cell stores. Out: the text of the cell.
Formats of dates and times are in `date_formats`.

A code has up to four sections: for positive numbers, negative ones, zero and text. Section 18.8.31 of ECMA-376 describes
them. Signs follow the English (US) locale, as in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache

from blend_retrieval.readers.date_formats import DATE_KINDS, Token, shown_date, with_parts_of_seconds

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
    def places(self) -> _Places:
        """Its places for digits."""
        return _Places(self.tokens)

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
    value = _decimal(stored)
    if value is None or _INTEGER.fullmatch(stored):
        return stored
    if value == 0:
        return "0"
    exponent = value.adjusted()
    if exponent in _PLAIN_EXPONENTS:
        plain = f"{value:f}"
        return plain.rstrip("0").rstrip(".") if "." in plain else plain
    digits = "".join(map(str, value.as_tuple().digits)).rstrip("0")
    mantissa = f"{digits[0]}.{digits[1:]}".rstrip(".")
    return f"{'-' if value < 0 else ''}{mantissa}E{exponent:+03d}"


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
    results = {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}
    return results.get(operator, (value == bound) == (operator == "="))


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
        fraction = _fraction(tokens, section.slash, value)
        if fraction is not None:
            return fraction
    return section.places.filled(value)


def _filled_in(tokens: Sequence[Token], value: str) -> str:
    """A value among the signs of its section, in which `General` or `@` stands for it."""
    pieces = [value if token.kind in ("general", "text") else token.text for token in tokens]
    return "".join(pieces)


def _fraction(tokens: Sequence[Token], slash: int, value: Decimal) -> str | None:
    """A number as a fraction, such as 12 1/3 for the code `# ?/?`; None if the code is of no fraction."""
    before, after = list(tokens[:slash]), list(tokens[slash + 1 :])
    while before and not before[-1].text.strip():
        before.pop()
    while after and not after[0].text.strip():
        after.pop(0)
    numerator_size = _leading(reversed(before), "digit")
    denominator_size = _leading(after, "digit")
    fixed = re.match(r"\d*", "".join(token.text for token in after))
    written = fixed[0] if fixed and not set(fixed[0]) <= {"0"} else ""
    if not numerator_size or not (denominator_size or written):
        return None
    whole_part = before[: len(before) - numerator_size]
    has_whole = any(token.kind == "digit" for token in whole_part)
    exact = Fraction(value)
    whole = int(exact) if has_whole else 0
    part = exact - whole
    if written:
        denominator = int(written)
        numerator = int(part * denominator + Fraction(1, 2))
    else:
        numerator, denominator = _nearest(part, 10**denominator_size - 1)
    if has_whole and numerator == denominator:
        whole, numerator = whole + 1, 0
    behind = after[max(denominator_size, len(written)) :]
    around = "".join(token.text for token in whole_part)
    parts = [_whole(whole_part, whole, numerator) if has_whole else around]
    if numerator or not has_whole:
        parts.append(f"{numerator}/{denominator}")
    return "".join([*parts, *(token.text for token in behind)])


def _nearest(part: Fraction, most: int) -> tuple[int, int]:
    """(numerator, denominator) of the last convergent with a denominator up to `most`, which spreadsheets show."""
    before, last = (0, 1), (1, 0)
    remainder = part
    while True:
        quotient = int(remainder)
        following = quotient * last[0] + before[0], quotient * last[1] + before[1]
        if following[1] > most:
            return last
        before, last = last, following
        if remainder == quotient:
            return last
        remainder = 1 / (remainder - quotient)


def _leading(tokens: Iterator[Token] | Sequence[Token], kind: str) -> int:
    size = 0
    for token in tokens:
        if token.kind != kind:
            break
        size += 1
    return size


def _whole(tokens: Sequence[Token], whole: int, numerator: int) -> str:
    shown = _Places(tokens).filled(Decimal(whole))
    has_digit = whole > 0 or numerator > 0 or "0" in shown
    return shown if has_digit else f"{shown.rstrip()}0"


class _Places:
    """The places for digits in a section, and what stands around them."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        kinds = [token.kind for token in tokens]
        self._exponent = kinds.index("exponent") if "exponent" in kinds else len(tokens)
        points = [place for place, kind in enumerate(kinds[: self._exponent]) if kind == "point"]
        self._point = points[0] if points else self._exponent
        places = [place for place, kind in enumerate(kinds) if kind == "digit"]
        self._whole = [place for place in places if place < self._point]
        self._decimals = [place for place in places if self._point < place < self._exponent]
        self._powers = [place for place in places if place > self._exponent]
        commas = [place for place, kind in enumerate(kinds) if kind == "comma"]
        self._thousands = [place for place in commas if self._is_between(place)]
        self._scaling = [place for place in commas if self._is_behind(place)]
        self._percents = kinds.count("percent")
        self._unit = Decimal(1).scaleb(-len(self._decimals))
        self._plain = self._plain_form()

    def _is_between(self, comma: int) -> bool:
        """Whether a comma stands between digits before the point, and so divides thousands."""
        return bool(self._whole) and self._whole[0] < comma < self._whole[-1]

    def _is_behind(self, comma: int) -> bool:
        """Whether a comma stands directly behind the last digit, and so divides the number by a thousand."""
        ends = [places[-1] for places in (self._whole, self._decimals) if places]
        return any(
            end < comma and all(token.kind == "comma" for token in self._tokens[end + 1 : comma]) for end in ends
        )

    def _plain_form(self) -> tuple[str, str, str] | None:
        """(text before, Python's format, text behind) if the digits stand together, as in `#,##0.00`, which is faster."""
        places = [*self._whole, *self._decimals]
        codes = "".join(self._tokens[place].text for place in places)
        decimals = len(self._decimals)
        if not self._whole or not re.fullmatch(rf"#*0{{{decimals + 1}}}", codes) or self._exponent < len(self._tokens):
            return None
        between = self._tokens[places[0] : places[-1] + 1]
        if any(token.kind not in ("digit", "comma", "point") for token in between):
            return None
        texts = ["" if place in self._scaling else token.text for place, token in enumerate(self._tokens)]
        form = f"{',' if self._thousands else ''}.{decimals}f"
        return "".join(texts[: places[0]]), form, "".join(texts[places[-1] + 1 :])

    def filled(self, value: Decimal) -> str:
        """The section with the digits of a number that is not negative."""
        value = value.scaleb(2 * self._percents - 3 * len(self._scaling))
        if self._plain:
            before, form, behind = self._plain
            return f"{before}{self._rounded(value):{form}}{behind}"
        power = 0
        if self._exponent < len(self._tokens):
            value, power = self._with_power(value)
        digits = f"{self._rounded(value):f}"
        whole, _, decimals = digits.partition(".")
        texts = self._whole_digits(whole.lstrip("0"))
        texts |= self._decimal_digits(decimals)
        if self._powers:
            texts |= self._power_digits(power)
        for place in (*self._thousands, *self._scaling):
            texts[place] = ""
        if not self._whole and self._point < len(self._tokens):
            texts[self._point] = whole.lstrip("0") + self._tokens[self._point].text
        return "".join(texts.get(place, token.text) for place, token in enumerate(self._tokens))

    def _rounded(self, value: Decimal) -> Decimal:
        return value.quantize(self._unit)

    def _with_power(self, value: Decimal) -> tuple[Decimal, int]:
        """(mantissa, power of ten); the power is a multiple of the places before the point, as engineers write it."""
        step = max(len(self._whole), 1)
        if value == 0:
            return value, 0
        power = value.adjusted() // step * step
        mantissa = value.scaleb(-power)
        if self._rounded(mantissa) >= 10**step:
            power += step
            mantissa = value.scaleb(-power)
        return mantissa, power

    def _whole_digits(self, digits: str) -> dict[int, str]:
        texts = {}
        count = 0
        for place in reversed(self._whole):
            is_first = place == self._whole[0]
            taken = digits if is_first else digits[-1:]
            digits = digits[: len(digits) - len(taken)]
            shown = taken or _blank(self._tokens[place].text)
            if self._thousands:
                shown, count = _grouped(shown, count)
            texts[place] = shown
        return texts

    def _decimal_digits(self, digits: str) -> dict[int, str]:
        significant = len(digits.rstrip("0"))
        texts = {}
        for number, place in enumerate(self._decimals):
            code = self._tokens[place].text
            texts[place] = digits[number] if number < significant else _blank(code)
        return texts

    def _power_digits(self, power: int) -> dict[int, str]:
        tokens = [self._tokens[place] for place in self._powers]
        digits = _Places(tokens).filled(Decimal(abs(power)))
        sign = "-" if power < 0 else ""
        if power >= 0 and self._tokens[self._exponent].text.endswith("+"):
            sign = "+"
        texts = dict.fromkeys(self._powers, "")
        texts[self._exponent] = f"E{sign}"
        texts[self._powers[0]] = digits or "0"
        return texts


def _blank(code: str) -> str:
    """What stands in a place that no digit fills."""
    return {"0": "0", "?": " "}.get(code, "")


def _grouped(digits: str, count: int) -> tuple[str, int]:
    """Digits with commas between thousands. count: of the digits to their right."""
    grouped = ""
    for digit in reversed(digits):
        if digit.isdigit():
            grouped = digit + ("," if count and count % 3 == 0 else "") + grouped
            count += 1
        else:
            grouped = digit + grouped
    return grouped, count
