"""Text out of tokens, token by token, up to a stop text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from blend.serve.events import Token

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes bytes that are not a character yet
_LONGEST_WAIT = 8  # tokens: no character has more than four bytes
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how sentencepiece writes a byte that has no piece
# GPT-2's byte alphabet: printable bytes stand for themselves, the others for letters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE}
_ALPHABET |= {chr(letter): byte for letter, byte in enumerate(_OTHERS, 0x100)}
_NEWLINE = "\u010a"  # in that alphabet


class Detokenizer:
    """The text of one answer. shown: control tokens that are part of the text."""

    def __init__(self, tokenizer: Any, shown: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        # The vocabulary holds the plain text of added tokens.
        self._added = {int(token): str(word) for token, word in tokenizer.added_tokens_decoder.items()}
        self._shown = {token for token, word in self._added.items() if word in shown}
        self._ids: list[int] = []
        self._begin = 0  # first token of the decoded window
        self._emitted = 0  # number of tokens whose text was emitted
        self._first = True

    def add(self, token: int) -> str:
        """The text that this token makes certain: no later token changes it."""
        self._ids.append(token)
        text = self.finish()
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._emitted < _LONGEST_WAIT:
            return ""
        # Decoded together with the word before: some tokenizers drop a space at the start of a text.
        self._begin = self._emitted
        self._emitted = len(self._ids)
        return text

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        before = self._decode(self._begin, self._emitted)
        return self._decode(self._begin)[len(before) :]

    def spelled(self, token: Token) -> Token:
        """The next token to be added, it and its alternatives with text and bytes."""
        top = tuple(alternative._replace(**self._spelling(alternative.id)) for alternative in token.top)
        spelled = token._replace(top=top, **self._spelling(token.id))
        self._first = self._first and not self.raw(token.id)
        return spelled

    def _spelling(self, token: int) -> dict[str, Any]:
        """Text and bytes that it adds to the answer; a control token adds none and is shown by its name."""
        raw = self.raw(token, first=self._first)
        text = raw.decode("utf-8", "replace") or str(self._tokenizer.decode([token]))
        return {"text": text, "raw": raw}

    def raw(self, token: int, *, first: bool = False) -> bytes:
        """The bytes that a token adds to a text; they may be part of a character. Control tokens add none.

        first: the text begins with it; some tokenizers drop a space there.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._added:  # None: an id of the model that its tokenizer lacks
            return self._bytes([token])
        if self._is_of_bytes and _ALPHABET.keys() >= set(piece):
            return bytes(_ALPHABET[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) and self._bytes([token]) != piece.encode():
            return bytes.fromhex(byte[1])
        before = [] if first else list(self._tokenizer.encode("a", add_special_tokens=False))  # any word
        return self._bytes([*before, token])[len(self._bytes(before)) :]

    @cached_property
    def _is_of_bytes(self) -> bool:
        """Whether the vocabulary is written in GPT-2's byte alphabet."""
        newline = self._tokenizer.convert_tokens_to_ids(_NEWLINE)
        return newline is not None and self._bytes([newline]) == b"\n"

    def _bytes(self, ids: list[int]) -> bytes:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).encode("utf-8", "replace")

    def _decode(self, start: int, stop: int | None = None) -> str:
        decode = self._tokenizer.decode
        runs = groupby(self._ids[start:stop], self._shown.__contains__)
        return "".join(str(decode(list(run), skip_special_tokens=not shown)) for shown, run in runs)


class StopText:
    """A stop text, with what a search needs to go on after a mismatch (Knuth, Morris and Pratt, 1977).

    Attributes:
        text: the stop text, not empty.
        shorter: for each length of a match that the next character breaks, the length of the next shorter one that
            may go on; -1: none may.

    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.shorter = [-1]
        border = 0  # the longest beginning of `text[:place]` at whose end it stands again
        for place in range(1, len(text)):
            goes_on = text[place] == text[border]
            self.shorter.append(self.shorter[border] if goes_on else border)
            while border >= 0 and text[place] != text[border]:
                border = self.shorter[border]
            border += 1


class PartialMatch:
    """How much of one stop text stands at the end of an answer. Its work grows with the new text alone."""

    def __init__(self, stop: StopText) -> None:
        self.stop = stop.text
        self.length = 0  # of the match
        self._shorter = stop.shorter

    def add(self, text: str) -> int | None:
        """Follow the answer's next characters; how many of them complete the stop text, or None if it is not complete."""
        stop = self.stop
        length = self.length
        place = 0
        while place < len(text):
            if not length:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            if stop[length] == text[place]:
                step = _common(stop, length, text, place)
                length += step
                place += step
                if length == len(stop):
                    return place
            else:
                length = self._shorter[length]
                if length < 0:
                    length = 0
                    place += 1
        self.length = length
        return None


def _common(stop: str, length: int, text: str, place: int) -> int:
    """How many characters are equal from these places on; at least one is."""
    most = min(len(stop) - length, len(text) - place)
    if stop.startswith(text[place : place + most], length):  # a comparison in C
        return most
    step = 1
    while stop[length + step] == text[place + step]:
        step += 1
    return step


class StopSearch:
    """Ends an answer in front of the stop text that is complete first. found: that text, once it has come.

    Text that may be the beginning of one is held back until it is decided.
    """

    def __init__(self, stops: Sequence[StopText]) -> None:
        self._matches = list(map(PartialMatch, stops))
        self._held = ""
        self.found = ""

    def add(self, text: str) -> str:
        """All of the held and new text that cannot be the beginning of a stop text."""
        if self.found:
            return ""
        whole = self._held + text
        ends = [(end, -len(match.stop)) for match in self._matches if (end := match.add(text)) is not None]
        if ends:
            end, length = min(ends)
            end += len(self._held)
            self._held = ""
            self.found = whole[end + length : end]
            return whole[: end + length]
        certain = len(whole) - max((match.length for match in self._matches), default=0)
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """What was held back, when nothing follows."""
        return self._held
