"""Numbers as fractions in number formats of spreadsheets, such as `# ?/?` and `# ??/100`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction

from blend_retrieval.readers.sheets.date_formats import Token
from blend_retrieval.readers.sheets.digit_places import DigitPlaces

_WRITTEN = re.compile(r"(?=0*[1-9])\d+")  # a denominator in figures


def shown_fraction(tokens: Sequence[Token], slash: int, value: Decimal) -> str | None:
    """A number as a fraction, such as 12 1/3 for the code `# ?/?`; None if the code is of no fraction."""
    before = list(tokens[:slash])
    after = list(tokens[slash + 1 :])
    while before and not before[-1].text.strip():
        before.pop()
    while after and not after[0].text.strip():
        after.pop(0)
    numerator_size = _leading(reversed(before), "digit")
    denominator_size = _leading(after, "digit")
    text_behind = "".join(token.text for token in after)
    written = _WRITTEN.match(text_behind)
    if not numerator_size or not (denominator_size or written):
        return None
    whole_part = before[: len(before) - numerator_size]
    has_whole = any(token.kind == "digit" for token in whole_part)
    exact = Fraction(value)
    whole = int(exact) if has_whole else 0
    part = exact - whole
    if written:
        denominator = int(written[0])
        denominator_size = len(written[0])
        numerator = int(part * denominator + Fraction(1, 2))
    else:
        numerator, denominator = _nearest(part, 10**denominator_size - 1)
    if has_whole and numerator == denominator:
        whole, numerator = whole + 1, 0
    behind = after[denominator_size:]
    around = "".join(token.text for token in whole_part)
    parts = [_whole(whole_part, whole, numerator) if has_whole else around]
    if numerator or not has_whole:
        parts.append(f"{numerator}/{denominator}")
    parts += [token.text for token in behind]
    return "".join(parts)


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
    shown = DigitPlaces(tokens).filled(Decimal(whole))
    has_digit = whole > 0 or numerator > 0 or "0" in shown
    return shown if has_digit else f"{shown.rstrip()}0"
