"""Faults drawn at random over all tiers of a shared store, and what must hold whatever is wrong.

A machine puts, reads, deletes and prunes through a disk, a Redis and a bucket while one of them fails, or several do. After
every step another machine, on which nothing fails, compares the bucket with what was acknowledged. A step may fail only for a
fault of the bucket, and must end within the time that its exchanges may take.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from servers import BUCKET, redis_port, s3, s3_environment
from wire import FAULTS, Proxy

from blend.errors import EntryDamagedError, StoreError
from blend.store import ChunkReader, ChunkStore, Timeouts, open_store
from blend.types import CacheIdentity, ChunkCache, ChunkKey

KEYS, DATABASE, ARTIFACT = range(16), 5, "surrogate-1"
TIMEOUTS = Timeouts(connect_s=0.3, answer_s=0.6, pause_s=0.3)  # short, so that faults cost little
EXCHANGE_S = TIMEOUTS.connect_s + 2 * TIMEOUTS.answer_s
ASIDE_S = 4.0  # of a step: a Redis that fails, and what the machine itself takes
_IDENTITY = CacheIdentity("soak", "float32", (1, 2, 3))
_MOST_STEPS, _STEPS_A_PROCESS = 4, 25
_AT_ONCE = (5, 3, 2)  # how often one tier fails, two do, all do
_BUDGET = 200_000  # bytes of a disk: about half of all entries


class Wrong(Exception):  # noqa: N818 - a finding, not an error of the run
    """Something that must not happen."""


# What may be wrong with each tier.
KINDS = {
    "bucket": (*FAULTS, "full", "busy"),
    "redis": (*FAULTS, "evicts", "full"),
    "disk": ("wrong bytes", "cut", "gone"),
}


class Ledger(dict[int | str, set[bytes | None]]):
    """What each name may hold: what was acknowledged, and while a write failed the old content or the new. None is nothing."""

    def __missing__(self, name: int | str) -> set[bytes | None]:
        return self.setdefault(name, {None})

    @contextmanager
    def writing(self, name: int | str, content: bytes | None) -> Iterator[None]:
        """Around a write; when it returns, `content` is what the name holds."""
        self[name].add(content)
        yield
        self[name] = {content}


@cache
def key(number: int) -> ChunkKey:
    return _IDENTITY.key((number,))


@cache
def kv(number: int) -> ChunkCache:
    """The cache under it; every fifth is larger than what comes with the first read of an entry."""
    source = torch.Generator().manual_seed(number)
    shape = (1, 80, 64) if number % 5 == 0 else (1, 4 + number, 8)
    pairs = [torch.randn(2, *shape, generator=source) for _ in range(2)]
    return ChunkCache(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), number)


class Faults:
    """The servers, proxies in front of them, and the disks below `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._folder = folder
        self.server, port = s3(), redis_port()
        self.proxies = {"bucket": Proxy(self.server.port, seed), "redis": Proxy(port, seed + 1)}
        import redis

        self._redis: redis.Redis = redis.Redis(port=port, db=DATABASE)

    @contextmanager
    def present(self, place: str, kind: str, draws: random.Random) -> Iterator[Callable[[], bool]]:
        """It is so inside. What comes out says whether a request has met it, where that can be told."""
        if place == "disk":
            self._spoil_files(kind, draws)
            yield lambda: True
        elif kind in FAULTS:
            proxy = self.proxies[place]
            proxy.set(kind, draws.randrange(1 << 30))
            yield lambda: kind == "refused" or proxy.met > 0
            proxy.set("")
        elif place == "bucket":
            proxy = self.proxies[place]
            proxy.set("")
            self.server.fault.write_text(f"{kind} {proxy.port}")
            yield lambda: proxy.met > 0
            self.server.fault.write_text("")
        elif kind == "evicts":
            names = sorted(self._redis.scan_iter(count=1000))
            for name in draws.sample(names, len(names) // 2):
                self._redis.delete(name)
            yield lambda: True
        else:
            self._redis.config_set("maxmemory", 1)
            yield lambda: True
            self._redis.config_set("maxmemory", 0)

    def _spoil_files(self, kind: str, draws: random.Random) -> None:
        files = sorted(self._folder.glob("*/objects/*/*/*.safetensors"))
        for file in draws.sample(files, len(files) // 2):
            with suppress(FileNotFoundError):  # the store has removed it meanwhile
                content = bytearray(file.read_bytes())
                if kind == "gone" or not content:  # cut to nothing before
                    file.unlink()
                elif kind == "cut":
                    os.truncate(file, draws.randrange(len(content)))
                else:
                    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
                    file.write_bytes(content)


class Soak:
    """A run out of a seed, in a folder. A seed reproduces a run as far as the machine takes the same time.

    counts: faults met, layers and names compared.
    """

    def __init__(self, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._seed, self._folder, self._patch = seed, folder, patch
        self._faults, self._ledger = Faults(seed, folder), Ledger()
        self.counts = Counter[str]()
        self._address = f"s3://{BUCKET}/soak-{os.getpid()}-{seed}-{time.time_ns()}"
        self._secret = b"k" * 16 if seed % 2 else None
        self._draws = random.Random(seed)
        self._now: dict[str, str] = {}
        self._doing = ""
        self._go_through(self._faults.server.port)
        self._witness = open_store(self._address, timeouts=Timeouts(60, 60, 0), key=self._secret)
        self._go_through(self._faults.proxies["bucket"].port)
        self._store, self._has_disk = self._machine()

    def run(self, faults: int) -> None:
        """Run until so many faults were met. Raises `Wrong`, in words that say how to see it again."""
        number = 0
        try:
            self._start_anew()
            while self.counts["faults met"] < faults:
                self._draws = random.Random(f"{self._seed} {number}")
                self._one_round()
                number += 1
                if number % _STEPS_A_PROCESS == 0:
                    self._start_anew()
            self._start_anew()
        except (Wrong, EntryDamagedError) as found:
            raise Wrong(f"{self._doing}, {self._now}: {found} (seed {self._seed}, round {number})") from found

    def close(self) -> None:
        for proxy in self._faults.proxies.values():
            proxy.close()

    def _go_through(self, port: int) -> None:
        """Stores that are opened from now on find the bucket there."""
        for name, value in s3_environment(port).items():
            self._patch.setenv(name, value)

    def _machine(self) -> tuple[ChunkStore, bool]:
        """A new process on one of two machines with a disk (0, 1), or on one without (2)."""
        number = self._draws.randrange(3)
        hot = f"redis://127.0.0.1:{self._faults.proxies['redis'].port}/{DATABASE}"
        disk = None if number == 2 else self._folder / f"machine-{number}"
        size = None if disk is None else _BUDGET
        store = open_store(self._address, cache=disk, hot=hot, timeouts=TIMEOUTS, key=self._secret, budget_bytes=size)
        return store, disk is not None

    def _start_anew(self) -> None:
        """All is well: every entry is put and read through all tiers, and a new process starts."""
        self._rest()
        self._step(Step(Soak.put_missing, 3 * len(KEYS)))
        for _ in range(2):  # out of the far tiers, then the near ones
            self._step(Step(Soak.read_all, 3 * len(KEYS)))
        self._store, self._has_disk = self._machine()

    def _one_round(self) -> None:
        """One fault, or several of different tiers, for up to some steps: until all were met."""
        places = [place for place in KINDS if place != "disk" or self._has_disk]
        count = min(self._draws.choices(range(1, 4), _AT_ONCE)[0], len(places))
        self._now = {place: self._draws.choice(KINDS[place]) for place in self._draws.sample(places, count)}
        with ExitStack() as faults:
            present = [self._faults.present(place, kind, self._draws) for place, kind in self._now.items()]
            are_met = [faults.enter_context(fault) for fault in present]
            for number in range(_MOST_STEPS):
                self._step(self._draws.choices(STEPS, [step.weight for step in STEPS])[0])
                if number and all(is_met() for is_met in are_met):
                    break
            self.counts["faults met"] += sum(is_met() for is_met in are_met)
        self._now = {}
        self._rest()

    def _rest(self) -> None:
        """Until tiers that failed are asked again."""
        time.sleep(TIMEOUTS.pause_s + 0.05)

    def _step(self, step: Step, *, again: bool = True) -> None:
        """Run a step. One that failed or was slow for no reason runs once more: the machine may have stood still."""
        self._doing = step.do.__name__
        began, wrong = time.monotonic(), ""
        try:
            step.do(self)
        except EntryDamagedError:
            if not self._is_altered:
                raise
        except StoreError as error:
            if "bucket" not in self._now:
                wrong = str(error)
        took_s = time.monotonic() - began
        if took_s > (most_s := step.exchanges * EXCHANGE_S + ASIDE_S):
            wrong = f"it took {took_s:.1f} s, of {most_s:.1f} s at most"
        self._compare()
        if wrong and not again:
            raise Wrong(wrong)
        if wrong:
            time.sleep(1)
            self._rest()
            self._step(step, again=False)

    @property
    def _is_altered(self) -> bool:
        """What the bucket sends."""
        return self._now.get("bucket") == "wrong bytes"

    def _compare(self) -> None:
        """The bucket holds what it may, entry for entry; that is what it holds from then on."""
        unsure = [number for number in KEYS if len(self._ledger[number]) > 1]
        for number in sorted({*unsure, *self._draws.sample(KEYS, 3)}):
            found = self._witness.open(key(number))
            self._judge(number, found)
            content = None if found is None else b""
            if content not in self._ledger[number]:
                raise Wrong(f"entry {number} is in the bucket, and should be gone")
            self._ledger[number] = {content}
            self.counts["names compared"] += 1
        artifact = self._witness.read_artifact(ARTIFACT)
        if artifact not in self._ledger[ARTIFACT]:
            raise Wrong("the artifact in the bucket is not what was written")
        self._ledger[ARTIFACT] = {artifact}

    def _judge(self, number: int, reader: ChunkReader | EntryDamagedError | None) -> None:
        """Only what may be gone may be missing or damaged, and what is there is what was put."""
        if not isinstance(reader, ChunkReader):
            if None not in self._ledger[number]:
                raise reader or Wrong(f"entry {number} was acknowledged and is missing")
            return
        with reader:
            for index in self._draws.sample(range(2), 2):
                keys, values = reader.layer(index)
                put = kv(number)
                if not torch.equal(keys, put.keys[index]) or not torch.equal(values, put.values[index]):
                    raise Wrong(f"layer {index} of entry {number} is not what was put")
                self.counts["layers compared"] += 1

    # What a step may be.

    def put(self) -> None:
        self._put(self._draws.choice(KEYS))

    def put_missing(self) -> None:
        for number in KEYS:
            if None in self._ledger[number]:
                self._put(number)

    def _put(self, number: int) -> None:
        with self._ledger.writing(number, b""):
            self._store.put(key(number), kv(number))

    def read(self) -> None:
        number = self._draws.choice(KEYS)
        self._judge(number, self._store.open(key(number)))

    def read_many(self) -> None:
        self.read_all(self._draws.sample(KEYS, 5))

    def read_all(self, numbers: Sequence[int] = KEYS) -> None:
        """At the same time, as a prompt does."""
        with ExitStack() as opened:
            readers = self._store.open_many([key(number) for number in numbers])
            for reader in readers:
                if isinstance(reader, ChunkReader):
                    opened.callback(reader.close)
            for number, reader in zip(numbers, readers, strict=True):
                self._judge(number, reader)

    def held(self) -> None:
        found = self._store.held(map(key, KEYS))
        for number in KEYS:
            may = {content is not None for content in self._ledger[number]}
            if self._is_altered:  # an entry then counts as damaged, so as missing
                may.add(False)
            if (key(number) in found) not in may:
                raise Wrong(f"entry {number} is {'there' if key(number) in found else 'missing'}, and should not be")

    def delete(self) -> None:
        number = self._draws.choice(KEYS)
        with self._ledger.writing(number, None):
            self._store.delete(key(number))

    def prune(self) -> None:
        going = self._draws.sample(KEYS, 2)
        for number in going:
            self._ledger[number].add(None)
        self._store.prune([key(number) for number in KEYS if number not in going], key(0).namespace)

    def write_artifact(self) -> None:
        content = f"{self._draws.getrandbits(64):x}".encode()
        with self._ledger.writing(ARTIFACT, content):
            self._store.write_artifact(ARTIFACT, content)


class Step(NamedTuple):
    """exchanges: with the bucket, one after another, at most. weight: how often it is drawn."""

    do: Callable[[Soak], None]
    exchanges: int
    weight: int = 1


STEPS = (
    *(Step(Soak.put, 3, 6), Step(Soak.read, 3, 4), Step(Soak.read_many, 5, 4), Step(Soak.held, 3)),
    *(Step(Soak.delete, 4), Step(Soak.prune, 11), Step(Soak.write_artifact, 5, 2)),
)
