"""Thoughts of reasoning models: how their templates mark them, and the parser that takes them out of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_LAST_TOKENS = 16  # of a prompt: they hold a marker and the blanks behind it, even if the marker is several tokens
_BLANKS = " \t\r\n"


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
    thinking: None takes everything as text. inside: the answer has begun with thoughts, and no text has come behind them.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._answer = ""
        self._thoughts = self._text = ""  # given out
        self.inside = False

    def add(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """The thoughts and the text that this makes certain. final: nothing follows."""
        if self._thinking is None:
            return "", text
        self._answer += text
        thoughts, words = self._divided(self._thinking, final=final)
        certain = (thoughts[len(self._thoughts) :], words[len(self._text) :])
        self._thoughts = thoughts
        self._text = words
        return certain

    def _divided(self, thinking: Thinking, *, final: bool) -> tuple[str, str]:
        """What is certain of the whole answer."""
        begin, end = thinking.markers
        answer = self._answer.lstrip(_BLANKS)
        if not final and begin.startswith(answer) and answer != begin:
            return "", ""
        if not (thinking.opened or answer.startswith(begin)):
            return "", self._answer
        thoughts, marker, behind = answer.removeprefix(begin).partition(end)  # some models repeat the prompt's marker
        if not (marker or final):
            thoughts = thoughts[: len(thoughts) - begun(end, thoughts)]
        words = behind.lstrip(_BLANKS)
        self.inside = not words
        return thoughts.strip(_BLANKS), words
