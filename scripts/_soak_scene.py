"""What a step of a soak of stores plays in: one of the machines, what may lie in the bucket, what is wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from _soak_ledger import Content, Ledger
from _soak_machines import KEYS, Machine, entry
from blend.store import ChunkStore
from blend.store.seal import make_seal, pack_artifact

MOST = 1 << 20


class Wrong(Exception):  # noqa: N818 - a finding, not an error of the run
    """Something that must not happen."""


class Scene(NamedTuple):
    """What a step plays in.

    witness: a machine that nothing is wrong with. well: nothing is wrong with the bucket, and it is not left alone.
    lists_truly: nor do its listings lie. unpublished: machines whose own index is one that could not be published: they go on
    with it.
    """

    machine: Machine
    witness: ChunkStore
    ledger: Ledger
    draws: random.Random
    counts: Counter[str]
    secret: bytes | None
    well: bool
    lists_truly: bool
    unpublished: set[Path]

    @property
    def store(self) -> ChunkStore:
        """Of the machine."""
        return self.machine.store

    def entry(self) -> tuple[int, str, bytes]:
        """Any: its number, its name, its bytes."""
        number = self.draws.randrange(KEYS)
        return (number, *entry(number, self.secret))

    def sealed(self, name: str, content: bytes) -> bytes:
        """As an artifact or a manifest is stored."""
        return b"".join(pack_artifact(name, content, make_seal(self.secret)))

    def anything(self) -> bytes:
        """Content that is like no other."""
        return f"{self.draws.getrandbits(64):x}".encode()

    def require_known(self, name: str, content: Content) -> None:
        """That it is what the name holds; while the bucket is not well, what it once held."""
        if content not in (self.ledger.may(name) if self.well else self.ledger.may(name) | self.ledger.ever(name)):
            raise Wrong(f"{name} was read as something that it does not hold")


class Step(NamedTuple):
    """exchanges: with the far place, one after another, at most. weight: how often it is drawn."""

    do: Callable[[Scene], None]
    exchanges: int
    weight: int = 1
