"""Thoughts of reasoning models: how their templates mark them, and the parser that takes them out of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

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


def thinking_behind(
    tokenizer: Any,
    markers: ThoughtMarkers | None,
    prompt: Sequence[int],
) -> Thinking | None:
    """How an answer to this prompt may begin; None if it has no thoughts, as behind a prompt that ends with `end`."""
    if markers is None:
        return None
    last_ids = list(prompt[-_LAST_TOKENS:])
    last = str(tokenizer.decode(last_ids, skip_special_tokens=False)).rstrip(_BLANKS)
    return None if last.endswith(markers.end) else Thinking(markers, last.endswith(markers.begin))


def begun(marker: str, text: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    return max((length for length in range(1, len(marker)) if text.endswith(marker[:length])), default=0)


class ThoughtParser:
    """Divides one answer into thoughts and the text behind them.

    Only thoughts at the start of the answer count: whatever follows other text is text. Blanks around thoughts are dropped.
    thinking: None takes everything as text.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._at: Literal["start", "thoughts", "blanks", "text"] = "text" if thinking is None else "start"
        self._held = ""  # not given out yet
        self._thought = False  # some thoughts were given out

    @property
    def inside(self) -> bool:
        """Whether the answer has begun with thoughts, and no text has come behind them."""
        return self._at in ("thoughts", "blanks")

    def add(self, text: str) -> tuple[str, str]:
        """The thoughts and the text that this makes certain."""
        self._held += text
        if self._at == "start":
            self._begin()
        thoughts = self._thoughts() if self._at == "thoughts" else ""
        if self._at == "blanks" and (behind := self._held.lstrip(_BLANKS)):
            self._at = "text"
            self._held = behind
        if self._at != "text":
            return thoughts, ""
        text, self._held = self._held, ""
        return thoughts, text

    def finish(self) -> tuple[str, str]:
        """What was held back, when nothing follows."""
        text = self._held
        if self.inside or (self._at == "start" and self._thinking is not None and self._thinking.opened):
            return (text.rstrip(_BLANKS) if self._thought else text.strip(_BLANKS)), ""
        return "", text

    def _begin(self) -> None:
        """Decide whether the answer begins with thoughts, once that is certain."""
        assert self._thinking is not None
        begin = self._thinking.markers.begin
        text = self._held.lstrip(_BLANKS)
        if begin != text and begin.startswith(text):
            return
        if self._thinking.opened or text.startswith(begin):
            self._at = "thoughts"
            self._held = text.removeprefix(begin)  # some models repeat the marker of the prompt
        else:
            self._at = "text"

    def _thoughts(self) -> str:
        """The held thoughts, without blanks and a part of `end` at their end."""
        assert self._thinking is not None
        end = self._thinking.markers.end
        thoughts, marker, behind = self._held.partition(end)
        undecided = 0 if marker else begun(end, thoughts)
        certain = thoughts[: len(thoughts) - undecided].rstrip(_BLANKS)
        if marker:
            self._at = "blanks"
            self._held = behind
        else:
            self._held = thoughts[len(certain) :]
        certain = certain if self._thought else certain.lstrip(_BLANKS)
        self._thought = self._thought or bool(certain)
        return certain
