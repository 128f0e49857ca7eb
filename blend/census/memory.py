"""What a census remembers of earlier requests, within a budget: their texts, the requests, and a prefix cache's blocks."""

from __future__ import annotations

import secrets
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.serve.token_index import Ids, TokenIndex

BLOCK = 16  # tokens of a block, as in vLLM
BLOCK_BYTES = 150  # of a block's hash in memory
_MOST_REQUESTS = 10_000
_TOKEN_BYTES = 12  # ids and hashes, with room to grow
_TEXT_BYTES = 500  # of a text's places in tables
_PART_BYTES = 16  # of a text's places in the lists of a request
_REQUESTS_SHARE = 0.2  # of the budget, at most, for the lists of requests
_AFTER_EVICTION = 0.85  # of the budget: texts are evicted together


class PromptText(NamedTuple):
    """A text of a prompt with its token ids. is_known: an earlier request held the same text."""

    role: str
    text: str
    ids: Ids
    is_known: bool


@dataclass(slots=True)
class KnownText:
    """A text that an earlier request held. last: the number of the latest one."""

    text: str
    last: int


class Earlier(NamedTuple):
    """An earlier request. texts: of its prompt, then of its answer. seconds: when it was sent, None if unknown."""

    number: int
    source: str
    roles: Sequence[str]
    texts: Sequence[str]
    seconds: float | None = None


class TextMemory:
    """Texts of earlier requests and the requests themselves, least recently used evicted first.

    budget: bytes. index: finds runs of these texts.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.evicted = 0
        self.index: TokenIndex[str] = TokenIndex()
        self._texts: OrderedDict[str, KnownText] = OrderedDict()
        self._requests: OrderedDict[int, Earlier] = OrderedDict()
        self._requests_bytes = 0

    def known(self, text: str) -> KnownText | None:
        """A text that an earlier request held, or None."""
        return self._texts.get(text)

    def request(self, number: int | None) -> Earlier | None:
        """An earlier request, or None if it is forgotten."""
        return None if number is None else self._requests.get(number)

    def add(self, request: Earlier, new: Mapping[str, Ids]) -> None:
        """Remember a request. new: the token ids of those of its texts that are unknown."""
        for text in request.texts:
            if text not in self._texts:
                self._texts[text] = KnownText(text, request.number)
                self.nbytes += _bytes_of(text, len(new[text]))
            self._texts[text].last = request.number
            self._texts.move_to_end(text)
        self.index.update((), new)
        self._requests[request.number] = request
        self._requests_bytes += _PART_BYTES * len(request.texts)
        while len(self._requests) > _MOST_REQUESTS or self._requests_bytes > _REQUESTS_SHARE * self.budget:
            self._forget_request()
        if self.nbytes > self.budget:
            self._evict()

    def _forget_request(self) -> None:
        _, request = self._requests.popitem(last=False)
        self._requests_bytes -= _PART_BYTES * len(request.texts)

    def _evict(self) -> None:
        """Forget the texts that were used longest ago, and all requests up to the last one that held them."""
        texts = list[str]()
        last = -1
        while self._texts and self.nbytes > _AFTER_EVICTION * self.budget:
            text, entry = self._texts.popitem(last=False)
            self.nbytes -= _bytes_of(text, len(self.index.tokens(text)))
            last = entry.last
            texts.append(text)
        self.index.update(texts, {})
        self.evicted += len(texts)
        while self._requests and next(iter(self._requests)) <= last:
            self._forget_request()


def _bytes_of(text: str, tokens: int) -> int:
    return sys.getsizeof(text) + _TOKEN_BYTES * tokens + _TEXT_BYTES


_HASHED = 4096 * BLOCK  # tokens at a time
_POWERS = np.cumprod(np.full(_HASHED, np.uint64(secrets.randbits(64) | 1)))


def prefix_hashes(ids: Ids) -> list[int]:
    """A hash for each whole block of a prompt, of all tokens up to its end: polynomials of the ids modulo 2^64."""
    hashes = list[int]()
    total: NDArray[np.uint64] = np.zeros(1, np.uint64)
    power: NDArray[np.uint64] = np.ones(1, np.uint64)
    for start in range(0, len(ids), _HASHED):
        part = ids[start : start + _HASHED].astype(np.uint64)
        terms = (part + np.uint64(1)) * _POWERS[: len(part)] * power
        terms[:1] += total
        sums = np.cumsum(terms, dtype=np.uint64)
        hashes.extend(sums[BLOCK - 1 :: BLOCK].tolist())
        total = sums[-1:]
        power *= _POWERS[-1]
    return hashes


class ExactPrefixes:
    """A prefix cache of so many tokens in blocks, least recently used evicted first, as vLLM's."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._most = max(1, tokens // BLOCK)
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def find(self, hashes: Sequence[int]) -> tuple[int, int | None]:
        """How many of a prompt's first tokens are cached, and the latest request that held them."""
        blocks = 0
        number = None
        for prefix in hashes:
            if prefix not in self._blocks:
                break
            number = self._blocks[prefix]
            blocks += 1
        return blocks * BLOCK, number

    def use(self, hashes: Sequence[int], number: int) -> None:
        """Cache a prompt's blocks. The last block leaves first."""
        for prefix in reversed(hashes):
            self._blocks[prefix] = number
            self._blocks.move_to_end(prefix)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
