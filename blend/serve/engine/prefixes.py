"""The prefix cache: KV of system prompts, examples and conversations for the next prompt that begins with the same tokens.

It never mixes two kinds of rows. *Exact* rows equal full prefill. A radix tree of token ids holds them (as in SGLang's
RadixAttention, Zheng et al. 2024), and they serve every prompt with the same beginning. *Blended* rows come from a prompt with
chunks out of the store. They serve only their own conversation: a prompt that begins with all of that prompt and goes on,
behind as much of its answer as it repeats. Clients write calls of tools anew and leave thoughts out, so that may be none.

A model with recurrent layers can go on only where its state was kept: at the end of what `keep` was given.

Rows know the sessions whose prompts left them, so that the rows of a session can be dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from cachetools import LRUCache

from blend.model import cpu
from blend.quality import NOTHING_ASKED, Estimate, Quality
from blend.types import ChunkCache, common_length

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache

Tokens = tuple[int, ...]
_MOST_TOKENS = 1 << 20  # of the latest prompts that are known
_LATEST = 4  # prompts of an author
_MOST_SESSIONS = 16  # of a beginning; rows of more than that stay when these sessions end


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


class Conversation(NamedTuple):
    """Names a prompt with an answer."""

    owner: str
    prompt: Tokens
    answer: Tokens

    @property
    def ids(self) -> Tokens:
        """The tokens whose KV was computed: all but the answer's last one."""
        return (*self.prompt, *self.answer[:-1])


class _Answered(NamedTuple):
    """The rows of a blended prompt and its answer. sessions: whose prompt it is, "" for those without one."""

    rows: CachedPrefix
    sessions: frozenset[str]


class _Node:
    """A run of tokens and their KV.

    siblings: the children of its parent, itself among them. carries: whether the model has recurrent layers. sessions: whose
    prompts begin with it, "" for those without one.
    """

    def __init__(
        self,
        ids: Tokens,
        cache: ChunkCache,
        siblings: dict[int, _Node],
        sessions: frozenset[str],
        *,
        carries: bool,
    ) -> None:
        self.ids = ids
        self.cache = cache
        self.siblings = siblings
        self.carries = carries
        self.sessions = sessions
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
        self._conversations: dict[Conversation, _Answered] = {}
        self._latest: LRUCache[tuple[str, str], tuple[Conversation, ...]] = LRUCache(_MOST_TOKENS, _tokens_of)
        # Least recently used first, children before parents.
        self._recent: OrderedDict[_Node | Conversation, None] = OrderedDict()

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

    def note(self, owner: str, author: str, prompt: Tokens, answer: Tokens) -> None:
        """Note that an author's prompt with its answer was kept. author: "" for unknown ones."""
        if author:
            with self._lock:
                before = [earlier for earlier in self._latest.get((owner, author), ()) if earlier.prompt != prompt]
                self._latest[owner, author] = (Conversation(owner, prompt, answer), *before[: _LATEST - 1])

    def latest(self, owner: str, author: str) -> tuple[Conversation, ...]:
        """An author's latest prompts, the latest first; their rows may be gone."""
        with self._lock:
            return self._latest.get((owner, author), ())

    def rows_of(self, conversation: Conversation, start: int, stop: int) -> ChunkCache | None:
        """KV of the tokens `start` to `stop - 1` of a prompt with its answer; None if it is gone."""
        with self._lock:
            blended = self._conversations.get(conversation)
            if blended is not None:
                return blended.rows.cache.rows(start, stop)
            parts = list[ChunkCache]()
            at = 0
            for node, count in self._path(conversation.owner, conversation.ids[:stop]):
                if at + count > start:
                    parts.append(node.cache.rows(max(0, start - at), count))
                at += count
        return replace(_joined(parts), start=start) if at == stop else None

    def keep(
        self,
        owner: str,
        ids: Sequence[int],
        cache: BlendedCache,
        session: str = "",
    ) -> None:
        """Add the exact KV of these tokens, the first rows of `cache`, unless it exceeds the budget. session: the prompt's."""
        tokens = tuple(ids)
        states = cache.states(len(ids))
        if self._too_large(cache, len(tokens)) or states is None:
            return
        with self._lock:
            path = self._noted(self._path(owner, tokens), session)
            matched = sum(count for _, count in path)
            if matched == len(tokens):
                self._give_states(*path[-1], states)
                return
            siblings = self._split(*path[-1]).children if path else self._trees.setdefault(owner, {})
            rows = rows_of_prompt(cache, matched, len(tokens))
            node = _Node(tokens[matched:], rows, siblings, frozenset([session]), carries=bool(states))
            self._recent[node] = None
            self.nbytes += node.cache.nbytes
            self._path(owner, tokens)  # marks the nodes above as used more recently
            self._shrink()

    def keep_conversation(
        self,
        owner: str,
        prompt: Tokens,
        answer: Tokens,
        cache: BlendedCache,
        exact: int,
        quality: Quality = NOTHING_ASKED,
        estimate: Estimate | None = None,
        session: str = "",
    ) -> None:
        """Add a blended prompt with its answer: KV of all tokens except the last; the first `exact` rows are exact.

        quality, estimate: see `CachedPrefix`. session: the prompt's.
        """
        computed = len(prompt) + len(answer) - 1
        if self._too_large(cache, computed) or cache.states(computed) is None:
            return
        rows = rows_of_prompt(cache, 0, computed)
        key = Conversation(owner, prompt, answer)
        with self._lock:
            sessions = frozenset[str]()
            if key in self._conversations:
                sessions = self._conversations[key].sessions
                self._drop(key)
            sessions = _joined_by(sessions, session)
            prefix = CachedPrefix(rows, exact, quality, estimate)
            self._conversations[key] = _Answered(prefix, sessions)
            self._recent[key] = None
            self.nbytes += rows.nbytes
            self._shrink()

    def forget(self, owner: str, session: str) -> int:
        """Drop the rows that only prompts of this session left; returns their bytes."""
        with self._lock:
            before = self.nbytes
            self._latest.pop((owner, session), None)
            for key, answered in list(self._conversations.items()):
                if key.owner == owner and session in answered.sessions:
                    sessions = answered.sessions - {session}
                    self._conversations[key] = answered._replace(sessions=sessions)
                    if not sessions:
                        self._drop(key)
            waiting = list(self._trees.get(owner, {}).values())
            nodes = list[_Node]()
            while waiting:
                node = waiting.pop()
                if session in node.sessions:
                    nodes.append(node)
                    waiting += node.children.values()
            for node in reversed(nodes):  # children first
                node.sessions -= {session}
                if not (node.sessions or node.children):
                    self._drop(node)
            return before - self.nbytes

    def _noted(self, path: list[tuple[_Node, int]], session: str) -> list[tuple[_Node, int]]:
        """The same nodes, which this session's prompt begins with, too; of the last one only the part that it has."""
        noted = list[tuple[_Node, int]]()
        for node, count in path:
            if session not in node.sessions:
                node = self._split(node, count)
                node.sessions = _joined_by(node.sessions, session)
            noted.append((node, count))
        return noted

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
        lengths = {len(key.prompt) for key in self._conversations if key.owner == owner}
        beginnings = {length: ids[:length] for length in lengths if length < len(ids)}
        longest: CachedPrefix | None = None
        for key, (prefix, _) in self._conversations.items():
            length = len(key.prompt)
            if key.owner != owner or beginnings.get(length) != key.prompt or not prefix.quality.includes(quality):
                continue
            rows = min(prefix.cache.tokens, length + common_length(key.answer, ids[length:-1]))
            first = prefix.first(rows)
            serves = not prefix.cache.states or bool(first.cache.states)
            if serves and (longest is None or rows > longest.cache.tokens):
                longest = first
                used = key
        if longest is not None:
            self._recent.move_to_end(used)
        return longest

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
        upper = _Node(
            node.ids[:count],
            upper_rows,
            node.siblings,
            node.sessions,
            carries=node.carries,
        )
        # Copies: views would keep the memory of both alive.
        node.cache = _cut(node.cache, count, len(node.ids))
        node.ids = node.ids[count:]
        node.siblings = upper.children
        node.siblings[node.ids[0]] = node
        self._recent[upper] = None
        return upper

    def _shrink(self) -> None:
        while self.nbytes > self.budget:
            leaves = (entry for entry in self._recent if isinstance(entry, Conversation) or not entry.children)
            self._drop(next(leaves))
            self.evictions += 1

    def _drop(self, entry: _Node | Conversation) -> None:
        del self._recent[entry]
        if isinstance(entry, Conversation):
            self.nbytes -= self._conversations.pop(entry).rows.cache.nbytes
        else:
            del entry.siblings[entry.ids[0]]
            self.nbytes -= entry.cache.nbytes


def _tokens_of(prompts: Sequence[Conversation]) -> int:
    return sum(len(conversation.prompt) + len(conversation.answer) for conversation in prompts)


def _joined_by(sessions: frozenset[str], session: str) -> frozenset[str]:
    """The sessions with another one. Of too many, the last ones count as none, which keeps the rows."""
    return sessions | {session if len(sessions) < _MOST_SESSIONS else ""}


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
