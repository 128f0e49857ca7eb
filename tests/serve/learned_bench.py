"""A store of a tiny decoder's caches, and the texts learned into it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from math import inf
from pathlib import Path
from time import time

import torch
from cases import make_layout
from models import decoder

from blend.config import BlendConfig
from blend.layout import Tokens
from blend.prefill.blender import Blender
from blend.serve.prompts.learned import LearnedCaches, Wish
from blend.serve.removed import removed_from
from blend.serve.request import RequestOrigin
from blend.store import open_store
from blend.store.admin import write_sources
from blend.types import CacheKey, CacheKind, ChunkKey

PREFIX = make_layout().prefix
SIZE = 64  # tokens of a text


def text(number: int, size: int = SIZE) -> Tokens:
    return make_layout(chunks=(size,), seed=100 + number).chunks[0]


@cache
def size_of_text() -> int:
    """Bytes of its caches."""
    library = Blender(decoder("llama"), open_store("memory:", codec="native"), BlendConfig("none")).library(PREFIX)
    return sum(map(library.entry_bytes, library.variants([text(0)])))


class Bench:
    """A store of a tiny decoder's caches and the texts learned into it. budget: in texts."""

    def __init__(
        self,
        root: Path,
        budget: float = 1000,
        codec: str = "native",
        clock: Callable[[], float] = time,
        store_budget: int | None = None,
        name: str = "llama",
        **model: torch.dtype,
    ) -> None:
        self.store = open_store(root / "kv", codec=codec, budget_bytes=store_budget)
        blender = Blender(decoder(name, **model), self.store, BlendConfig("none"))
        self.library = blender.library(PREFIX)
        self.learned = LearnedCaches(root / "learned.sqlite", int(budget * size_of_text()), clock)

    def learn(self, *texts: Tokens, user: str = "", session: str = "", client: str = "", begun: float = inf) -> None:
        """As a request does that brought them all, once the server was idle. begun: when it came."""
        admitted = self.learned.admitted(self.library, texts, RequestOrigin(user, session, client))
        for variant, made in self.library.computed(self.library.missing(sorted(admitted))):
            keep = partial(self.library.keep, variant, made)
            removed_from(self.store).unless_removed(self.library.key(variant), begun, keep)

    def use(self, *texts: Tokens) -> None:
        """As a request does that found them."""
        self.learned.admitted(self.library, texts)

    def recur(self, number: int) -> None:
        """As two requests do that bring the same text."""
        self.learn(text(number))
        self.use(text(number))

    def pin(self, *texts: Tokens, user: str = "", session: str = "", client: str = "") -> list[bool]:
        """Which of these texts are pinned for a minute."""
        pinned = self.learned.pin(dict.fromkeys(texts, Wish(60, size_of_text())), RequestOrigin(user, session, client))
        return [text in pinned for text in texts]

    def key(self, text: Tokens) -> ChunkKey:
        return self.library.key(CacheKey(text, CacheKind.ISOLATED))

    def put_in_corpus(self, *texts: Tokens) -> None:
        keys = [self.key(text) for text in texts]
        space = keys[0].namespace
        write_sources(self.store, "", space, {space: {key.digest: "a.txt" for key in keys}})

    def hits(self, *texts: Tokens) -> list[bool]:
        """Which of these texts have their caches in the store."""
        return [not self.library.missing([text]) for text in texts]

    def found(self, ids: Tokens, user: str = "") -> list[tuple[int, int, int]]:
        return sorted((run.start, run.stop, run.first) for run in self.learned.index(user).runs(ids))

    def finds(self, numbers: range, user: str = "") -> list[bool]:
        """Which of these texts the user finds."""
        return [bool(self.found(text(number), user)) for number in numbers]


def change(path: Path, script: str) -> None:
    """Run SQL in the list of texts."""
    with closing(sqlite3.connect(path / "learned.sqlite")) as file:
        file.executescript(script)
