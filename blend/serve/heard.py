"""The texts that were learned lately, as token ids in memory: a surrogate context and KV corrections are made of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from blend.chunks.deciding import LARGEST_SHARE

SHARE = LARGEST_SHARE
"""So many times the surrogate context's tokens are enough to choose one of them: only then may it be as long as it is to be."""

Tokens = tuple[int, ...]


class Heard:
    """Of one tenant, each once, the last `most` tokens of them or a little more. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._chunks: OrderedDict[Tokens, None] = OrderedDict()
        self._tokens = 0

    def add(self, chunks: Iterable[Tokens]) -> None:
        """These came with a question."""
        with self._lock:
            for chunk in chunks:
                self._tokens += len(chunk) if chunk not in self._chunks else 0
                self._chunks[chunk] = None
                self._chunks.move_to_end(chunk)
            while self._chunks and self._tokens - len(next(iter(self._chunks))) >= self._most:
                self._tokens -= len(self._chunks.popitem(last=False)[0])

    @property
    def tokens(self) -> int:
        """How many all of them have."""
        return self._tokens

    def latest(self, tokens: int) -> list[Tokens]:
        """The last of them, of no more tokens than this, the latest first."""
        found: list[Tokens] = []
        with self._lock:
            for chunk in reversed(self._chunks):
                tokens -= len(chunk)
                if tokens < 0:
                    break
                found.append(chunk)
        return found
