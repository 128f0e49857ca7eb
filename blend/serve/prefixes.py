"""The prefix cache: KV of system prompts, examples and conversations for the next prompt that begins with the same tokens.

It never mixes two kinds of rows. *Exact* rows equal full prefill. A radix tree of token ids holds them (as in SGLang's
RadixAttention, Zheng et al. 2024), and they serve every prompt with the same beginning. *Blended* rows come from a prompt with
chunks out of the store. They serve only their own conversation: a prompt that begins with all of that prompt and its answer.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.model import cpu
from blend.types import ChunkCache, common_length

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache

Tokens = tuple[int, ...]


class Found(NamedTuple):
    """KV of a prompt's first rows. exact_rows: how many of them, from the first on, equal full prefill."""

    known: ChunkCache
    exact_rows: int

    def first(self, rows: int) -> Found:
        """Its first rows."""
        return Found(self.known.rows(0, rows), min(rows, self.exact_rows))


class PrefixCache:
    """The rows of many owners within `budget` bytes, least recently used evicted first. Threads may share it.

    An owner's rows serve only that owner. evictions: nodes and conversations evicted so far.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._trees: dict[str, _Node] = {}
        self._nodes: OrderedDict[_Node, None] = OrderedDict()  # the least recently used first, children before parents
        self._conversations: OrderedDict[tuple[str, bytes], _Conversation] = OrderedDict()
        self._nbytes = self.evictions = 0
        self._clock = itertools.count()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._nbytes

    def find(self, owner: str, ids: Tokens, *, blended: bool = True) -> Found | None:
        """The longest cached beginning of a prompt, without its last row; None if there is none.

        blended: also return rows that this conversation blended.
        """
        with self._lock:
            conversation = self._conversation(owner, ids) if blended else None
            path = self._path(owner, ids[:-1])
            exact = sum(count for _, count in path)
            if conversation is not None and conversation.known.tokens > exact:
                return Found(conversation.known, conversation.exact_rows)
            return Found(_joined([node.kv(count) for node, count in path]), exact) if exact else None

    def keep(self, owner: str, ids: Sequence[int], cache: BlendedCache) -> None:
        """Add the exact KV of these tokens, the first rows of `cache`, unless it exceeds the budget."""
        tokens = tuple(ids)
        if self._too_large(cache, len(tokens)):
            return
        with self._lock:
            path = self._path(owner, tokens)
            done = sum(count for _, count in path)
            if done == len(tokens):
                return
            parent = self._split(*path[-1]) if path else self._trees.setdefault(owner, _Node((), None))
            node = _Node(tokens[done:], parent)
            node.cache = _rows(cache, done, len(tokens))
            parent.children[tokens[done]] = node
            self._nodes[node] = None
            self._nbytes += node.cache.nbytes
            self._path(owner, tokens)  # marks the nodes above as used more recently
            self._shrink()

    def keep_conversation(self, owner: str, ids: Sequence[int], cache: BlendedCache, exact: int) -> None:
        """Add a blended prompt with its answer: KV of all tokens except the last; the first `exact` rows are exact."""
        if self._too_large(cache, len(ids) - 1):
            return
        known = _rows(cache, 0, len(ids) - 1)
        with self._lock:
            key = owner, _digest(ids)
            self._nbytes += known.nbytes - self._drop(key)
            self._conversations[key] = _Conversation(known, exact, len(ids), next(self._clock))
            self._shrink()

    def _too_large(self, cache: BlendedCache, rows: int) -> bool:
        """Whether the rows exceed the whole budget: they would evict all others and then themselves."""
        return rows * _row_bytes(cache) > self.budget

    def forget(self, owner: str) -> None:
        """Remove all rows of this owner."""
        with self._lock:
            for key in [key for key in self._conversations if key[0] == owner]:
                self._nbytes -= self._drop(key)
            root = self._trees.pop(owner, None)
            for node in root.below() if root else ():
                if node.cache is not None:
                    del self._nodes[node]
                    self._nbytes -= node.cache.nbytes

    def _conversation(self, owner: str, ids: Tokens) -> _Conversation | None:
        lengths = sorted(
            {one.length for (whose, _), one in self._conversations.items() if whose == owner}, reverse=True
        )
        for length in lengths:
            key = owner, _digest(ids[:length])
            if length < len(ids) and key in self._conversations:
                self._conversations.move_to_end(key)
                found = self._conversations[key] = self._conversations[key]._replace(used=next(self._clock))
                return found
        return None

    def _drop(self, key: tuple[str, bytes]) -> int:
        gone = self._conversations.pop(key, None)
        return gone.known.nbytes if gone else 0

    def _path(self, owner: str, ids: Tokens) -> list[tuple[_Node, int]]:
        """The nodes with the longest beginning of `ids`, each with its number of matching rows; marks them as used."""
        node, path, at = self._trees.get(owner), list[tuple[_Node, int]](), 0
        while node is not None and at < len(ids):
            node = node.children.get(ids[at])
            if node is not None:
                count = common_length(node.ids, ids[at:])
                path.append((node, count))
                at += count
                if count < len(node.ids):
                    break
        now = next(self._clock)
        for used, _ in reversed(path):
            used.used = now
            self._nodes.move_to_end(used)
        return path

    def _split(self, node: _Node, count: int) -> _Node:
        """Split the node after `count` rows; the first part, now its parent."""
        if count == len(node.ids):
            return node
        assert node.cache is not None
        assert node.parent is not None
        upper = _Node(node.ids[:count], node.parent)
        # Copies: views would keep the memory of both alive.
        upper.cache, node.cache = _cut(node.cache, 0, count), _cut(node.cache, count, len(node.ids))
        node.parent.children[upper.ids[0]] = upper
        node.ids, node.parent = node.ids[count:], upper
        upper.children[node.ids[0]] = node
        self._nodes[upper] = None
        return upper

    def _shrink(self) -> None:
        while self._nbytes > self.budget:
            leaf = next((node for node in self._nodes if not node.children), None)
            key = next(iter(self._conversations), None)
            if key is not None and (leaf is None or self._conversations[key].used < leaf.used):
                self._nbytes -= self._drop(key)
            elif leaf is not None and leaf.parent is not None and leaf.cache is not None:
                del self._nodes[leaf], leaf.parent.children[leaf.ids[0]]
                self._nbytes -= leaf.cache.nbytes
            else:
                return
            self.evictions += 1


class _Conversation(NamedTuple):
    known: ChunkCache
    exact_rows: int
    length: int
    used: int


class _Node:
    """A run of tokens and their KV; the root has none."""

    def __init__(self, ids: Tokens, parent: _Node | None) -> None:
        self.ids, self.parent = ids, parent
        self.cache: ChunkCache | None = None
        self.used = 0
        self.children: dict[int, _Node] = {}

    def kv(self, count: int) -> ChunkCache:
        """Views of its first rows."""
        assert self.cache is not None
        return self.cache.rows(0, count)

    def below(self) -> Iterator[_Node]:
        """Itself and all its descendants."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(",".join(map(str, ids)).encode(), digest_size=16).digest()


def _row_bytes(cache: BlendedCache) -> int:
    pairs = (cache.view(index) for index in range(len(cache.layers)))
    return sum(one.shape[1] * one.shape[3] * one.itemsize for pair in pairs for one in pair)


def _cut(cache: ChunkCache, start: int, stop: int) -> ChunkCache:
    part = cache.rows(start, stop)
    copies = cpu.copies((*part.keys, *part.values))
    return ChunkCache(copies[: len(part.keys)], copies[len(part.keys) :], part.start)


def _rows(cache: BlendedCache, start: int, stop: int) -> ChunkCache:
    """Copied: the cache itself is sized for the longest answer."""
    pairs = [cache.view(index) for index in range(len(cache.layers))]
    return _cut(ChunkCache(tuple(k[0] for k, _ in pairs), tuple(v[0] for _, v in pairs), 0), start, stop)


def _joined(parts: Sequence[ChunkCache]) -> ChunkCache:
    if len(parts) == 1:
        return parts[0]
    keys = tuple(torch.cat(some, 1) for some in zip(*(part.keys for part in parts), strict=True))
    values = tuple(torch.cat(some, 1) for some in zip(*(part.values for part in parts), strict=True))
    return ChunkCache(keys, values, 0)
