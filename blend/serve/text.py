"""Detokenization: text from tokens as they come, never half a character, nothing behind a stop text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from blend.serve.types import Token

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are not a character yet
_LONGEST_WAIT = 8  # tokens: no character has more than four bytes
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how sentencepiece writes a byte without a piece of its own
# GPT-2's byte alphabet: printable bytes stand for themselves, the others for letters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
_ALPHABET = {**{chr(byte): byte for byte in _PRINTABLE}, **{chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}}
_NEWLINE = "\u010a"  # in that alphabet


class TokenBytes:
    """The bytes that each token of a HuggingFace tokenizer adds to a text; they may be part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def raw(self, token: int, *, first: bool = False) -> bytes:
        """The bytes of a token in a text that is decoded without control tokens, which add nothing.

        first: the text begins with it; some tokenizers drop a space there.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._added:  # None: an id of the model that its tokenizer lacks
            return self._decoded([token])
        if self._is_of_bytes and _ALPHABET.keys() >= set(piece):
            return bytes(_ALPHABET[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) and self._decoded([token]) != piece.encode():
            return bytes.fromhex(byte[1])
        before = [] if first else self._before
        return self._decoded([*before, token])[len(self._decoded(before)) :]

    @cached_property
    def _added(self) -> frozenset[int]:
        """Added tokens: the vocabulary holds their plain text."""
        return frozenset(map(int, getattr(self._tokenizer, "added_tokens_decoder", ())))

    @cached_property
    def _is_of_bytes(self) -> bool:
        """Whether the vocabulary is written in GPT-2's byte alphabet."""
        newline = self._tokenizer.convert_tokens_to_ids(_NEWLINE)
        return newline is not None and self._decoded([newline]) == b"\n"

    @cached_property
    def _before(self) -> list[int]:
        """Any word, to decode a token behind it."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))

    def _decoded(self, ids: list[int]) -> bytes:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).encode("utf-8", "replace")


class CertainText(NamedTuple):
    """Text that no later token changes. stopped: whether a stop text has come."""

    text: str
    stopped: bool


class Detokenizer:
    """The text of one answer. stop: texts that end it and are not part of it.

    Text that may be the beginning of a stop text is held back until the next token decides.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(filter(None, stop))
        self._ids: list[int] = []
        self._begin = self._emitted = 0  # first token of the decoded window; number of tokens whose text was emitted
        self._held = ""
        self._bytes, self._first = TokenBytes(tokenizer), True
        self.stopped = False

    def add(self, token: int) -> CertainText:
        """The text that this token makes certain."""
        self._ids.append(token)
        window, before = self._decode(self._begin), self._decode(self._begin, self._emitted)
        if window.endswith(_INCOMPLETE) and len(self._ids) - self._emitted < _LONGEST_WAIT:
            return CertainText("", self.stopped)
        # Decoded together with the word before: some tokenizers drop a space at the start of a text.
        self._begin, self._emitted = self._emitted, len(self._ids)
        return self._emit(window[len(before) :])

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        rest = self._decode(self._begin)[len(self._decode(self._begin, self._emitted)) :]
        text = "" if self.stopped else self._emit(rest).text + self._held
        self._held, self._emitted = "", len(self._ids)
        return text

    def spelled(self, token: Token) -> Token:
        """The next token to be added, it and its alternatives with text and bytes."""
        top = tuple(one._replace(**self._spelling(one.id)) for one in token.top)
        spelled = token._replace(top=top, **self._spelling(token.id))
        self._first = self._first and not self._bytes.raw(token.id)
        return spelled

    def _spelling(self, token: int) -> dict[str, Any]:
        """Text and bytes that it adds to the answer; a control token adds none and is shown by its name."""
        raw = self._bytes.raw(token, first=self._first)
        return {"text": raw.decode("utf-8", "replace") or str(self._tokenizer.decode([token])), "raw": raw}

    def _decode(self, start: int, stop: int | None = None) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True))

    def _emit(self, text: str) -> CertainText:
        """All of the held and new text that cannot be the beginning of a stop text."""
        if self.stopped:
            return CertainText("", True)
        whole, self._held = self._held + text, ""
        found = min((at for stop in self._stop if (at := whole.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            return CertainText(whole[:found], True)
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n])), default=0)
        self._held = whole[len(whole) - keep :]
        return CertainText(whole[: len(whole) - keep], False)
