"""Subtitles and transcripts: WebVTT and SubRip. Cues are joined to paragraphs, each after the time of its start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import NamedTuple

from blend_retrieval.decoding import decode
from blend_retrieval.document import clean
from blend_retrieval.readers.base import Part, Parts, UnreadableError, notes

_TIME = r"(?:\d{1,6}:)?\d{1,2}:\d{2}[.,]\d{1,3}"
_CUE = re.compile(rf"[ \t]*({_TIME})[ \t]*-->[ \t]*({_TIME})")
_VOICE = re.compile(r"<v(?:\.[^ \t>]*)?[ \t]+([^<>]*)>")
_INNER_TIME = re.compile(rf"<{_TIME}>")
_TAG = re.compile(r"</?(?:v|c|i|b|u|s|ruby|rt|lang|font|span)(?:[.\s][^<>]*)?>|\{\\[^{}]*\}", re.IGNORECASE)
_BREAK = re.compile(r"<br ?/?>|\\[Nn]", re.IGNORECASE)
_HEADER = re.compile(r"WEBVTT[ \t]+(?:[-–—][ \t]*)?(.+)")
_SPEAKER = re.compile(r"(?:^|\n)[-–] ")
_COMMENT = re.compile(r"^NOTE\b", re.MULTILINE)
_BLOCKS = ("NOTE", "STYLE", "REGION")
_LONGEST = 60.0  # seconds of a paragraph
_PAUSE = 5.0  # seconds between two paragraphs


class _Cue(NamedTuple):
    """What is said, by whom, and when, in seconds."""

    start: float
    stop: float
    speaker: str
    text: str


def read_captions(data: bytes, title: str) -> Parts:
    """Read the text of all cues as one document. Comments and styles are left out."""
    decoded, note = decode(data)
    text = clean(decoded)
    cues = list(_cues(text))
    if not cues:
        raise UnreadableError("holds no cues with times")
    if _INNER_TIME.search(text):
        cues = _without_repetition(cues)
    header = _HEADER.match(text)
    named = header[1] if header else title
    paragraphs = "\n\n".join(_paragraphs(cues))
    document = Part("", named, paragraphs, "plain")
    comments = "its comments (NOTE) are not read" if _COMMENT.search(text) else ""
    return [document, *notes(note), *notes(comments)]


def _cues(text: str) -> Iterator[_Cue]:
    lines = text.split("\n")
    places = [place for place, line in enumerate(lines) if _CUE.match(line)]
    stops = [*places[1:], len(lines) + 1]
    for place, following in zip(places, stops, strict=False):
        times = _CUE.match(lines[place])
        if times is None:
            continue
        payload = lines[place + 1 : following]
        if following <= len(lines) and _ends_with_name(payload):
            payload = payload[:-1]
        start = _seconds(times[1])
        stop = _seconds(times[2])
        yield from _voices(start, stop, _payload(payload))


def _ends_with_name(lines: list[str]) -> bool:
    """Whether the last line before a time is the name or number of the next cue."""
    if not lines or not lines[-1].strip():
        return False
    is_apart = len(lines) > 1 and not lines[-2].strip()
    return is_apart or lines[-1].strip().isdigit()


def _payload(lines: list[str]) -> str:
    """The text of a cue: up to a comment or style, which stands after a blank line."""
    texts: list[str] = []
    for place, line in enumerate(lines):
        is_apart = place == 0 or not lines[place - 1].strip()
        first_word = line.split(" ")[0].strip()
        if is_apart and first_word in _BLOCKS:
            break
        texts.append(line)
    return "\n".join(texts)


def _voices(start: float, stop: float, payload: str) -> Iterator[_Cue]:
    """A cue for each speaker that the text names."""
    opening, *voices = _VOICE.split(payload)
    if _plain(opening):
        yield _Cue(start, stop, "", _plain(opening))
    speakers = voices[::2]
    texts = voices[1::2]
    for speaker, text in zip(speakers, texts, strict=True):
        name = unescape(speaker).strip()
        yield _Cue(start, stop, name, _plain(text))


def _plain(text: str) -> str:
    broken = _BREAK.sub("\n", text)
    untimed = _INNER_TIME.sub("", broken)
    lines = _TAG.sub("", untimed).split("\n")
    plain = [" ".join(unescape(line).split()) for line in lines]
    return "\n".join(filter(None, plain))


def _seconds(time: str) -> float:
    seconds = 0.0
    for part in time.replace(",", ".").split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def _without_repetition(cues: list[_Cue]) -> list[_Cue]:
    """Captions that roll up, each with the line before it, as their lines once."""
    rolled: list[_Cue] = []
    last = ""
    for cue in cues:
        lines = cue.text.split("\n")
        fresh = lines[1:] if lines[0] == last else lines
        if fresh:
            rolled.append(cue._replace(text="\n".join(fresh)))
        last = lines[-1]
    return rolled


def _paragraphs(cues: list[_Cue]) -> Iterator[str]:
    paragraph: list[_Cue] = []
    for cue in cues:
        if paragraph and _is_new(paragraph, cue):
            yield _paragraph(paragraph)
            paragraph = []
        if cue.text:
            paragraph.append(cue)
    if paragraph:
        yield _paragraph(paragraph)


def _is_new(paragraph: list[_Cue], cue: _Cue) -> bool:
    first, last = paragraph[0], paragraph[-1]
    is_long = cue.start - first.start >= _LONGEST
    is_another = cue.speaker != last.speaker
    is_after_pause = cue.start - last.stop > _PAUSE
    is_earlier = cue.start < last.start
    return is_another or is_after_pause or is_earlier or is_long


def _paragraph(cues: list[_Cue]) -> str:
    whole = int(cues[0].start)
    time = f"[{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}]"
    speaker = f" {cues[0].speaker}:" if cues[0].speaker else ""
    texts = [cue.text for cue in cues]
    lines = "\n".join(texts)
    is_dialogue = any(map(_SPEAKER.search, texts))
    words = lines if is_dialogue else lines.replace("\n", " ")
    return f"{time}{speaker} {words}"
