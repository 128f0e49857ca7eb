"""Cuts new text into pieces that are learned.

`Cutter` cuts new text at places that depend on the tokens around them alone. A token boundary is a cut if it ranks highest
within `REACH` tokens on both sides: ends of paragraphs before ends of lines, of sentences, and all others; among equals a hash
of the tokens around it decides. So a passage gives the same pieces whatever stands before it, and behind an edit the cuts fall
back into step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blend.layout import Span
from blend.serve.token_index import LEAST_PIECE, Ids, sliding

MOST_PIECE = 512
REACH = 96  # pieces then have about 200 tokens
_AROUND = 4  # tokens on each side of a boundary that its hash depends on
_KINDS = np.uint64(62)  # the upper bits of a rank hold the kind of boundary
_PARAGRAPH = 3
_LINE = 2
_SENTENCE = 1
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Cutter:
    """Cuts token ids.

    tokenizer: says what they spell. control: ids of control tokens, at which messages end. least_rows: shorter pieces would not
    pay, so all pieces get longer by one factor.
    """

    def __init__(self, tokenizer: Any, control: frozenset[int], least_rows: float = 0.0) -> None:
        self._factor = 1  # a power of two: `least_rows` is timed, and must not change the pieces at every start
        while self._factor * REACH < least_rows:
            self._factor *= 2
        self.control = control
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        self._kinds = dict.fromkeys(control, _PARAGRAPH)

    def pieces(self, ids: Sequence[int] | Ids, until: int | None = None) -> list[Span]:
        """The text's pieces, one behind another; the first and the last may be short.

        until: where the text's last question ends, or has begun. The last piece ends there, and begins behind the last
        paragraph or line before it, if there is one.
        """
        text = np.asarray(ids, dtype=np.int32)
        ranks = self._ranks(text)
        reach = self._factor * REACH
        most = self._factor * MOST_PIECE
        framed = np.pad(ranks, reach)
        highest = sliding(np.maximum, framed, 2 * reach + 1)
        cuts = [0]
        for at in np.flatnonzero(ranks == highest).tolist():
            if at - cuts[-1] > reach or not ranks[cuts[-1]]:  # of equal ranks the first one
                cuts.append(at)
        cuts.append(len(text))
        if until is not None and until < len(text):
            cuts = [cut for cut in cuts if cut <= until]
            kinds = ranks[cuts[-1] + 1 : until + 1] >> _KINDS
            if kinds.max(initial=0) >= _LINE:
                cuts.append(until - int(kinds[::-1].argmax()))
            cuts.append(until)
        pieces = list[Span]()
        for start, stop in pairwise(cuts):
            if start < stop:
                pieces += _fitting(ranks, start, stop, most)
        return pieces

    def spelled(self, ids: Ids) -> str:
        """What token ids spell, without the blanks around it."""
        return self._decode(ids.tolist()).strip() if len(ids) else ""

    def _ranks(self, text: Ids) -> NDArray[np.uint64]:
        """The rank of the boundary before each token; 0 before the first."""
        distinct, which = np.unique(text, return_inverse=True)
        kinds = np.array(list(map(self._kind, distinct.tolist())), np.uint64)[which]
        padded = np.pad(text, _AROUND).astype(np.uint64)
        mixed = np.zeros(len(text), np.uint64)
        for offset in range(2 * _AROUND):
            mixed = (mixed ^ padded[offset : offset + len(text)]) * _FACTOR
            mixed ^= mixed >> np.uint64(29)
        ranks = (mixed >> np.uint64(2)) | np.uint64(1)
        ranks[1:] |= kinds[:-1] << _KINDS
        ranks[:1] = 0
        return ranks

    def _kind(self, token: int) -> int:
        """The kind of boundary behind this token."""
        if token not in self._kinds:
            spelled = self._decode([token])
            ends_line = spelled.endswith("\n") or not spelled.strip(" \t\n")
            lines = spelled.count("\n") if ends_line else 0
            if lines:
                self._kinds[token] = min(lines + 1, _PARAGRAPH)
            else:
                self._kinds[token] = _SENTENCE * spelled.rstrip().endswith(_SENTENCE_ENDS)
        return self._kinds[token]


def _fitting(ranks: NDArray[np.uint64], start: int, stop: int, most: int) -> list[Span]:
    """The piece, or its parts: one of more than `most` tokens is cut where a boundary ranks highest."""
    waiting = [Span(start, stop)]
    pieces = list[Span]()
    while waiting:
        start, stop = waiting.pop()
        if stop - start <= most:
            pieces.append(Span(start, stop))
            continue
        inside = slice(start + LEAST_PIECE, stop - LEAST_PIECE)
        at = inside.start + int(ranks[inside].argmax())
        waiting += [Span(at, stop), Span(start, at)]
    return pieces
