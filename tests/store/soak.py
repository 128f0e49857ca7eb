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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from servers import BUCKET, redis_port, s3, s3_environment
from wire import FAULTS, Proxy

from blend.errors import EntryDamagedError, StoreError
from blend.store import ChunkReader, ChunkStore, Timeouts, open_store
from blend.types import CacheIdentity, ChunkCache, ChunkKey

if TYPE_CHECKING:
    import redis

KEYS, DATABASE = 16, 5
TIMEOUTS = Timeouts(connect_s=0.3, answer_s=0.6, pause_s=0.3)  # short, so that faults cost little
EXCHANGE_S = TIMEOUTS.connect_s + 2 * TIMEOUTS.answer_s
ASIDE_S = 4.0  # of a step: a Redis that fails, and what the machine itself takes
_IDENTITY = CacheIdentity("soak", "float32", (1, 2, 3))
_MOST_STEPS, _STEPS_A_PROCESS = 4, 25
_AT_ONCE = (5, 3, 2)  # how often one tier fails, two do, all do
_BUDGET = 200_000  # bytes of a disk: about half of all entries
_WIRE = FAULTS


class Wrong(Exception):  # noqa: N818 - a finding, not an error of the run
    """Something that must not happen."""


class Fault(NamedTuple):
    """A tier and what is wrong with it."""

    place: str
    kind: str


ALL = (
    *(Fault("bucket", kind) for kind in (*_WIRE, "full", "busy")),
    *(Fault("redis", kind) for kind in (*_WIRE, "evicts", "full")),
    *(Fault("disk", kind) for kind in ("wrong bytes", "cut", "gone")),
)


class Ledger:
    """What each name may hold: what was acknowledged, and while a write failed the old content or the new. None is nothing."""

    def __init__(self) -> None:
        self._may: dict[str, set[bytes | None]] = {}

    def may(self, name: str) -> set[bytes | None]:
        """What it may hold."""
        return self._may.setdefault(name, {None})

    def learn(self, name: str, content: bytes | None) -> None:
        """It was looked at: that is what it holds."""
        self._may[name] = {content}

    @contextmanager
    def writing(self, name: str, content: bytes | None) -> Iterator[None]:
        """Around a write; when it returns, `content` is what the name holds."""
        self.may(name).add(content)
        yield
        self.learn(name, content)


@cache
def key(number: int) -> ChunkKey:
    """One of `KEYS`."""
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
        import redis

        self._folder = folder
        self.server, port = s3(), redis_port()
        self.bucket, self.wire = Proxy(self.server.port, seed), Proxy(port, seed + 1)
        self.redis: redis.Redis = redis.Redis(port=port, db=DATABASE)
        self._before = 0

    def close(self) -> None:
        """End the proxies."""
        self.bucket.close()
        self.wire.close()

    def begin(self, fault: Fault, draws: random.Random) -> None:
        """It is so from now on."""
        if fault.place == "disk":
            self._spoil_files(fault.kind, draws)
        elif fault.kind in _WIRE:
            self._proxy(fault).set(fault.kind, draws.randrange(1 << 30))
        elif fault.place == "bucket":
            self._before = self.server.met
            self.server.fault.write_text(f"{fault.kind} {self.bucket.port}")
        elif fault.kind == "evicts":
            names: Any = sorted(self.redis.scan_iter(count=1000))
            for name in names:
                if draws.random() < 0.5:
                    self.redis.delete(name)
        else:
            self.redis.config_set("maxmemory", 1)

    def met(self, fault: Fault) -> bool:
        """Whether a request has met it, where that can be told; a step that ran under the others counts."""
        if fault.place != "disk" and fault.kind in _WIRE and fault.kind != "refused":
            return self._proxy(fault).met > 0
        return fault.place != "bucket" or fault.kind == "refused" or self.server.met > self._before

    def end(self, fault: Fault) -> None:
        """All is well again; what is gone or damaged stays so."""
        if fault.place != "disk" and fault.kind in _WIRE:
            self._proxy(fault).set("")
        elif fault.place == "bucket":
            self.server.fault.write_text("")
        elif fault.kind == "full":
            self.redis.config_set("maxmemory", 0)

    def _proxy(self, fault: Fault) -> Proxy:
        return self.bucket if fault.place == "bucket" else self.wire

    def _spoil_files(self, kind: str, draws: random.Random) -> None:
        files = sorted(self._folder.glob("*/objects/*/*/*.safetensors"))
        for file in draws.sample(files, len(files) // 2):
            with suppress(FileNotFoundError):  # the store has removed it meanwhile
                _spoil(file, kind, draws)


def _spoil(file: Path, kind: str, draws: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if kind == "gone" or not content:  # cut to nothing before
        file.unlink()
    elif kind == "cut":
        os.truncate(file, draws.randrange(len(content)))
    else:
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        with file.open("r+b") as opened:
            opened.write(content)


class Scene(NamedTuple):
    """What a step runs in: the machine's store, and the clean one of another machine."""

    store: ChunkStore
    ledger: Ledger
    draws: random.Random
    counts: Counter[str]
    altered: bool = (
        False  # bytes of the bucket are changed on their way: an entry then counts as damaged, so as missing
    )


def put(scene: Scene) -> None:
    """Put an entry."""
    put_one(scene, scene.draws.randrange(KEYS))


def put_one(scene: Scene, number: int) -> None:
    """Put that entry."""
    with scene.ledger.writing(_entry(number), b""):
        scene.store.put(key(number), kv(number))


def _entry(number: int) -> str:
    return f"entry {number}"


def read(scene: Scene) -> None:
    """Read an entry."""
    number = scene.draws.randrange(KEYS)
    _judge(scene, number, scene.store.open(key(number)))


def read_many(scene: Scene) -> None:
    """Read several entries, as a prompt does."""
    read_all(scene, scene.draws.sample(range(KEYS), 5))


def read_all(scene: Scene, numbers: list[int]) -> None:
    """Read these entries at the same time."""
    readers = scene.store.open_many([key(number) for number in numbers])
    try:
        for number, reader in zip(numbers, readers, strict=True):
            _judge(scene, number, reader)
    finally:
        for reader in readers:
            if isinstance(reader, ChunkReader):
                reader.close()


def _judge(scene: Scene, number: int, reader: ChunkReader | EntryDamagedError | None) -> None:
    there = None not in scene.ledger.may(_entry(number))
    if isinstance(reader, EntryDamagedError):
        if there:
            raise reader
        scene.counts["damaged copies of what is gone"] += 1
    elif reader is None:
        if there:
            raise Wrong(f"entry {number} was acknowledged and is missing")
    else:
        with reader:
            for index in scene.draws.sample(range(2), 2):
                keys, values = reader.layer(index)
                if not (torch.equal(keys, kv(number).keys[index]) and torch.equal(values, kv(number).values[index])):
                    raise Wrong(f"layer {index} of entry {number} is not what was put")
                scene.counts["layers compared"] += 1


def held(scene: Scene) -> None:
    """Ask which entries there are."""
    found = scene.store.held(map(key, range(KEYS)))
    for number in range(KEYS):
        may = {content is not None for content in scene.ledger.may(_entry(number))}
        if (key(number) in found) not in may | ({False} if scene.altered else set()):
            raise Wrong(f"entry {number} is {'there' if key(number) in found else 'missing'}, and should not be")


def delete(scene: Scene) -> None:
    """Delete an entry."""
    number = scene.draws.randrange(KEYS)
    with scene.ledger.writing(_entry(number), None):
        scene.store.delete(key(number))


def prune(scene: Scene) -> None:
    """Delete all but most entries."""
    going = scene.draws.sample(range(KEYS), 2)
    for number in going:
        scene.ledger.may(_entry(number)).add(None)
    scene.store.prune([key(number) for number in range(KEYS) if number not in going], key(0).namespace)


def write_artifact(scene: Scene) -> None:
    """Replace an artifact."""
    content = f"{scene.draws.getrandbits(64):x}".encode()
    with scene.ledger.writing("surrogate-1", content):
        scene.store.write_artifact("surrogate-1", content)


class Step(NamedTuple):
    """exchanges: with the bucket, one after another, at most. weight: how often it is drawn."""

    do: Callable[[Scene], None]
    exchanges: int
    weight: int = 1


STEPS = (
    *(Step(put, 3, 6), Step(read, 3, 4), Step(read_many, 5, 4), Step(held, 3), Step(delete, 4)),
    *(Step(prune, 11), Step(write_artifact, 5, 2)),
)


class Soak:
    """A run out of a seed, in a folder. A seed reproduces a run as far as the machine takes the same time.

    met: faults by kind. counts: what else happened.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self._folder = seed, folder
        self._faults, self._ledger = Faults(seed, folder), Ledger()
        self.met, self.counts = Counter[Fault](), Counter[str]()
        self._address = f"s3://{BUCKET}/soak-{os.getpid()}-{seed}-{time.time_ns()}"
        self._secret = b"k" * 16 if seed % 2 else None
        self._draws = random.Random(seed)
        os.environ.update(s3_environment(self._faults.server.port))
        self._witness = open_store(self._address, timeouts=Timeouts(60, 60, 0), key=self._secret)
        self._store, self._has_disk = self._machine()

    def run(self, faults: int) -> None:
        """Run until so many faults were met. Raises `Wrong`, in words that say how to see it again."""
        number = 0
        try:
            self._start_anew()
            while self.met.total() < faults:
                self._draws = random.Random(f"{self.seed} {number}")
                self._one_fault()
                number += 1
                if number % _STEPS_A_PROCESS == 0:
                    self._start_anew()
            self._start_anew()
        except Wrong as found:
            raise Wrong(f"{found} (seed {self.seed}, fault {number})") from None

    def close(self) -> None:
        """End the proxies."""
        self._faults.close()

    def _machine(self) -> tuple[ChunkStore, bool]:
        """A new process on one of two machines with a disk (0, 1), or on one without (2)."""
        number = self._draws.randrange(3)
        os.environ.update(s3_environment(self._faults.bucket.port))
        hot = f"redis://127.0.0.1:{self._faults.wire.port}/{DATABASE}"
        disk = None if number == 2 else self._folder / f"machine-{number}"
        size = None if disk is None else _BUDGET
        store = open_store(self._address, cache=disk, hot=hot, timeouts=TIMEOUTS, key=self._secret, budget_bytes=size)
        return store, disk is not None

    def _one_fault(self) -> None:
        """One fault, or several of different tiers, for up to some steps: until all were met."""
        now = self._drawn()
        for fault in now:
            self._faults.begin(fault, self._draws)
        for number in range(_MOST_STEPS):
            self._step(self._draws.choices(STEPS, [step.weight for step in STEPS])[0], now)
            if number and all(map(self._faults.met, now)):
                break
        for fault in now:
            self.met[fault] += self._faults.met(fault)
            self._faults.end(fault)
        self._rest()

    def _drawn(self) -> tuple[Fault, ...]:
        places = [place for place in ("bucket", "redis", "disk") if place != "disk" or self._has_disk]
        count = min(self._draws.choices(range(1, 4), _AT_ONCE)[0], len(places))
        chosen = self._draws.sample(places, count)
        return tuple(self._draws.choice([one for one in ALL if one.place == place]) for place in chosen)

    def _rest(self) -> None:
        """Until tiers that failed are asked again."""
        time.sleep(TIMEOUTS.pause_s + 0.05)

    def _step(self, step: Step, now: tuple[Fault, ...], *, again: bool = True) -> None:
        """Run a step. One that failed or was slow for no reason runs once more: the machine may have stood still."""
        altered = Fault("bucket", "wrong bytes") in now
        scene = Scene(self._store, self._ledger, self._draws, self.counts, altered)
        began, wrong = time.monotonic(), ""
        try:
            step.do(scene)
        except EntryDamagedError as error:
            if not altered:
                raise Wrong(f"{_of(step, now)}: {error}") from None
            self.counts["steps that found damage"] += 1
        except StoreError as error:
            self.counts["steps refused for an outage"] += 1
            if not any(fault.place == "bucket" for fault in now):
                wrong = f"{_of(step, now)}: {error}"
        except Wrong as found:
            raise Wrong(f"{_of(step, now)}: {found}") from None
        took_s = time.monotonic() - began
        if took_s > (most_s := step.exchanges * EXCHANGE_S + ASIDE_S):
            wrong = f"{_of(step, now)} took {took_s:.1f} s, of {most_s:.1f} s at most"
        self._compare(step, now)
        if wrong and not again:
            raise Wrong(wrong)
        if wrong:
            self.counts["steps done again"] += 1
            time.sleep(1)
            self._rest()
            self._step(step, now, again=False)

    def _compare(self, step: Step, now: tuple[Fault, ...]) -> None:
        """The bucket holds what it may, entry for entry; that is what it holds from then on."""
        names = [number for number in range(KEYS) if len(self._ledger.may(_entry(number))) > 1]
        checked = {*names, *self._draws.sample(range(KEYS), 3)}
        for number in sorted(checked):
            try:
                _judge(
                    Scene(self._witness, self._ledger, self._draws, self.counts), number, found := self._open(number)
                )
            except (Wrong, EntryDamagedError) as wrong:
                raise Wrong(f"{_of(step, now)}: in the bucket, {wrong}") from None
            content = None if found is None else b""
            if content not in self._ledger.may(_entry(number)):
                raise Wrong(f"{_of(step, now)}: entry {number} is in the bucket, and should be gone")
            self._ledger.learn(_entry(number), content)
            self.counts["names compared with the bucket"] += 1
        artifact = self._witness.read_artifact("surrogate-1")
        if artifact not in self._ledger.may("surrogate-1"):
            raise Wrong(f"{_of(step, now)}: the artifact in the bucket is not what was written")
        self._ledger.learn("surrogate-1", artifact)

    def _open(self, number: int) -> ChunkReader | None:
        return self._witness.open(key(number))

    def _start_anew(self) -> None:
        """All is well: every entry is put and read through all tiers, and a new process starts."""
        self._rest()
        self._step(Step(_put_missing, 3 * KEYS), ())
        for _ in range(2):  # out of the far tiers, then the near ones
            self._step(Step(lambda scene: read_all(scene, list(range(KEYS))), 3 * KEYS), ())
        self._store, self._has_disk = self._machine()


def _put_missing(scene: Scene) -> None:
    for number in range(KEYS):
        if None in scene.ledger.may(_entry(number)):
            put_one(scene, number)


def _of(step: Step, now: tuple[Fault, ...]) -> str:
    what = " and ".join(f"{fault.place}: {fault.kind}" for fault in now) or "nothing is wrong"
    return f"{getattr(step.do, '__name__', 'a step')} ({what})"
