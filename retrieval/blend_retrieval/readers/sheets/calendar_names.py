"""Names of months and days in the languages that number formats of spreadsheets name, such as `[$-407]` for German."""

from __future__ import annotations

from typing import NamedTuple


class CalendarNames(NamedTuple):
    """Names in one language: months from January, days from Monday, long and short."""

    months: tuple[str, ...]
    short_months: tuple[str, ...]
    days: tuple[str, ...]
    short_days: tuple[str, ...]


def _names(months: str, short_months: str, days: str, letters: int) -> CalendarNames:
    long_days = tuple(days.split())
    return CalendarNames(
        tuple(months.split()), tuple(short_months.split()), long_days, tuple(day[:letters] for day in long_days)
    )


_LANGUAGE_BITS = 0x3FF  # of a locale's number; the rest tells the country, the calendar and the digits
_ENGLISH = _names(
    "January February March April May June July August September October November December",
    "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    3,
)
_LANGUAGES = {
    0x07: _names(
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "Jan Feb Mrz Apr Mai Jun Jul Aug Sep Okt Nov Dez",
        "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
        2,
    ),
    0x0A: _names(
        "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
        "ene feb mar abr may jun jul ago sep oct nov dic",
        "lunes martes miércoles jueves viernes sábado domingo",
        3,
    ),
    0x0C: _names(
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
        "janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc.",
        "lundi mardi mercredi jeudi vendredi samedi dimanche",
        3,
    ),
    0x10: _names(
        "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
        "gen feb mar apr mag giu lug ago set ott nov dic",
        "lunedì martedì mercoledì giovedì venerdì sabato domenica",
        3,
    ),
    0x13: _names(
        "januari februari maart april mei juni juli augustus september oktober november december",
        "jan feb mrt apr mei jun jul aug sep okt nov dec",
        "maandag dinsdag woensdag donderdag vrijdag zaterdag zondag",
        2,
    ),
    0x16: _names(
        "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
        "jan fev mar abr mai jun jul ago set out nov dez",
        "segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo",
        3,
    ),
}


def calendar_names(locale: int) -> CalendarNames:
    """The names for a Windows locale such as 0x407. Languages that are not in the list get English names."""
    return _LANGUAGES.get(locale & _LANGUAGE_BITS, _ENGLISH)
