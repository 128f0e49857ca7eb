"""The prefix cache: KV of system prompts, examples and conversations for the next prompt that begins with the same tokens.

It never mixes two kinds of rows. *Exact* rows equal full prefill. A radix tree of token ids holds them (as in SGLang's
RadixAttention, Zheng et al. 2024), and they serve every prompt with the same beginning. *Blended* rows come from a prompt with
chunks out of the store. They serve only their own conversation: a prompt that begins with all of that prompt and goes on,
behind as much of its answer as it repeats. Clients write calls of tools anew and leave thoughts out, so that may be none.
What a prefill that was given up has blended serves a prompt that begins with all of that prompt, too, and so the same one.
Where rows of an earlier prompt moved, they have read what that prompt said: they serve its author alone.

A model with recurrent layers can go on only where its state was kept: at the end of what `keep` was given.

Rows know the sessions whose prompts left them, so that the rows of a session can be dropped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blend.layout import common_length
from blend.model import cpu
from blend.quality import NOTHING_ASKED, Estimate, Quality
from blend.serve.request import ANYONE, RequestOrigin
from blend.serve.shares import ACTIVE_S, Holder, Shares
from blend.types import ChunkCache

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache

Tokens = tuple[int, ...]
_MOST_SESSIONS = 16  # of a beginning; rows of more than that stay when these sessions end


class CachedPrefix(NamedTuple):
    """KV of a prompt's first rows.

    exact_rows: how many of them, from the first on, equal full prefill. quality: that for which the others were blended.
    estimate: what was expected of them, if a quality was asked and the store has an estimator. author: see `Conversation`.
    """

    cache: ChunkCache
    exact_rows: int
    quality: Quality = NOTHING_ASKED
    estimate: Estimate | None = None
    author: str = ""

    def first(self, rows: int) -> CachedPrefix:
        """Its first rows."""
        return self._replace(cache=self.cache.rows(0, rows), exact_rows=min(rows, self.exact_rows))


class Conversation(NamedTuple):
    """Names a prompt with an answer.

    author: whose earlier prompts its rows depend on, because some moved; "" if they depend on its tokens alone.
    """

    owner: str
    prompt: Tokens
    answer: Tokens
    author: str = ""

    @property
    def ids(self) -> Tokens:
        """The tokens whose KV was computed: all but the answer's last one."""
        return (*self.prompt, *self.answer[:-1])


@dataclass(eq=False)
class _Entry:
    """Exact rows of a run of tokens, or the rows of a blended prompt with its answer.

    Attributes:
        siblings: where it is found, by `key`.
        rows: what it holds; of the run's tokens alone.
        sessions: whose prompts begin with it, "" for those without one.
        holder: whose prompt left it first.
        children: runs that go on behind it.

    """

    owner: str
    siblings: dict[Any, _Entry]
    key: int | Conversation
    ids: Tokens
    rows: CachedPrefix
    sessions: frozenset[str]
    holder: Holder
    children: dict[int, _Entry] = field(default_factory=dict)

    @property
    def cache(self) -> ChunkCache:
        """Its KV."""
        return self.rows.cache


class PrefixCache:
    """The rows of many owners within `budget` bytes, least recently used evicted first. Threads may share it.

    Rows of clients and end users that exceed their shares leave first (see `Shares`). An owner's rows serve only that owner.
    nbytes: held now. evictions: nodes and conversations evicted so far.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self._clock = clock
        self._sizes = Counter[Holder]()
        self._used_at: dict[Holder, float] = {}
        self.nbytes = self.evictions = 0
        self._lock = threading.Lock()
        self._trees: dict[str, dict[int, _Entry]] = {}  # the children of each owner's root
        self._conversations: dict[Conversation, _Entry] = {}
        self._recent: OrderedDict[_Entry, None] = OrderedDict()  # least recently used first, children before parents
        self._recurrent = False  # whether rows come with states, behind which alone a prompt can go on

    def find(
        self, owner: str, ids: Tokens, quality: Quality | None = NOTHING_ASKED, author: str = ""
    ) -> CachedPrefix | None:
        """The longest cached beginning of a prompt, without its last row; None if there is none.

        quality: rows that this conversation blended must have been asked to be at least as good; None takes exact rows alone.
        author: of the prompt; "" takes no rows that moved.
        """
        with self._lock:
            conversation = self._conversation(owner, ids, quality, author) if quality is not None else None
            path = self._path(owner, ids[:-1])
            while self._recurrent and path and not path[-1][0].cache.rows(0, path[-1][1]).states:
                path.pop()
            exact = sum(count for _, count in path)
            if conversation is not None and conversation.cache.tokens > exact:
                return conversation
            if not path:
                return None
            return CachedPrefix(_joined([node.cache.rows(0, count) for node, count in path]), exact)

    def rows_of(self, conversation: Conversation, start: int, stop: int) -> ChunkCache | None:
        """KV of the tokens `start` to `stop - 1` of a prompt with its answer; None if it is gone."""
        with self._lock:
            blended = self._conversations.get(conversation)
            if blended is not None:
                return blended.cache.rows(start, stop)
            parts = list[ChunkCache]()
            at = 0
            for node, count in self._path(conversation.owner, conversation.ids[:stop]):
                if at + count > start:
                    parts.append(node.cache.rows(max(0, start - at), count))
                at += count
        return replace(_joined(parts), start=start) if at == stop else None

    def keep(self, owner: str, ids: Sequence[int], cache: BlendedCache, origin: RequestOrigin = ANYONE) -> None:
        """Add the exact KV of these tokens, the first rows of `cache`, unless it exceeds the budget. origin: the prompt's."""
        tokens = tuple(ids)
        states = cache.states(len(ids))
        if self._too_large(cache, len(tokens)) or states is None:
            return
        with self._lock:
            if origin.ended():  # under the lock: `forget` comes later, or came before
                return
            self._recurrent = bool(states)
            path = self._path(owner, tokens)
            siblings = self._trees.setdefault(owner, {})
            if path:
                self._split(*path[-1])
                path = self._path(owner, tokens)
                siblings = path[-1][0].children
            for entry, _ in path:
                entry.sessions = _joined_by(entry.sessions, origin.users_session)
            matched = sum(count for _, count in path)
            if matched < len(tokens):
                rows = CachedPrefix(rows_of_prompt(cache, matched, len(tokens)), len(tokens) - matched)
                key = tokens[matched]
                sessions = frozenset([origin.users_session])
                self._add(_Entry(owner, siblings, key, tokens[matched:], rows, sessions, origin.holder))
                self._path(owner, tokens)  # marks the runs above as used more recently
            elif states and not path[-1][0].cache.states:
                last, _ = path[-1]
                last.rows = last.rows._replace(cache=replace(last.cache, states=states))
                self._count(last.holder, sum(part.nbytes for layer in states for part in layer))
            self._shrink(origin.holder)

    def keep_conversation(
        self,
        conversation: Conversation,
        cache: BlendedCache,
        exact: int,
        quality: Quality = NOTHING_ASKED,
        estimate: Estimate | None = None,
        origin: RequestOrigin = ANYONE,
        *,
        rows: int | None = None,
    ) -> None:
        """Add a blended prompt with its answer: KV of all tokens except the last; the first `exact` rows are exact.

        Args:
            conversation: the prompt and its answer.
            cache: holds the rows.
            exact: how many of the first ones are exact.
            quality: see `CachedPrefix`.
            estimate: see `CachedPrefix`.
            origin: the prompt's.
            rows: only the first ones of the prompt, because its prefill was given up; there is no answer then.

        """
        ids = conversation.ids
        computed = len(ids) if rows is None else rows
        if self._too_large(cache, computed) or cache.states(computed) is None:
            return
        computed_rows = rows_of_prompt(cache, 0, computed)
        prefix = CachedPrefix(computed_rows, exact, quality, estimate, conversation.author)
        with self._lock:
            if origin.ended():
                return
            sessions = frozenset[str]()
            if (older := self._conversations.get(conversation)) is not None:
                sessions = older.sessions
                if rows is not None and older.cache.tokens > rows and older.rows.quality.includes(quality):
                    prefix = older.rows  # two were given up, and this one had less
                self._drop(older)
            if (begun := self._conversations.get(conversation._replace(answer=()))) is not None:
                self._drop(begun)  # its rows are among these
            sessions = _joined_by(sessions, origin.users_session)
            owner = conversation.owner
            self._add(_Entry(owner, self._conversations, conversation, ids[:computed], prefix, sessions, origin.holder))
            self._shrink(origin.holder)

    def drop_blended(self, conversation: Conversation) -> None:
        """Drop the rows of a blended prompt and its answer, if they are there; exact rows stay."""
        with self._lock:
            if (entry := self._conversations.get(conversation)) is not None:
                self._drop(entry)

    def forget(self, owner: str, session: str) -> int:
        """Drop the rows that only prompts of this session left; returns their bytes."""
        with self._lock:
            before = self.nbytes
            for entry in [entry for entry in self._recent if entry.owner == owner and session in entry.sessions]:
                entry.sessions -= {session}
                if not (entry.sessions or entry.children):
                    self._drop(entry)
            return before - self.nbytes

    def _too_large(self, cache: BlendedCache, rows: int) -> bool:
        """Whether the rows exceed the whole budget: they would evict all others and then themselves."""
        return rows * _row_bytes(cache) > self.budget

    def _conversation(self, owner: str, ids: Tokens, quality: Quality, author: str) -> CachedPrefix | None:
        longest: CachedPrefix | None = None
        for key, entry in self._conversations.items():
            length = len(key.prompt)
            is_theirs = key.owner == owner and key.author in ("", author)
            # The last row is computed. A prompt that was given up has rows for a part, and may be the same.
            least = min(length, entry.cache.tokens) + 1
            goes_on = is_theirs and least <= len(ids) and ids[:length] == key.prompt
            if not goes_on or not entry.rows.quality.includes(quality):
                continue
            rows = min(entry.cache.tokens, length + common_length(key.answer, ids[length:-1]))
            first = entry.rows.first(rows)
            serves = not entry.cache.states or bool(first.cache.states)
            if serves and (longest is None or rows > longest.cache.tokens):
                longest = first
                used = entry
        if longest is not None:
            self._recent.move_to_end(used)
        return longest

    def _path(self, owner: str, ids: Tokens) -> list[tuple[_Entry, int]]:
        """The runs with the longest beginning of `ids`, each with its number of matching rows; marks them as used."""
        children = self._trees.get(owner, {})
        path = list[tuple[_Entry, int]]()
        at = 0
        while at < len(ids) and (entry := children.get(ids[at])) is not None:
            count = common_length(entry.ids, ids[at:])
            path.append((entry, count))
            at += count
            children = entry.children if count == len(entry.ids) else {}
        for entry, _ in reversed(path):
            self._recent.move_to_end(entry)
        return path

    def _split(self, entry: _Entry, count: int) -> None:
        """Split a run after `count` rows, unless it ends there. The upper part becomes the parent of the other."""
        if count == len(entry.ids):
            return
        upper_rows = entry.rows.first(count)
        lower = _cut(entry.cache, count, len(entry.ids))  # copies: views would keep the memory of both alive
        upper = _Entry(
            entry.owner,
            entry.siblings,
            entry.key,
            entry.ids[:count],
            upper_rows._replace(cache=_cut(upper_rows.cache, 0, count)),
            entry.sessions,
            entry.holder,
        )
        self._drop(entry)
        self._add(upper)
        entry.ids = entry.ids[count:]
        entry.key = entry.ids[0]
        entry.rows = CachedPrefix(lower, len(entry.ids))
        entry.siblings = upper.children
        self._add(entry)

    def _shrink(self, holder: Holder) -> None:
        """Evict until the budget holds: rows of holders that exceed their shares. holder: the one that needs the room."""
        now = self._clock()
        self._used_at[holder] = now
        if self.nbytes <= self.budget and len(self._used_at) <= 2 * len(self._sizes):
            return
        since = now - ACTIVE_S
        self._used_at = {holder: at for holder, at in self._used_at.items() if at > since and holder in self._sizes}
        shares = Shares(self.budget, self._sizes, self._used_at)
        while self.nbytes > self.budget:
            leaves = [entry for entry in self._recent if not entry.children]
            beyond_share = (entry for entry in leaves if shares.exceeded_by(entry.holder))
            entry = next(beyond_share, leaves[0])  # else others' runs go on behind all of theirs
            self._drop(entry)
            shares.remove(entry.holder, entry.cache.nbytes)
            self.evictions += 1

    def _add(self, entry: _Entry) -> None:
        entry.siblings[entry.key] = entry
        self._recent[entry] = None
        self._count(entry.holder, entry.cache.nbytes)

    def _drop(self, entry: _Entry) -> None:
        del self._recent[entry]
        del entry.siblings[entry.key]
        self._count(entry.holder, -entry.cache.nbytes)

    def _count(self, holder: Holder, nbytes: int) -> None:
        self.nbytes += nbytes
        self._sizes[holder] += nbytes
        if not self._sizes[holder]:
            del self._sizes[holder]


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
