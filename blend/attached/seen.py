"""Text of prompts that came once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from blend.layout import Tokens
from blend.serve.token_index import LEAST_PIECE, TokenIndex, digest_of, longest_first

MOST_SEEN = 4096  # pieces of text


class SeenTexts:
    """Pieces of text that prompts brought once, the latest ones."""

    def __init__(self) -> None:
        self._index: TokenIndex[bytes] = TokenIndex()
        self._order = OrderedDict[bytes, None]()

    def add(self, pieces: Iterable[Tokens]) -> None:
        """Remember these."""
        new = {digest_of(piece): piece for piece in pieces}
        self._order |= dict.fromkeys(new)
        excess = max(0, len(self._order) - MOST_SEEN)
        oldest = [self._order.popitem(last=False)[0] for _ in range(excess)]
        self._index.update(oldest, {digest: piece for digest, piece in new.items() if digest in self._order})

    def recurring(self, prompts: Sequence[Tokens]) -> Iterator[Tokens]:
        """What of them stands in these prompts."""
        for ids in prompts:
            for run in longest_first(self._index.runs(ids), np.ones(len(ids), np.bool_)):
                if run.length >= LEAST_PIECE:
                    yield ids[run.rows]
