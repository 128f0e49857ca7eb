"""What is wrong with one tier of a shared store for a while, and whether a request met it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from _store_servers import redis_port, s3
from _wire import FAULTS, Proxy
from blend.store import ChunkStore, Patience

if TYPE_CHECKING:
    import redis

PATIENCE = Patience(connect_s=0.3, answer_s=0.6)
"""Short waits, so that faults cost little; the rest of 15 seconds is that of every store."""

LATE = {"nearly late": 0.85 * PATIENCE.answer_s, "late": 1.15 * PATIENCE.answer_s}
DATABASE = 5


class Fault(NamedTuple):
    """Which place, and what is wrong with it."""

    place: str
    kind: str


_WIRE = (*FAULTS, "dripping", *LATE)
ALL = (
    *(Fault("bucket", kind) for kind in (*_WIRE, "stale", "full", "busy")),
    *(Fault("redis", kind) for kind in (*_WIRE, "evicts", "full")),
    *(Fault("disk", kind) for kind in ("wrong bytes", "cut", "gone")),
)


class Asked:
    """What a store's tiers were asked for, behind their breakers: by name, how often a server failed, and with what at last."""

    def __init__(self, store: ChunkStore) -> None:
        self.hot, self.local = set[str](), set[str]()
        self.failures = {"bucket": 0, "redis": 0}
        self.cause = ""
        tiers: Any = store.backend.tiers  # type: ignore[attr-defined]
        self._count(tiers.far, "bucket")
        self._count(tiers.hot, "redis")
        self._note(tiers.hot, "open_many", self.hot)
        if tiers.local is not None:
            self._note(tiers.local, "open_many", self.local)

    def _count(self, backend: Any, place: str) -> None:
        failed = backend._failed

        def counted(error: Exception, doing: str) -> Any:
            self.failures[place] += 1
            self.cause = f"{time.monotonic():.3f} {error}"
            return failed(error, doing)

        backend._failed = counted

    def _note(self, backend: Any, method: str, into: set[str]) -> None:
        call = getattr(backend, method)

        def noted(names: Iterable[str], head: int) -> Any:
            into.update(names)
            return call(names, head)

        setattr(backend, method, noted)


class Faults:
    """The servers, proxies in front of them, and the disks below `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        import redis

        self._folder = folder
        self.server, port = s3(), redis_port()
        self.bucket = Proxy(self.server.port, seed, LATE)
        self.wire = Proxy(port, seed + 1, LATE)
        self.redis: redis.Redis = redis.Redis(port=port, db=DATABASE)
        self._spoilt: dict[Fault, set[str]] = {}
        self._before = 0

    def close(self) -> None:
        """End the proxies."""
        self.bucket.close()
        self.wire.close()

    def begin(self, fault: Fault, draws: random.Random, asked: Asked) -> None:
        """It is so from now on."""
        if fault.place == "disk":
            asked.local.clear()
            self._spoilt[fault] = self._spoil_files(fault.kind, draws)
        elif fault.kind in _WIRE:
            self._before = asked.failures[fault.place]
            self._proxy(fault).set(fault.kind, draws.randrange(1 << 30))
        elif fault.place == "bucket":
            self._before = self.server.met
            self.server.fault.write_text(f"{fault.kind} {self.bucket.port}")
        elif fault.kind == "evicts":
            asked.hot.clear()
            self._spoilt[fault] = self._evict(draws)
        else:
            self._before = self._refusals()
            self.redis.config_set("maxmemory", 1)

    def met(self, fault: Fault, asked: Asked) -> bool:
        """Whether a request has met it since it began; of a file that was changed: whether it was opened to be read."""
        if fault.place == "disk":
            return bool(self._spoilt[fault] & asked.local)
        if fault.kind == "refused":
            return asked.failures[fault.place] > self._before
        if fault.kind in _WIRE:
            return self._proxy(fault).met > 0
        if fault.place == "bucket":
            return self.server.met > self._before
        return bool(self._spoilt[fault] & asked.hot) if fault.kind == "evicts" else self._refusals() > self._before

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

    def _refusals(self) -> int:
        stats: Any = self.redis.info("errorstats")
        return int(stats.get("errorstat_OOM", {}).get("count", 0))

    def _evict(self, draws: random.Random) -> set[str]:
        names: Any = sorted(self.redis.scan_iter(count=1000))
        gone = [name for name in names if draws.random() < 0.5]
        if gone:
            self.redis.delete(*gone)
        return {"objects/" + name.decode().partition("objects/")[2] for name in gone}

    def _spoil_files(self, kind: str, draws: random.Random) -> set[str]:
        files = sorted(self._folder.glob("*/kv/objects/*/*/*.safetensors"))
        spoilt = set[str]()
        for file in draws.sample(files, len(files) // 2):
            with suppress(FileNotFoundError):  # the store has removed it meanwhile
                _spoil(file, kind, draws)
                spoilt.add("objects/" + str(file).partition("/kv/objects/")[2])
        return spoilt


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
