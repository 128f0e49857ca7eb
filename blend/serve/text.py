"""From tokens to text as they come: never half a character, and nothing behind a text that ends the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from blend.serve.engine import Token
from blend.serve.request import TokenText
from blend.serve.spelling import Spelling

_WAITING = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no character yet
_LONGEST_WAIT = 8  # tokens: no character has more bytes than four


class Said(NamedTuple):
    """What can be said now. ended: whether a text that ends the answer has come."""

    text: str
    ended: bool


class Speaker:
    """The text of one answer; stop: texts that end it, which are no part of it.

    Text that may be the beginning of such a text is held back until the next token has shown.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(filter(None, stop))
        self._ids: list[int] = []
        self._begin = self._told = 0  # where the tokens of the window begin, and up to where they are told
        self._held = ""
        self._spelling, self._first = Spelling(tokenizer), True
        self.ended = False

    def hear(self, token: int) -> Said:
        """The text that this token makes sure of."""
        self._ids.append(token)
        window, told = self._decode(self._begin), self._decode(self._begin, self._told)
        if window.endswith(_WAITING) and len(self._ids) - self._told < _LONGEST_WAIT:
            return Said("", self.ended)
        # Decoded together with the word before: some tokenizers drop a space in front of what stands first.
        self._begin, self._told = self._told, len(self._ids)
        return self._say(window[len(told) :])

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        rest = self._decode(self._begin)[len(self._decode(self._begin, self._told)) :]
        said = "" if self.ended else self._say(rest).text + self._held
        self._held, self._told = "", len(self._ids)
        return said

    def named(self, token: Token) -> TokenText:
        """The token that is to be heard next, with its log-probability, and the likeliest ones, as text."""
        top = tuple((*self._spelled(i), logprob) for i, logprob in token.top)
        text, raw = self._spelled(token.id)
        self._first = self._first and not self._spelling.raw(token.id)
        return TokenText(text, raw, token.logprob or 0.0, top)

    def _decode(self, start: int, stop: int | None = None) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True))

    def _spelled(self, token: int) -> tuple[str, bytes]:
        """What it adds to the answer; a control token adds nothing, and is called by its name."""
        raw = self._spelling.raw(token, first=self._first)
        return raw.decode("utf-8", "replace") or str(self._tokenizer.decode([token])), raw

    def _say(self, text: str) -> Said:
        """Of what was held back and this, all that cannot be the beginning of a text that ends the answer."""
        if self.ended:
            return Said("", True)
        whole, self._held = self._held + text, ""
        found = min((at for stop in self._stop if (at := whole.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.ended = True
            return Said(whole[:found], True)
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n])), default=0)
        self._held = whole[len(whole) - keep :]
        return Said(whole[: len(whole) - keep], False)
