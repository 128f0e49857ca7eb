"""One precompute by several processes: what there was to do when the first of them began, who does which part, who is done.

A small artifact of the store says it, the *work order*: which of the corpus's caches were missing, one bit each, and which
shares have finished since. Whoever reads it finds the same forward passes, those that one process alone would run, so the
caches are the same to the last bit whoever computes them, in whatever order, and however often somebody is killed. It goes when
all is done.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ConfigError, EntryDamagedError
from blend.limits import shown

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary, Variant

MOST_SHARES = 10_000
Pass = tuple["Variant", ...]


class Share(NamedTuple):
    """The part `number`, from 1, of `of` parts."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """What is written as 2/4. Raises `ConfigError` for anything else."""
        number, slash, of = text.partition("/")
        if slash and all(part.isascii() and part.isdigit() and len(part) < 6 for part in (number, of)):
            share = cls(int(number), int(of))
            if 1 <= share.number <= share.of <= MOST_SHARES:
                return share
        raise ConfigError(f"{shown(text)} is no share: give its number and how many there are, such as 2/4")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class WorkOrder:
    """What is to be computed, and which shares are done.

    digest: of every cache that the corpus is to have. missing: for each of them, in order, whether it was missing.
    done: shares that have finished, as `Share` writes them.
    """

    digest: str
    missing: tuple[bool, ...]
    done: frozenset[str] = frozenset()

    def lacks(self, of: int) -> tuple[int, ...]:
        """Which of `of` shares have not finished."""
        return tuple(number for number in range(1, of + 1) if str(Share(number, of)) not in self.done)

    def to_bytes(self) -> bytes:
        """As the store keeps it."""
        bits = bytes(map(int, self.missing))
        packed = base64.b85encode(zlib.compress(bits)).decode()
        return json.dumps({"digest": self.digest, "missing": packed, "done": sorted(self.done)}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> WorkOrder:
        """What `to_bytes` made. Raises ValueError for anything else."""
        try:
            read = json.loads(content)
            bits = zlib.decompress(base64.b85decode(read["missing"]))
            return cls(str(read["digest"]), tuple(map(bool, bits)), frozenset(map(str, read["done"])))
        except (KeyError, TypeError, zlib.error, RecursionError) as error:
            raise ValueError(f"it is no work order ({error})") from None


class Work(NamedTuple):
    """What a corpus lacks, and the forward passes that make it. variants: every cache that it is to have."""

    library: ChunkLibrary
    variants: Sequence[Variant]
    order: WorkOrder
    passes: list[Pass]

    @property
    def mostly_new(self) -> bool:
        """Whether more of the corpus's caches were missing than were there."""
        return len(self.variants) > 2 * self.stored

    @property
    def stored(self) -> int:
        """Caches that were there when the first process began."""
        return len(self.variants) - sum(self.order.missing)

    def of(self, share: Share) -> list[Pass]:
        """The passes of one share; all shares have about as many tokens, whoever asks, whenever."""
        loads = [(0, number) for number in range(1, share.of + 1)]
        mine: list[Pass] = []
        for one in sorted(self.passes, key=tokens_of, reverse=True):
            load, number = loads[0]
            heapq.heapreplace(loads, (load + tokens_of(one), number))
            if number == share.number:
                mine.append(one)
        # In their own order: first isolated caches, with which questions can be answered already.
        places = {id(one): place for place, one in enumerate(self.passes)}
        return sorted(mine, key=lambda one: places[id(one)])


def tokens_of(batch: Pass) -> int:
    """Tokens of the chunks of one pass."""
    return sum(len(one.chunk) for one in batch)


def take_up(library: ChunkLibrary, variants: Sequence[Variant]) -> Work:
    """The work order for these caches: the one under way, or a new one out of what the store lacks now.

    Raises `StoreError` when the store cannot be written.
    """
    digest = _digest(library, variants)
    order = _read(library, digest)
    if order is None:
        lacking = set(library.lacking(variants))
        lacking -= library.restored(list(lacking))
        fresh = WorkOrder(digest, tuple(one in lacking for one in variants))
        with library.store.writing():
            order = _read(library, digest)  # another one may have looked, and begun, meanwhile
            if order is None:
                order = fresh
                library.store.write_artifact(_name(library), order.to_bytes())
    missing = [one for one, lacks in zip(variants, order.missing, strict=True) if lacks]
    return Work(library, variants, order, library.passes(missing))


class Finished(NamedTuple):
    """What was found when a share was done.

    under_way: whether the order is still there; where it is not, others have finished the corpus, or changed it. lacks: shares
    that are not done. last: whether this share is the one with whom all are done: exactly one process is told so, and those
    that find all done when they begin, as after a kill of that one.
    """

    under_way: bool
    lacks: tuple[int, ...]
    last: bool


def finish(work: Work, share: Share) -> Finished:
    """Note that a share is done. Raises `StoreError` when the store cannot be written."""
    with work.library.store.writing():
        order = _read(work.library, work.order.digest)
        if order is None:
            return Finished(False, (), False)
        before = order.lacks(share.of)
        order = replace(order, done=order.done | {str(share)})
        work.library.store.write_artifact(_name(work.library), order.to_bytes())
    after, found_done = order.lacks(share.of), not work.order.lacks(share.of)
    return Finished(True, after, not after and (bool(before) or found_done))


def close(library: ChunkLibrary) -> None:
    """All is done: remove the work order, if there is one."""
    library.store.delete_artifact(_name(library))


def _name(library: ChunkLibrary) -> str:
    return library.isolated.identity.work_name


def _read(library: ChunkLibrary, digest: str) -> WorkOrder | None:
    """The order for these caches; one for others, or a damaged one, is out of date and counts for nothing."""
    try:
        content = library.store.read_artifact(_name(library))
        order = None if content is None else WorkOrder.from_bytes(content)
    except (EntryDamagedError, ValueError):
        return None
    return order if order is not None and order.digest == digest else None


def _digest(library: ChunkLibrary, variants: Sequence[Variant]) -> str:
    """Of these caches and of the passes that all of it would take, which are the same in every process or not at all."""
    keys = ",".join(library.key(one).digest for one in variants)
    sizes = ",".join(str(len(one)) for one in library.passes(variants))
    return hashlib.sha256(f"{keys}/{sizes}".encode()).hexdigest()
