"""Faults drawn at random over all tiers of a shared store, and what must hold whatever is wrong.

Machines read, put, prune, publish and so on through a disk, a Redis and a bucket while one of them fails in some way, or
several do. A fault counts when a request has met it: a tier that has failed is left alone for a while, and so is most of what
goes wrong then. Judged after every step: what the bucket holds of all that the step was about, byte for byte; what was read;
that only a fault of the bucket, or the rest that it was given after one, made the step fail; that no step took longer than its
exchanges with the bucket may; that each kind of failure is told once.

The rest is that of every store. After most faults the clock of the breakers is put forward so that it is over; after the others
it goes on, and what is not asked meanwhile is not counted.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from _soak_caches import forget_copies, put_missing, read_all
from _soak_faults import ALL, PATIENCE, Fault, Faults
from _soak_instruments import Clock, Lines, Pulse
from _soak_ledger import Ledger
from _soak_machines import KEYS, Machine, Site
from _soak_scene import MOST, Scene, Step, Wrong
from _soak_shared import ALL_STEPS, ASKING
from _store_servers import BUCKET
from blend.errors import EntryDamagedError, StoreError
from blend.store import backend as breaker
from blend.store.backend import LeftAloneError

__all__ = ["Soak", "Wrong"]

EXCHANGE_S = PATIENCE.connect_s + 2 * PATIENCE.answer_s
"""A bucket is asked again where that begins within the time for an answer."""
ASIDE_S = 4.0
"""Of a step: a Redis that fails when it is read and when it is written, what the machine itself takes, and what runs beside."""

_MOST_STEPS, _RESTS_ON, _A_PROCESS = 4, 0.2, 25
_AT_ONCE = (5, 3, 2)  # how often one tier fails, two do, all do
_PLACES = {"bucket": 4, "redis": 4, "disk": 2}  # how often each is drawn first
_ASKING = 0.5
_STALL_S = (
    0.1  # a thread that sleeps so much too long, or a server that is half the time for an answer away, is the machine's
)


class Soak:
    """A run out of a seed, in a folder; the servers are shared with others.

    What each fault is, and what is done meanwhile, is drawn from its number and the seed: a seed reproduces a run, as far as
    the machine takes the same time.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self._folder = seed, folder
        self._faults, self._ledger = Faults(seed, folder), Ledger()
        self.drawn, self.met, self.counts = Counter[Fault](), Counter[Fault](), Counter[str]()
        self.steps, self.slowest_s, self.slowest = 0, 0.0, ""
        self._told, self._pulse, self._clock = Lines(), Pulse(), Clock()
        logging.getLogger("kvblend.store").addHandler(self._told)
        breaker.time = self._clock  # type: ignore[assignment,attr-defined]
        address = f"s3://{BUCKET}/soak-{os.getpid()}-{seed}-{time.time_ns()}"
        self._site = Site(
            address,
            self._faults.server.port,
            self._faults.bucket.port,
            self._faults.wire.port,
            b"k" * 16 if seed % 2 else None,
        )
        self._witness = self._site.witness()
        self._draws = random.Random(seed)
        self._machine = self._started()
        self._failed = False  # the bucket, since the breakers' rest was last over
        self._unpublished = set[Path]()

    def run(self, faults: int, progress: Callable[[int], object] = lambda met: None) -> None:
        """Until so many have been met. Raises `Wrong`, in words that say how to see it again."""
        number = 0
        try:
            self._start_anew()
            while self.met.total() < faults:
                self._draws = random.Random(f"{self.seed} {number}")
                self._one_fault()
                number += 1
                if number % _A_PROCESS == 0:
                    self._start_anew()
                progress(self.met.total())
            self._start_anew()
            self._judge(self._ledger.names)
        except Wrong as found:
            raise Wrong(f"{found} (seed {self.seed}, fault {number})") from None

    def close(self) -> None:
        """End the proxies."""
        logging.getLogger("kvblend.store").removeHandler(self._told)
        breaker.time = time  # type: ignore[attr-defined]
        self._pulse.end()
        self._faults.close()

    def _started(self) -> Machine:
        return self._site.machine(self._folder, self._draws.randrange(3))

    def _one_fault(self) -> None:
        """One of all, or some of different places; up to some steps, until all of them were met and for one step more."""
        now = self._drawn()
        if all(fault.place != "disk" for fault in now):
            self._lose_copies()
        for fault in now:
            self.drawn[fault] += 1
            self._faults.begin(fault, self._draws, self._machine.asked)
        all_met = False
        for _ in range(_MOST_STEPS):
            self._step(self._drawn_step(now), now)
            before, all_met = all_met, all(self._faults.met(fault, self._machine.asked) for fault in now)
            if before:
                break
        for fault in now:
            self.met[fault] += self._faults.met(fault, self._machine.asked)
            self._faults.end(fault)
        if self._draws.random() >= _RESTS_ON:
            self._rest()

    def _drawn(self) -> tuple[Fault, ...]:
        places = [place for place in _PLACES if place != "disk" or self._machine.root is not None]
        most = min(self._draws.choices(range(1, 4), _AT_ONCE)[0], len(places))
        first = self._draws.choices(places, [_PLACES[place] for place in places])[0]
        others = self._draws.sample([place for place in places if place != first], most - 1)
        return tuple(self._draws.choice([one for one in ALL if one.place == place]) for place in (first, *others))

    def _drawn_step(self, now: tuple[Fault, ...]) -> Step:
        """Any; rather one that asks what is wrong."""
        one = self._draws.choice(now)
        asking = ASKING.get(one, ASKING.get(Fault(one.place, "")))
        steps = asking if asking and self._draws.random() < _ASKING else ALL_STEPS
        return self._draws.choices(steps, [step.weight for step in steps])[0]

    def _lose_copies(self) -> None:
        """A disk has evicted some of its copies, so that what lies behind it is asked."""
        for file in sorted(self._folder.glob("*/kv/objects/*/*/*.safetensors")):
            if self._draws.random() < 0.4:
                file.unlink(missing_ok=True)

    def _rest(self) -> None:
        self._clock.ahead_s += PATIENCE.pause_s + 1
        self._failed = False

    def _step(self, step: Step, now: tuple[Fault, ...]) -> None:
        bad = {fault.kind for fault in now if fault.place == "bucket"}
        scene = Scene(
            self._machine,
            self._witness,
            self._ledger,
            self._draws,
            self.counts,
            self._site.secret,
            not bad and not self._failed,
            not bad & {"stale", "wrong bytes"},
            self._unpublished,
        )
        self._pulse.late_s = self._faults.bucket.slowest_s = 0.0
        failures, began = self._machine.asked.failures["bucket"], time.monotonic()
        try:
            step.do(scene)
        except StoreError as error:
            self._refused(error, step, now, scene)
        self.steps += 1
        if not self._machine.store.backend.wait(ASIDE_S):  # type: ignore[attr-defined]
            self._unless_stalled(f"{_of(step, now)}: what it fetches does not come to an end")
        self._timed(time.monotonic() - began, step, now)
        self._failed |= self._machine.asked.failures["bucket"] > failures  # steps may go on all the same
        try:
            self._judge(self._ledger.settled())
        except Wrong as found:
            raise Wrong(f"{_of(step, now)}: {found}") from None

    def _timed(self, took_s: float, step: Step, now: tuple[Fault, ...]) -> None:
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, _of(step, now)
        if took_s > (most_s := step.exchanges * EXCHANGE_S + ASIDE_S):
            self._unless_stalled(f"{_of(step, now)} took {took_s:.1f} s, of {most_s:.1f} s at most")

    def _refused(self, error: StoreError, step: Step, now: tuple[Fault, ...], scene: Scene) -> None:
        """It was right to fail."""
        if isinstance(error, EntryDamagedError):
            if Fault("bucket", "wrong bytes") not in now:
                raise Wrong(f"{_of(step, now)}: {error}") from None
            self.counts["steps that found damage"] += 1
            return
        self.counts["steps refused for an outage"] += 1
        if step.do is forget_copies and any(fault.place == "redis" for fault in now):
            return
        if scene.well:
            self._unless_stalled(f"{_of(step, now)}: {error} ({self._machine.asked.cause})")
        if isinstance(error, LeftAloneError) and not self._lines_about_the_bucket():
            raise Wrong(f"{_of(step, now)}: the bucket is left alone, and nobody was told: {error}")

    def _lines_about_the_bucket(self) -> bool:
        return any(line.startswith(self._site.address) for line in self._told.lines)

    def _unless_stalled(self, found: str) -> None:
        """A machine that stands still for a moment, or a server, looks like an outage: those are counted."""
        time.sleep(1)
        if self._pulse.late_s < _STALL_S and self._faults.bucket.slowest_s < 0.4 * PATIENCE.answer_s:
            raise Wrong(found)
        self.counts["steps excused, for the machine stood still"] += 1
        self._rest()

    def _judge(self, names: list[str]) -> None:
        """The bucket holds what it may; that is what it holds from then on."""
        far = self._witness.backend.tiers.far  # type: ignore[attr-defined]
        for name, blob in zip(names, far.open_many(names, MOST), strict=True):
            content, may = None if blob is None else bytes(blob.head), self._ledger.may(name)
            if content not in may:
                what = "is gone" if content is None else "is there" if may == {None} else "is not what was put"
                raise Wrong(f"{name} {what}")
            self._ledger.learn(name, content)
            self.counts["names compared with the bucket"] += 1
        self._ledger.settled()

    def _start_anew(self) -> None:
        """All is well: every entry is read through all tiers, what was told is judged, and a new process starts."""
        self._rest()
        self._step(Step(put_missing, 3 * KEYS), ())
        for _ in range(2):  # out of the far tiers, then the near ones
            self._step(Step(lambda scene: read_all(scene, list(range(KEYS))), 3 * KEYS), ())
        self._judge_lines()
        self._told.lines.clear()
        self._machine = self._started()

    def _judge_lines(self) -> None:
        for (place, kind), count in self._told.told().items():
            if count > 1 + (kind == "refused"):  # to be read, and to be written
                raise Wrong(f"{place} was told to be {kind} {count} times: {self._told.lines}")
        if len(set(self._told.lines)) < len(self._told.lines):
            raise Wrong(f"a line was told twice: {self._told.lines}")
        self.counts["warnings"] += len(self._told.lines)


def _of(step: Step, now: tuple[Fault, ...]) -> str:
    what = " and ".join(f"{fault.place}: {fault.kind}" for fault in now) or "nothing is wrong"
    return f"{getattr(step.do, '__name__', 'a step')} ({what})"
