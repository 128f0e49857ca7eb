"""Dates and times in number formats of spreadsheets, such as `dd.mm.yyyy` and `[h]:mm`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from decimal import ROUND_DOWN, Decimal
from typing import NamedTuple

from blend_retrieval.readers.sheets.calendar_names import calendar_names

DATE_KINDS = frozenset({"date", "elapsed", "ampm"})  # of tokens
_DAYS_TO_1904 = 1462
_LAST_DAY = 2_958_465  # 9999-12-31
_FEIGNED_LEAP_DAY = 60  # 1900-02-29: Excel counts it, for Lotus 1-2-3
_SECONDS_A_DAY = 86_400
_BUDDHIST_YEARS = 543
_NOON = 12


class Token(NamedTuple):
    """A piece of a format code: a kind such as "digit", and its characters."""

    kind: str
    text: str


class _Moment(NamedTuple):
    """A date and time. seconds: all since the epoch, with the decimals that the code shows; weekday: 0 is Monday."""

    year: int
    month: int
    day: int
    weekday: int
    seconds: Decimal

    @property
    def hour(self) -> int:
        return int(self.seconds) // 3600 % 24

    @property
    def minute(self) -> int:
        return int(self.seconds) // 60 % 60


def with_parts_of_seconds(tokens: Sequence[Token]) -> Iterator[Token]:
    """The tokens of a section; `.00` behind seconds becomes one token of the kind "subsecond"."""
    place = 0
    while place < len(tokens):
        zeros = place + 1
        while zeros < len(tokens) and tokens[zeros] == Token("digit", "0"):
            zeros += 1
        is_behind_seconds = place and tokens[place - 1].kind in DATE_KINDS and "s" in tokens[place - 1].text.lower()
        if is_behind_seconds and tokens[place].kind in ("point", "comma") and zeros > place + 1:
            yield Token("subsecond", tokens[place].text + "0" * (zeros - place - 1))
            place = zeros
        else:
            yield tokens[place]
            place += 1


def shown_date(tokens: Sequence[Token], days: Decimal, locale: int, from_1904: bool) -> str | None:
    """A date or time in a format, or None if the number is none: a negative date, or one after the year 9999.

    days: since the epoch, which is the last day of 1899, or the first of 1904 if `from_1904`.
    locale: of Windows, for the names of months and days, or 0.
    """
    decimals = max([len(token.text) - 1 for token in tokens if token.kind == "subsecond"], default=0)
    seconds = (days * _SECONDS_A_DAY).quantize(Decimal(1).scaleb(-decimals))
    is_elapsed = any(token.kind == "elapsed" for token in tokens)
    if seconds < 0 and is_elapsed and not from_1904:
        shown = _shown(tokens, _moment(abs(seconds)), locale)
        return f"-{shown}"
    if from_1904:
        seconds += _DAYS_TO_1904 * _SECONDS_A_DAY
    if not 0 <= seconds < (_LAST_DAY + 1) * _SECONDS_A_DAY:
        return None
    moment = _moment(seconds)
    if from_1904 and is_elapsed:
        moment = moment._replace(seconds=abs(seconds - _DAYS_TO_1904 * _SECONDS_A_DAY))
    return _shown(tokens, moment, locale)


def _moment(seconds: Decimal) -> _Moment:
    number = int(seconds // _SECONDS_A_DAY)
    if number == 0:
        return _Moment(1900, 1, 0, 5, seconds)
    if number == _FEIGNED_LEAP_DAY:
        return _Moment(1900, 2, 29, 2, seconds)
    epoch = date(1899, 12, 31) if number < _FEIGNED_LEAP_DAY else date(1899, 12, 30)
    day = epoch + timedelta(number)
    return _Moment(day.year, day.month, day.day, day.weekday(), seconds)


def _shown(tokens: Sequence[Token], moment: _Moment, locale: int) -> str:
    has_noon = any(token.kind == "ampm" for token in tokens)
    has_era = any(token.kind == "date" and token.text[0] in "gG" for token in tokens)
    pieces = []
    for place, token in enumerate(tokens):
        code = token.text.lower()
        if token.kind == "elapsed":
            pieces.append(_elapsed(code, moment.seconds))
        elif token.kind == "ampm":
            pieces.append(_half_of_day(token.text, moment.hour))
        elif token.kind == "subsecond":
            part = moment.seconds % 1
            pieces.append(code[0] + f"{part:.{len(code) - 1}f}"[2:])
        elif token.kind != "date":
            pieces.append(token.text)
        elif code[0] == "m" and len(code) <= 2 and _is_minutes(tokens, place):
            pieces.append(f"{moment.minute:0{len(code)}d}")
        elif code[0] in "ye" and has_era:  # years of eras are shown as those of the common calendar
            pieces.append(f"{moment.year:04d}")
        elif code[0] in "hs":
            pieces.append(_time(code, moment, has_noon))
        else:
            pieces.append(_day(code, moment, locale))
    return "".join(pieces)


def _elapsed(code: str, seconds: Decimal) -> str:
    unit = {"h": 3600, "m": 60, "s": 1}[code[0]]
    count = int((seconds / unit).to_integral_value(ROUND_DOWN))
    return f"{count:0{len(code)}d}"


def _half_of_day(code: str, hour: int) -> str:
    before, after = code.split("/")
    shown = after if hour >= _NOON else before
    return shown.upper() if len(code) > 3 else shown


def _is_minutes(tokens: Sequence[Token], place: int) -> bool:
    """Whether an `m` means minutes: behind hours or before seconds."""
    before = _first_letter(reversed(tokens[:place]))
    after = _first_letter(tokens[place + 1 :])
    return before == "h" or after == "s"


def _first_letter(tokens: Iterable[Token]) -> str:
    """The first letter of the first token of a date or time, or ""."""
    for token in tokens:
        if token.kind in ("date", "elapsed"):
            return token.text[0].lower()
    return ""


def _time(code: str, moment: _Moment, has_noon: bool) -> str:
    value = int(moment.seconds) % 60
    if code[0] == "h":
        value = moment.hour
        if has_noon:
            value = value % _NOON or _NOON
    return f"{value:0{min(len(code), 2)}d}"


def _day(code: str, moment: _Moment, locale: int) -> str:
    letter, size = code[0], len(code)
    if letter in "ye":
        return f"{moment.year % 100:02d}" if letter == "y" and size <= 2 else f"{moment.year:04d}"
    if letter == "b":
        year = moment.year + _BUDDHIST_YEARS
        return f"{year % 100:02d}" if size <= 2 else f"{year:04d}"
    if letter == "g":
        return ""
    names = calendar_names(locale)
    if letter == "m":
        month = names.months[moment.month - 1]
        texts = {3: names.short_months[moment.month - 1], 4: month, 5: month[0]}
        return texts.get(size, f"{moment.month:0{size}d}" if size <= 2 else month)
    texts = {3: names.short_days[moment.weekday]}
    return texts.get(size, f"{moment.day:0{size}d}" if size <= 2 else names.days[moment.weekday])
