"""Thoughts of reasoning models: how their templates mark them, and the parser that takes them out of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_LAST_TOKENS = 16  # of a prompt: they hold a marker and the blanks behind it, even if the marker is several tokens
_BLANKS = " \t\r\n"
# Where an answer is: at its start, in its thoughts, behind them, in its text.
_START, _THOUGHTS, _BEHIND, _TEXT = range(4)


class ThoughtMarkers(NamedTuple):
    """The texts around a family's thoughts; they may be control tokens."""

    begin: str
    end: str


class Thinking(NamedTuple):
    """An answer may begin with thoughts. opened: the prompt ends inside them, so `begin` does not come any more."""

    markers: ThoughtMarkers
    opened: bool = False


_FAMILIES = (ThoughtMarkers("<think>", "</think>"), ThoughtMarkers("[THINK]", "[/THINK]"))


def markers_of(template: object) -> ThoughtMarkers | None:
    """The markers that a chat template knows; None for models that do not think. template: its text, or several by name."""
    text = str(template)
    return next((markers for markers in _FAMILIES if markers.begin in text or markers.end in text), None)


def thinking_behind(tokenizer: Any, markers: ThoughtMarkers | None, prompt: Sequence[int]) -> Thinking | None:
    """How an answer to this prompt may begin; None if it has no thoughts, as behind a prompt that ends with `end`."""
    if markers is None:
        return None
    last_ids = list(prompt[-_LAST_TOKENS:])
    last = str(tokenizer.decode(last_ids, skip_special_tokens=False)).rstrip(_BLANKS)
    return None if last.endswith(markers.end) else Thinking(markers, last.endswith(markers.begin))


def begun(marker: str, text: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    start = text.find(marker[:1], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[:1], start + 1)
    return len(text) - start if start >= 0 else 0


class ThoughtParser:
    """Divides one answer into thoughts and the text behind them.

    Only thoughts at the start of the answer count: whatever follows other text is text. Blanks around thoughts are dropped.
    A step takes as long as its own text, however long the answer is.
    thinking: None takes everything as text. inside: the answer has begun with thoughts, and no text has come behind them.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._part = _TEXT if thinking is None else _START
        self._blanks = list[str]()  # in front of what follows; given out with it, or dropped
        self._held = ""  # may be the beginning of a marker
        self._thought = False
        self.inside = False

    def add(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """The thoughts and the text that this makes certain. final: nothing follows."""
        thoughts = ""
        if self._part == _START:
            text = self._start(text, final=final)
        if self._part == _THOUGHTS:
            thoughts, text = self._think(text, final=final)
        if self._part == _BEHIND:
            text = text.lstrip(_BLANKS)
            if text:
                self._part = _TEXT
                self.inside = False
        return thoughts, text

    def _start(self, text: str, *, final: bool) -> str:
        """Decide whether the answer begins with thoughts. Returns what follows `begin`, or the text so far."""
        assert self._thinking is not None
        begin = self._thinking.markers.begin
        if not self._held:
            words = text.lstrip(_BLANKS)
            self._blanks.append(text[: len(text) - len(words)])
            text = words
        text = self._held + text
        if not final and len(text) < len(begin) and begin.startswith(text):
            self._held = text
            return ""
        self._held = ""
        if self._thinking.opened or text.startswith(begin):
            self._blanks = []
            self._part = _THOUGHTS
            self.inside = True
            return text.removeprefix(begin)  # some models repeat the prompt's marker
        self._part = _TEXT
        return self._with_blanks(text)

    def _think(self, text: str, *, final: bool) -> tuple[str, str]:
        """The thoughts that this makes certain, and the text behind `end`."""
        assert self._thinking is not None
        end = self._thinking.markers.end
        thoughts, marker, behind = (self._held + text).partition(end)
        if marker:
            self._part = _BEHIND
        undecided = 0 if marker or final else begun(end, thoughts)
        certain = len(thoughts) - undecided
        self._held = thoughts[certain:]
        thoughts = thoughts[:certain]
        if not self._thought:
            thoughts = thoughts.lstrip(_BLANKS)
        words = thoughts.rstrip(_BLANKS)
        blanks = thoughts[len(words) :]
        if words:
            self._thought = True
            words = self._with_blanks(words)
        if blanks:
            self._blanks.append(blanks)
        return words, behind

    def _with_blanks(self, words: str) -> str:
        text = "".join((*self._blanks, words))
        self._blanks = []
        return text
