"""Where in a text one of many given strings of 32 characters may stand: a rolling hash over all of its places at once.

The hash of the characters from every place on takes five passes of numpy over the text, each doubling their number; a table
of flags says which hashes are wanted. The hash only sifts: what it lets through is compared by the caller.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

HEAD = 32  # characters, a power of two
_BLOCK = 1 << 18  # characters hashed at a time, which keeps the arrays small
_FLAGS_PER_HEAD = 32  # one place in so many is let through for nothing when the table is full
_LEAST_BITS = 12

Hashes = NDArray[np.uint64]


class HeadFilter:
    """Flags for strings of `HEAD` characters. Threads may look while one enters more."""

    def __init__(self) -> None:
        # Drawn anew in every process, so that nobody can write a text of which every place is let through.
        self._factor = secrets.randbits(64) | 1
        self._start(())

    def _start(self, heads: Collection[str]) -> None:
        bits = max(_LEAST_BITS, (2 * len(heads) * _FLAGS_PER_HEAD).bit_length())
        self._room, self._entered = (1 << bits) // _FLAGS_PER_HEAD, 0
        flags = np.zeros(1 << bits, dtype=np.bool_)
        self._enter(heads, flags)
        self._flags = flags

    def _enter(self, heads: Collection[str], flags: NDArray[np.bool_]) -> None:
        hashes = self._hashes("".join(heads))[::HEAD]
        flags[_slots(hashes, flags)] = True
        self._entered += len(heads)

    def enter(self, new: Collection[str], wanted: Collection[str]) -> None:
        """Let the strings `new` through from now on. wanted: all that are still of use, for when the table is full."""
        if self._entered + len(new) > self._room:
            self._start(wanted)
        elif new:
            self._enter(new, self._flags)

    def places(self, text: str) -> Iterator[int]:
        """Where one of the strings may start, ascending: every place where one does, and a few others."""
        flags = self._flags
        for start in range(0, len(text) - HEAD + 1, _BLOCK):
            hashes = self._hashes(text[start : start + _BLOCK + HEAD - 1])
            for place in np.flatnonzero(flags[_slots(hashes, flags)]).tolist():
                yield start + place

    def _hashes(self, text: str) -> Hashes:
        """Of the `HEAD` characters from every place on, `[len(text) - HEAD + 1]`: a polynomial modulo 2^64."""
        hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
        factor, width = self._factor, 1
        while width < HEAD:
            hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
            factor, width = factor * factor % (1 << 64), 2 * width
        return hashes


def _slots(hashes: Hashes, flags: NDArray[np.bool_]) -> Hashes:
    """The upper bits, in which all characters have a part."""
    return hashes >> np.uint64(64 - (len(flags).bit_length() - 1))
