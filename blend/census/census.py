"""Counts the tokens of a log's requests by what earlier requests held, and what each way of reuse would compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.census.causes import CauseName, Causes, Loss, losses
from blend.census.matching import CLASSES, PREFIX, SHIFTED, Classes, Match, match, parts_of
from blend.census.memory import BLOCK, BLOCK_BYTES, Earlier, ExactPrefixes, TextMemory, prefix_hashes
from blend.census.reading import ROLES, LoggedRequest
from blend.census.tokens import Tokenize
from blend.serve.token_index import stretches

RATIOS = (0.05, 0.15)
TURNS = {1: "1", 2: "2", 3: "3", 4: "4", 8: "5-8", 16: "9-16", 32: "17-32", 64: "33-64"}
"""The groups of turns, by the last turn of each."""
LATER_TURNS = "65+"
OTHER_SOURCES = "others"
_BLOCKS_SHARE = 0.3  # of the budget, for the blocks of the prefix cache without a limit
_MOST_LISTED = 10_000  # requests, and sources
# Known tokens at the beginning of a stretch that the server computes: learned text is reused from the beginning of a piece on.
LEAD_OF_STRETCH = 100
LAST_ROWS = 32  # of a prompt, which are always computed


Counts = NDArray[np.int64]


class ListedRequest(NamedTuple):
    """The figures of a request. tokens: of each of `CLASSES`."""

    place: str
    source: str
    turn: int
    tokens: tuple[int, ...]


class Computed(NamedTuple):
    """What prefill computes. rows: tokens. pairs: of a token and an earlier one that it attends to, itself included."""

    rows: float = 0.0
    pairs: float = 0.0


class Census:
    """Counts requests one after another.

    Args:
        tokenize: Counts tokens.
        budget: Bytes of memory for earlier text.
        cache_tokens: Size of the exact prefix cache to compare with.

    Attributes:
        requests: how many.
        by_role: tokens, int64 `[ROLES, CLASSES]`.
        by_turn: tokens, `[CLASSES]`, of each group of turns.
        by_source: the same of each source; of those beyond the first 10,000 together.
        ways: what each way of reuse computes, by its name.
        causes: why exact prefixes miss known text.
        listed: the first requests.

    """

    def __init__(self, tokenize: Tokenize, budget: int, cache_tokens: int) -> None:
        self.requests = 0
        self.by_role: Counts = np.zeros((len(ROLES), len(CLASSES)), np.int64)
        self.by_turn: dict[str, Counts] = {words: _no_tokens() for words in (*TURNS.values(), LATER_TURNS)}
        self.by_source: dict[str, Counts] = defaultdict(_no_tokens)
        self.ways: dict[str, Computed] = defaultdict(Computed)
        self.causes = Causes()
        self.listed: list[ListedRequest] = []
        self._tokenize = tokenize
        block_bytes = round(budget * _BLOCKS_SHARE)
        self.memory = TextMemory(budget - block_bytes)
        self._all_prefixes = ExactPrefixes(block_bytes // BLOCK_BYTES * BLOCK)
        self._caches = [ExactPrefixes(cache_tokens), ExactPrefixes(2 * cache_tokens)]

    def add(self, request: LoggedRequest) -> None:
        """Count a request, and remember it."""
        self.requests += 1
        prompt = list(parts_of(request.segments, self.memory, self._tokenize))
        parts = [*prompt, *parts_of(request.reply, self.memory, self._tokenize)]
        hashes = prefix_hashes(np.concatenate([part.ids for part in parts]))
        prompt_hashes = hashes[: sum(len(part.ids) for part in prompt) // BLOCK]
        prefix, prefix_of = self._all_prefixes.find(prompt_hashes)
        last_holder = self.memory.request(prefix_of)
        compared = match(prompt, request.source, self.memory, prefix, prefix_of)
        hits = [cache.find(prompt_hashes)[0] for cache in self._caches]
        self._count(request, compared)
        self._count_ways(compared, hits)
        self._count_causes(request, compared, hits[0], last_holder)
        for cache in (self._all_prefixes, *self._caches):
            cache.use(hashes, self.requests)
        roles = [part.role for part in parts]
        texts = [part.text for part in parts]
        new = {part.text: part.ids for part in parts if not part.is_known}
        self.memory.add(Earlier(self.requests, request.source, roles, texts, request.seconds), new)

    def _count(self, request: LoggedRequest, compared: Match) -> None:
        table = np.zeros_like(self.by_role)
        for part, (start, stop) in zip(compared.parts, pairwise(compared.starts), strict=True):
            table[ROLES.index(part.role)] += np.bincount(compared.classes[start:stop], minlength=len(CLASSES))
        self.by_role += table
        tokens = table.sum(axis=0)
        self.by_turn[turn_words(request.turn)] += tokens
        is_listed = request.source in self.by_source or len(self.by_source) < _MOST_LISTED
        self.by_source[request.source if is_listed else OTHER_SOURCES] += tokens
        if len(self.listed) < _MOST_LISTED:
            self.listed.append(ListedRequest(request.place, request.source, request.turn, tuple(tokens.tolist())))

    def _count_ways(self, compared: Match, hits: Sequence[int]) -> None:
        small, large = self._caches
        hit = min(hits[0], compared.tokens - 1)
        blended = blendable(compared.classes, hit)
        exact = f"exact prefixes, {small.tokens:,} tokens"
        ways = {"no cache": _behind(compared.tokens, 0)}
        ways[exact] = _behind(compared.tokens, hit)
        for ratio in RATIOS:
            ways[f"{exact}, and blending at {ratio:.0%}"] = _blended(compared.tokens, hit, blended, ratio)
        ways[f"exact prefixes, {large.tokens:,} tokens"] = _behind(compared.tokens, hits[1])
        ways["exact prefixes, no limit"] = _behind(compared.tokens, compared.prefix)
        for name, computed in ways.items():
            total = self.ways[name]
            self.ways[name] = Computed(total.rows + computed.rows, total.pairs + computed.pairs)

    def _count_causes(self, request: LoggedRequest, compared: Match, hit: int, earlier: Earlier | None) -> None:
        for loss in losses(compared):
            self.causes.add(loss, request.place)
        evicted = compared.prefix - hit
        if evicted >= 2 * BLOCK:
            words = f"used again {self.requests - earlier.number:,} requests later" if earlier is not None else ""
            if earlier is not None and earlier.seconds is not None and request.seconds is not None:
                words += f", after {request.seconds - earlier.seconds:,.0f} s"
            self.causes.add(Loss(CauseName("evicted", "user"), evicted, "", words), request.place)


def turn_words(turn: int) -> str:
    """The group that a turn belongs to."""
    return next((words for last, words in TURNS.items() if turn <= last), LATER_TURNS)


def _no_tokens() -> Counts:
    return np.zeros(len(CLASSES), np.int64)


def blendable(classes: Classes, hit: int) -> int:
    """Tokens behind the first `hit` whose KV blending can reuse: known stretches without their leads."""
    is_known = (classes == PREFIX) | (classes == SHIFTED)
    is_known[:hit] = False
    is_known[len(classes) - LAST_ROWS :] = False
    if not is_known.any():
        return 0
    lengths = [stop - start for start, stop in stretches(is_known)]
    return sum(max(0, length - LEAD_OF_STRETCH) for length in lengths)


def _behind(tokens: int, prefix: int) -> Computed:
    """A prompt's rows behind a cached prefix; the last one is always computed."""
    first = min(prefix, tokens - 1)
    of_all = tokens * (tokens + 1) / 2
    of_prefix = first * (first + 1) / 2
    return Computed(tokens - first, of_all - of_prefix)


def _blended(tokens: int, hit: int, blended: int, ratio: float) -> Computed:
    """The same, without the rows that blending takes from caches. They lie anywhere behind the prefix."""
    computed = _behind(tokens, hit)
    spared = blended * (1 - ratio)
    mean_place = (hit + tokens) / 2
    return Computed(computed.rows - spared, computed.pairs - spared * mean_place)
