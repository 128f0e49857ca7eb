"""Tokens of a vocabulary as the bytes that they add to a text, which may be part of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from blend.serve.types import Token, TokenText

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how sentencepiece writes a byte that no piece has
_PLAIN = (
    *range(0x21, 0x7F),
    *range(0xA1, 0xAD),
    *range(0xAE, 0x100),
)  # bytes that GPT-2's alphabet writes as themselves
_OTHERS = (byte for byte in range(0x100) if byte not in _PLAIN)
_ALPHABET = {**{chr(byte): byte for byte in _PLAIN}, **{chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}}
_NEWLINE = "\u010a"  # in that alphabet


class Spelling:
    """Of a HuggingFace tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def raw(self, token: int, *, first: bool = False) -> bytes:
        """What it adds to a text that is decoded without control tokens, which add nothing.

        first: whether the text begins with it; some tokenizers drop a space there.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._added:  # the former of ids that a model has and its tokenizer has not
            return self._decoded([token])
        if self._is_of_bytes and _ALPHABET.keys() >= set(piece):
            return bytes(_ALPHABET[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) and self._decoded([token]) != piece.encode():
            return bytes.fromhex(byte[1])
        before = [] if first else self._before
        return self._decoded([*before, token])[len(self._decoded(before)) :]

    @cached_property
    def _added(self) -> frozenset[int]:
        """Those that are written out in the vocabulary, whatever writing the others are in."""
        return frozenset(map(int, getattr(self._tokenizer, "added_tokens_decoder", ())))

    @cached_property
    def _is_of_bytes(self) -> bool:
        """Whether the vocabulary is written in GPT-2's alphabet, a letter a byte."""
        newline = self._tokenizer.convert_tokens_to_ids(_NEWLINE)
        return newline is not None and self._decoded([newline]) == b"\n"

    @cached_property
    def _before(self) -> list[int]:
        """Any word, for what stands behind one."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))

    def _decoded(self, ids: list[int]) -> bytes:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).encode("utf-8", "replace")


# --- From tokens to text as they come: never half a character, and nothing behind a text that ends the answer.


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
