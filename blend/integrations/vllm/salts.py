"""Salts for vLLM's prefix cache: which prompts share blended blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from blend.integrations.vllm.contract import LayoutTicket

MOST_PROMPTS = 4096  # that are remembered


@dataclass
class _Earlier:
    """A prompt that came before. next_turn: the name of the first prompt that went on with it."""

    rows: int
    salt: str
    next_turn: str = ""


class ConversationSalts:
    """Gives the turns of a conversation one salt, so that a turn finds the blocks of those before it.

    A prompt goes on with an earlier one if it begins with all of its tokens. Rows are chosen for a question, so a prompt with
    another question gets another salt, also where two prompts go on with the same one. Threads may share it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._earlier: OrderedDict[str, _Earlier] = OrderedDict()
        self._rows: Counter[int] = Counter()

    def salt(self, ticket: LayoutTicket, generation: str) -> str:
        """The salt of a prompt. generation: of the store; another one is another salt."""
        setting = repr((generation, ticket.corpus, ticket.quality, ticket.user))
        with self._lock:
            names = dict(_beginnings(setting, ticket.layout.token_ids, sorted(self._rows)))
            rows = ticket.layout.rows
            known = [name for name in names.values() if name in self._earlier]
            longest = self._earlier[known[-1]] if known else None
            name = names.get(rows) or _name(setting, ticket.layout.token_ids)
            if longest is not None and longest.rows == rows:
                self._earlier.move_to_end(name)
                return longest.salt
            salt = sha256(f"rows {ticket.ticket()} {name}".encode()).hexdigest()
            if longest is not None and not longest.next_turn:
                longest.next_turn = name
                salt = longest.salt
            self._remember(name, _Earlier(rows, salt))
        return salt

    def _remember(self, name: str, prompt: _Earlier) -> None:
        self._earlier[name] = prompt
        self._rows[prompt.rows] += 1
        if len(self._earlier) > MOST_PROMPTS:
            _, oldest = self._earlier.popitem(last=False)
            self._rows[oldest.rows] -= 1
            if not self._rows[oldest.rows]:
                del self._rows[oldest.rows]


def _beginnings(setting: str, ids: tuple[int, ...], rows: list[int]) -> Iterator[tuple[int, str]]:
    """Numbers of rows, ascending and up to the whole prompt, and the name of a prompt of so many of its first tokens."""
    digest = sha256(setting.encode())
    tokens = np.asarray(ids, np.int64)
    start = 0
    for count in rows:
        if count > len(ids):
            return
        digest.update(tokens[start:count].tobytes())
        start = count
        yield count, digest.copy().hexdigest()


def _name(setting: str, ids: tuple[int, ...]) -> str:
    [(_, name)] = _beginnings(setting, ids, [len(ids)])
    return name
