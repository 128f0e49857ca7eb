"""The prefix cache: KV of system prompts, examples and conversations for the next prompt that begins with the same tokens.

It never mixes two kinds of rows. *Exact* rows equal full prefill. A radix tree of token ids holds them (as in SGLang's
RadixAttention, Zheng et al. 2024), and they serve every prompt with the same beginning. *Blended* rows come from a prompt with
chunks out of the store. They serve only their own conversation: a prompt that begins with all of that prompt and its answer.

A model with recurrent layers can go on only where its state was kept: at the end of what `keep` was given.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.model import cpu
from blend.quality import NOTHING_ASKED, Estimate, Quality
from blend.types import ChunkCache, common_length

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache

Tokens = tuple[int, ...]


class CachedPrefix(NamedTuple):
    """KV of a prompt's first rows.

    exact_rows: how many of them, from the first on, equal full prefill. quality: that for which the others were blended.
    estimate: what was expected of them, if a quality was asked and the store has an estimator.
    """

    cache: ChunkCache
    exact_rows: int
    quality: Quality = NOTHING_ASKED
    estimate: Estimate | None = None

    def first(self, rows: int) -> CachedPrefix:
        """Its first rows."""
        return self._replace(cache=self.cache.rows(0, rows), exact_rows=min(rows, self.exact_rows))


class _Conversation(NamedTuple):
    """Names a blended prompt with its answer."""

    owner: str
    ids: Tokens


class _Node:
    """A run of tokens and their KV.

    siblings: the children of its parent, itself among them. carries: whether the model has recurrent layers.
    """

    def __init__(
        self,
        ids: Tokens,
        cache: ChunkCache,
        siblings: dict[int, _Node],
        *,
        carries: bool,
    ) -> None:
        self.ids = ids
        self.cache = cache
        self.siblings = siblings
        self.carries = carries
        self.children: dict[int, _Node] = {}
        siblings[ids[0]] = self

    def serves(self, rows: int) -> bool:
        """Whether a prompt can go on behind its first rows."""
        return not self.carries or (rows == len(self.ids) and bool(self.cache.states))


class PrefixCache:
    """The rows of many owners within `budget` bytes, least recently used evicted first. Threads may share it.

    An owner's rows serve only that owner. nbytes: held now. evictions: nodes and conversations evicted so far.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = self.evictions = 0
        self._lock = threading.Lock()
        self._trees: dict[str, dict[int, _Node]] = {}  # the children of each owner's root
        self._conversations: dict[_Conversation, CachedPrefix] = {}
        # Least recently used first, children before parents.
        self._recent: OrderedDict[_Node | _Conversation, None] = OrderedDict()

    def find(
        self,
        owner: str,
        ids: Tokens,
        quality: Quality | None = NOTHING_ASKED,
    ) -> CachedPrefix | None:
        """The longest cached beginning of a prompt, without its last row; None if there is none.

        quality: rows that this conversation blended must have been asked to be at least as good; None takes exact rows alone.
        """
        with self._lock:
            conversation = self._conversation(owner, ids, quality) if quality is not None else None
            path = self._path(owner, ids[:-1])
            while path and not path[-1][0].serves(path[-1][1]):
                path.pop()
            exact = sum(count for _, count in path)
            if conversation is not None and conversation.cache.tokens > exact:
                return conversation
            if not path:
                return None
            return CachedPrefix(_joined([node.cache.rows(0, count) for node, count in path]), exact)

    def keep(self, owner: str, ids: Sequence[int], cache: BlendedCache) -> None:
        """Add the exact KV of these tokens, the first rows of `cache`, unless it exceeds the budget."""
        tokens = tuple(ids)
        states = cache.states(len(ids))
        if self._too_large(cache, len(tokens)) or states is None:
            return
        with self._lock:
            path = self._path(owner, tokens)
            matched = sum(count for _, count in path)
            if matched == len(tokens):
                self._give_states(*path[-1], states)
                return
            siblings = self._split(*path[-1]).children if path else self._trees.setdefault(owner, {})
            rows = rows_of_prompt(cache, matched, len(tokens))
            node = _Node(tokens[matched:], rows, siblings, carries=bool(states))
            self._recent[node] = None
            self.nbytes += node.cache.nbytes
            self._path(owner, tokens)  # marks the nodes above as used more recently
            self._shrink()

    def keep_conversation(
        self,
        owner: str,
        ids: Sequence[int],
        cache: BlendedCache,
        exact: int,
        quality: Quality = NOTHING_ASKED,
        estimate: Estimate | None = None,
    ) -> None:
        """Add a blended prompt with its answer: KV of all tokens except the last; the first `exact` rows are exact.

        quality, estimate: see `CachedPrefix`.
        """
        computed = len(ids) - 1
        if self._too_large(cache, computed) or cache.states(computed) is None:
            return
        rows = rows_of_prompt(cache, 0, computed)
        key = _Conversation(owner, tuple(ids))
        with self._lock:
            if key in self._conversations:
                self._drop(key)
            self._conversations[key] = CachedPrefix(rows, exact, quality, estimate)
            self._recent[key] = None
            self.nbytes += rows.nbytes
            self._shrink()

    def _too_large(self, cache: BlendedCache, rows: int) -> bool:
        """Whether the rows exceed the whole budget: they would evict all others and then themselves."""
        return rows * _row_bytes(cache) > self.budget

    def _give_states(
        self,
        node: _Node,
        count: int,
        states: tuple[tuple[torch.Tensor, ...], ...],
    ) -> None:
        """Let prompts go on behind the first `count` rows of a node."""
        if states and not node.serves(count):
            upper = self._split(node, count)
            upper.cache = replace(upper.cache, states=states)
            self.nbytes += sum(part.nbytes for layer in states for part in layer)
            self._shrink()

    def _conversation(self, owner: str, ids: Tokens, quality: Quality) -> CachedPrefix | None:
        lengths = {len(key.ids) for key in self._conversations if key.owner == owner}
        for length in sorted(lengths, reverse=True):
            key = _Conversation(owner, ids[:length])
            prefix = self._conversations.get(key) if length < len(ids) else None
            if prefix is not None and prefix.quality.includes(quality):
                self._recent.move_to_end(key)
                return prefix
        return None

    def _path(self, owner: str, ids: Tokens) -> list[tuple[_Node, int]]:
        """The nodes with the longest beginning of `ids`, each with its number of matching rows; marks them as used."""
        children = self._trees.get(owner, {})
        path = list[tuple[_Node, int]]()
        at = 0
        while at < len(ids) and (node := children.get(ids[at])) is not None:
            count = common_length(node.ids, ids[at:])
            path.append((node, count))
            at += count
            children = node.children if count == len(node.ids) else {}
        for node, _ in reversed(path):
            self._recent.move_to_end(node)
        return path

    def _split(self, node: _Node, count: int) -> _Node:
        """Split the node after `count` rows; the first part, now its parent."""
        if count == len(node.ids):
            return node
        upper_rows = _cut(node.cache, 0, count)
        upper = _Node(node.ids[:count], upper_rows, node.siblings, carries=node.carries)
        # Copies: views would keep the memory of both alive.
        node.cache = _cut(node.cache, count, len(node.ids))
        node.ids = node.ids[count:]
        node.siblings = upper.children
        node.siblings[node.ids[0]] = node
        self._recent[upper] = None
        return upper

    def _shrink(self) -> None:
        while self.nbytes > self.budget:
            leaves = (entry for entry in self._recent if isinstance(entry, _Conversation) or not entry.children)
            self._drop(next(leaves))
            self.evictions += 1

    def _drop(self, entry: _Node | _Conversation) -> None:
        del self._recent[entry]
        if isinstance(entry, _Conversation):
            self.nbytes -= self._conversations.pop(entry).cache.nbytes
        else:
            del entry.siblings[entry.ids[0]]
            self.nbytes -= entry.cache.nbytes


def _row_bytes(cache: BlendedCache) -> int:
    pairs = (cache.view(index) for index in range(len(cache.layers)))
    return sum(tensor.shape[1] * tensor.shape[3] * tensor.itemsize for pair in pairs for tensor in pair)


def _cut(cache: ChunkCache, start: int, stop: int) -> ChunkCache:
    part = cache.rows(start, stop)
    copies = cpu.copies((*part.keys, *part.values))
    layers = len(part.keys)
    return replace(part, keys=copies[:layers], values=copies[layers:])


def rows_of_prompt(cache: BlendedCache, start: int, stop: int) -> ChunkCache:
    """A copy of rows `start` to `stop - 1`: the cache itself is sized for the longest answer."""
    pairs = [cache.view(index) for index in range(len(cache.layers))]
    keys = tuple(layer_keys[0, :, :stop] for layer_keys, _ in pairs)
    values = tuple(layer_values[0, :, :stop] for _, layer_values in pairs)
    return _cut(ChunkCache(keys, values, 0, states=cache.states(stop) or ()), start, stop)


def _joined(parts: Sequence[ChunkCache]) -> ChunkCache:
    if len(parts) == 1:
        return parts[0]
    all_keys = zip(*(part.keys for part in parts), strict=True)
    all_values = zip(*(part.values for part in parts), strict=True)
    keys = tuple(torch.cat(layer_keys, 1) for layer_keys in all_keys)
    values = tuple(torch.cat(layer_values, 1) for layer_values in all_values)
    return ChunkCache(keys, values, 0, states=parts[-1].states)
