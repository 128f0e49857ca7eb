"""Tokens of a vocabulary as the bytes that they add to a text, which may be part of a character."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

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
