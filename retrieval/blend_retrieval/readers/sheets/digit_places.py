"""Digits in number formats of spreadsheets, such as `#,##0.00`, `000-00-0000` and `0.00E+00`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from blend_retrieval.readers.sheets.date_formats import Token


class DigitPlaces:
    """The places for digits in a section, and what stands around them.

    `0` is a place that shows a zero without a digit, `?` one that shows a blank, `#` one that shows nothing.
    """

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
        place = comma
        while place and self._tokens[place].kind == "comma":
            place -= 1
        last_places = [*self._whole[-1:], *self._decimals[-1:]]
        return place in last_places

    def _plain_form(self) -> tuple[str, str, str] | None:
        """(text before, Python's format, text behind) if the digits stand together, as in `#,##0.00`, which is faster."""
        places = [*self._whole, *self._decimals]
        codes = "".join(self._tokens[place].text for place in places)
        decimals = len(self._decimals)
        is_power = self._exponent < len(self._tokens)
        if is_power or not self._whole or not re.fullmatch(rf"#*0{{{decimals + 1}}}", codes):
            return None
        between = self._tokens[places[0] : places[-1] + 1]
        if any(token.kind not in ("digit", "comma", "point") for token in between):
            return None
        texts = ["" if place in self._scaling else token.text for place, token in enumerate(self._tokens)]
        before = "".join(texts[: places[0]])
        behind = "".join(texts[places[-1] + 1 :])
        grouping = "," if self._thousands else ""
        return before, f"{grouping}.{decimals}f", behind

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
        digits = DigitPlaces(tokens).filled(Decimal(abs(power)))
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
