"""Faults drawn at random over all tiers of a shared store, and what must hold whatever is wrong.

A machine reads, puts and lists entries through a disk, a Redis and a bucket while one of them fails in some way. Judged after
every step: what is read is what was put under that key; an entry that was acknowledged is never missing; no step takes longer
than the timeouts of the tiers allow; each kind of failure is told once. At the end everything that was acknowledged is in the
bucket.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from _store_servers import BUCKET, redis_port, s3, s3_environment
from _wire import FAULTS, Proxy
from blend.errors import EntryDamagedError, StoreError
from blend.store import ChunkStore, Patience, open_store
from blend.types import CacheIdentity, ChunkCache, ChunkKey

if TYPE_CHECKING:
    import redis

PATIENCE = Patience(connect_s=0.5, answer_s=1.0, pause_s=0.1)
LONGEST_S = 15.0
"""Of a step: some exchanges with three tiers, each up to its timeout, on a machine that does other things as well."""

KEYS = 24
_KINDS_A_STORE = 12  # three places; down, read, written, damaged


class Fault(NamedTuple):
    """Which place, and what is wrong with it."""

    place: str
    kind: str


ALL = (
    *(Fault("bucket", kind) for kind in (*FAULTS, "stale", "full", "busy")),
    *(Fault("redis", kind) for kind in (*FAULTS, "evicts", "full")),
    *(Fault("disk", kind) for kind in ("wrong bytes", "cut", "gone")),
)


class Wrong(Exception):  # noqa: N818 - a finding, not an error of the run
    """Something that must not happen."""


class Lines(logging.Handler):
    """What the store tells."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Kept."""
        self.lines.append(record.getMessage())


def key(number: int) -> ChunkKey:
    """One of `KEYS`."""
    return CacheIdentity("soak", "float32", (1, 2, 3)).key((number,))


def cache(number: int) -> ChunkCache:
    """What belongs under it."""
    source = torch.Generator().manual_seed(number)
    pairs = [torch.randn(2, 2, 40 + number, 16, generator=source) for _ in range(4)]
    return ChunkCache(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), number)


def _break_file(file: Path, kind: str, draws: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        os.truncate(file, draws.randrange(len(content)))
    else:
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        with file.open("r+b") as opened:
            opened.write(content)


class Soak:
    """A run out of a seed, in a folder; the servers are shared with others."""

    def __init__(self, seed: int, folder: Path) -> None:
        import redis

        self.draws, self.folder = random.Random(seed), folder
        self.server, port = s3(), redis_port()
        self.bucket, self.wire = Proxy(self.server.port, seed), Proxy(port, seed + 1)
        self.redis: redis.Redis = redis.Redis(port=port, db=5)
        self.address = f"s3://{BUCKET}/soak-{os.getpid()}-{seed}-{time.time_ns()}"
        self.hot = f"redis://127.0.0.1:{self.wire.port}/5"
        self.acknowledged: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.slowest, self.kind = 0.0, ""
        self.told = Lines()
        logging.getLogger("kvblend.store").addHandler(self.told)
        self.store = self._opened()

    def run(self, faults: int, progress: Callable[[int], object] = lambda done: None) -> None:
        """So many faults, two steps each, over a store that holds half of the entries. Raises `Wrong`."""
        for number in range(0, KEYS, 2):
            self.store.put(key(number), cache(number))
            self.acknowledged.add(number)
        for done in range(faults):
            fault = self.draws.choice(ALL)
            self.counts[f"{fault.place}: {fault.kind}"] += 1
            self.kind = fault.kind
            self._break(fault)
            for _ in range(2):
                self._step(fault)
            self._mend(fault)
            if done % 50 == 49:
                self._look_again()
            progress(done + 1)
        self._look_again()
        self._judge_the_bucket()

    def close(self) -> None:
        """End the proxies."""
        logging.getLogger("kvblend.store").removeHandler(self.told)
        self.bucket.close()
        self.wire.close()

    def _opened(self, *, near: bool = True) -> ChunkStore:
        os.environ.update(s3_environment(self.bucket.port))
        cache_dir = self.folder / f"near-{self.draws.randrange(2)}" if near else None
        return open_store(self.address, cache=cache_dir, hot=self.hot if near else None, patience=PATIENCE)

    def _look_again(self) -> None:
        """A process that starts anew, on one of two machines; what the last one told is judged."""
        most, told = _KINDS_A_STORE, len(self.told.lines)
        if told > most or len(set(self.told.lines)) < told:
            raise Wrong(f"{told} lines were told, of {most} kinds at most: {self.told.lines}")
        self.told.lines.clear()
        self.store.backend.wait(LONGEST_S)  # type: ignore[attr-defined]
        self.store = self._opened()

    def _break(self, fault: Fault) -> None:
        if fault.place == "disk":
            self._break_disk(fault.kind)
        elif fault.kind in FAULTS:
            (self.bucket if fault.place == "bucket" else self.wire).set(fault.kind)
        elif fault.place == "bucket":
            self.server.fault.write_text(fault.kind)
        elif fault.kind == "evicts":
            for name in self.redis.scan_iter(count=100):
                if self.draws.random() < 0.5:
                    self.redis.delete(name)
        else:
            self.redis.config_set("maxmemory", 1)

    def _break_disk(self, kind: str) -> None:
        files = sorted((self.folder).glob("near-*/objects/*/*/*.safetensors"))
        for file in self.draws.sample(files, len(files) // 2):
            with suppress(FileNotFoundError):  # the store has removed it meanwhile
                _break_file(file, kind, self.draws)

    def _mend(self, fault: Fault) -> None:
        if fault.place == "bucket" and fault.kind not in FAULTS:
            self.server.fault.write_text("")
        elif fault.place == "redis" and fault.kind == "full":
            self.redis.config_set("maxmemory", 0)
        elif fault.place != "disk" and fault.kind in FAULTS:
            (self.bucket if fault.place == "bucket" else self.wire).set("")

    def _step(self, fault: Fault) -> None:
        step = self.draws.choice((self._put, self._read, self._read, self._read_many, self._prefetch, self._list))
        began = time.perf_counter()
        try:
            step()
        except EntryDamagedError:
            self.counts["damage that was found"] += 1
            if fault.kind != "wrong bytes":
                raise Wrong(f"damage while {fault.place} was {fault.kind}") from None
        except StoreError:
            self.counts["steps refused for an outage"] += 1
        took = time.perf_counter() - began
        self.slowest = max(self.slowest, took)
        self.counts["steps"] += 1
        if took > LONGEST_S:
            raise Wrong(f"{step.__name__} took {took:.1f} s while {fault.place} was {fault.kind}")

    def _put(self) -> None:
        number = self.draws.randrange(KEYS)
        self.store.put(key(number), cache(number))
        self.acknowledged.add(number)

    def _read(self) -> None:
        number = self.draws.randrange(KEYS)
        self._judge(number, self.store)

    def _read_many(self) -> None:
        numbers = self.draws.sample(range(KEYS), 6)
        readers = self.store.open_many([key(number) for number in numbers])
        try:
            for number, reader in zip(numbers, readers, strict=True):
                if isinstance(reader, EntryDamagedError):
                    raise reader
                if reader is None and number in self.acknowledged:
                    raise Wrong(f"entry {number} was acknowledged and is missing")
                for index in range(4 if reader is not None else 0):
                    self._same(number, index, reader.layer(index))  # type: ignore[union-attr]
        finally:
            for reader in readers:
                if reader is not None and not isinstance(reader, EntryDamagedError):
                    reader.close()

    def _judge(self, number: int, store: ChunkStore) -> None:
        reader = store.open(key(number))
        if reader is None:
            if number in self.acknowledged:
                raise Wrong(f"entry {number} was acknowledged and is missing")
            return
        with reader:
            for index in self.draws.sample(range(4), 4):
                self._same(number, index, reader.layer(index))

    def _same(self, number: int, index: int, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        put = cache(number)
        if not (torch.equal(found[0], put.keys[index]) and torch.equal(found[1], put.values[index])):
            raise Wrong(f"layer {index} of entry {number} is not what was put")
        self.counts["layers compared"] += 1

    def _prefetch(self) -> None:
        self.store.prefetch(key(number) for number in self.draws.sample(range(KEYS), 4))

    def _list(self) -> None:
        """A listing may be of a moment ago, and no digest stands over it; it decides nothing."""
        known = {key(number) for number in range(KEYS)}
        if set(self.store.keys()) - known and self.kind != "wrong bytes":
            raise Wrong("a listing names what was never put")

    def _judge_the_bucket(self) -> None:
        far = self._opened(near=False)
        for number in sorted(self.acknowledged):
            self._judge(number, far)
