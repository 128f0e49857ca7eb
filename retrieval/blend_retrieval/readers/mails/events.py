"""Calendar files and invitations (iCalendar): each event as lines that a person reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from blend_retrieval.decoding import decode
from blend_retrieval.readers.base import Part, Parts, UnreadableError, notes

_FOLD = re.compile(r"\r?\n[ \t]")
_VALUE = r'(?:"[^"]*"|[^";:,]*)'
_LINE = re.compile(rf"(?P<name>[A-Za-z0-9-]+)(?P<parameters>(?:;[A-Za-z0-9-]+={_VALUE}(?:,{_VALUE})*)*):(?P<value>.*)")
_DAMAGED = re.compile(r"(?P<name>[A-Za-z0-9-]+);(?P<parameters>)[^:]*:(?P<value>.*)")  # its parameters are not read
_PARAMETER = re.compile(rf";([A-Za-z0-9-]+)=({_VALUE}(?:,{_VALUE})*)")
_MOMENT = re.compile(r"(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)(\d\d)(Z?))?")
_ESCAPED = re.compile(r"\\(.)")
_READ = ("VEVENT", "VTODO", "VJOURNAL", "VFREEBUSY")
_LABELS = {
    "DTSTART": "Start",
    "DTEND": "End",
    "RRULE": "Repeats",
    "RDATE": "Also on",
    "EXDATE": "Except on",
    "RECURRENCE-ID": "Instead of",
    "PERCENT-COMPLETE": "Percent complete",
    "REQUEST-STATUS": "Status of the request",
}
_TECHNICAL = ("UID", "DTSTAMP", "SEQUENCE", "CREATED", "LAST-MODIFIED", "TRANSP", "CLASS", "BEGIN", "END")
_MOMENTS = ("DTSTART", "DTEND", "DUE", "COMPLETED", "RDATE", "EXDATE", "RECURRENCE-ID")
_PEOPLE = ("ATTENDEE", "ORGANIZER")
_OF_CALENDAR = {"METHOD": "Calendar", "NAME": "Name", "X-WR-CALNAME": "Name", "X-WR-CALDESC": "Description"}


class _Property(NamedTuple):
    """A line of a calendar. name: in upper case, as the parameters' names; "" for a line that is none."""

    name: str
    parameters: dict[str, str]
    value: str


def read_ics(data: bytes, title: str) -> Parts:
    """Read a calendar as one document."""
    text, note = decode(data)
    if "BEGIN:VCALENDAR" not in text.upper():
        raise UnreadableError("is no calendar: it does not open with BEGIN:VCALENDAR")
    calendar = Part("", title, events_text(text), "plain")
    return [calendar, *notes(note)]


def events_text(calendar: str) -> str:
    """The events, tasks and entries of a calendar, with their times, places and people.

    Times come as 2026-11-03 09:00 UTC (20261103T090000Z): legible, and as they are in the file.
    """
    events = _Events()
    for line in _properties(calendar):
        events.take(line)
    return "\n\n".join("\n".join(block) for block in events.blocks if block)


class _Events:
    """What the lines of a calendar say, in blocks: first of the calendar, then of each event."""

    def __init__(self) -> None:
        self.blocks: list[list[str]] = [[]]
        self._components: list[str] = []
        self._is_shown = True

    def take(self, line: _Property) -> None:
        """Take the next line."""
        if not line.name:  # some programs do not fold: the line before goes on
            if self._is_shown and self._in_event:
                self.blocks[-1].append(_words(line.value))
            return
        self._is_shown = not line.name.startswith("X-")
        if line.name == "BEGIN":
            self._components.append(line.value.strip().upper())
            if self._in_event:
                self.blocks.append([])
        elif line.name == "END" and self._components:
            self._components.pop()
        elif self._in_event:
            if line.value.strip() and self._is_shown and line.name not in _TECHNICAL:
                self.blocks[-1].append(_shown(line))
        elif line.name in _OF_CALENDAR and self._components in ([], ["VCALENDAR"]):
            self._take_calendars(_OF_CALENDAR[line.name], _words(line.value))

    def _take_calendars(self, label: str, words: str) -> None:
        entry = f"{label}: {words.lower() if label == 'Calendar' else words}"
        if words.strip() and entry not in self.blocks[0]:
            self.blocks[0].append(entry)

    @property
    def _in_event(self) -> bool:
        return bool(self._components) and self._components[-1] in _READ


def _properties(calendar: str) -> Iterator[_Property]:
    for line in _FOLD.sub("", calendar).splitlines():
        match = _LINE.fullmatch(line) or _DAMAGED.fullmatch(line)
        if match is not None:
            parameters = {name.upper(): value.strip('"') for name, value in _PARAMETER.findall(match["parameters"])}
            yield _Property(match["name"].upper(), parameters, match["value"])
        elif line.strip():
            yield _Property("", {}, line)


def _shown(line: _Property) -> str:
    label = _LABELS.get(line.name, line.name.replace("-", " ").capitalize())
    if line.name in _MOMENTS:
        moments = [_moment(value, line.parameters.get("TZID", "")) for value in line.value.split(",")]
        return f"{label}: {', '.join(moments)}"
    if line.name in _PEOPLE:
        return f"{label}: {_person(line)}"
    return f"{label}: {_words(line.value)}"


def _words(value: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] in "nN" else match[1], value)


def _moment(value: str, zone: str) -> str:
    parts = _MOMENT.fullmatch(value.strip())
    if parts is None:
        return value
    year, month, day, hour, minute, second, is_utc = parts.groups()
    words = f"{year}-{month}-{day}"
    if hour:
        seconds = "" if second == "00" else f":{second}"
        words = f"{words} {hour}:{minute}{seconds}"
    zone = "UTC" if is_utc else zone
    return f"{words} {zone} ({value})" if zone else f"{words} ({value})"


def _person(line: _Property) -> str:
    address = re.sub("^mailto:", "", line.value, flags=re.IGNORECASE)
    named = line.parameters.get("CN", "")
    person = f"{named} <{address}>" if named and named != address else address
    answer = line.parameters.get("PARTSTAT", "").replace("-", " ").lower()
    return f"{person} ({answer})" if answer else person
