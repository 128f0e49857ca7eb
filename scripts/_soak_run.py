"""The soak itself: who comes when, what breaks when, what is looked at, and the verdict."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from _soak_clients import Question, Visitors
from _soak_judge import Reference, reference
from _soak_nonsense import CHAT
from _soak_store import BREAKS, broken
from _soak_watch import Held, growth, look

QUIET_S = 60.0  # in which what was opened for requests is to be closed again
TOGETHER = 8


async def references(client: httpx.AsyncClient, body: Mapping[str, Any]) -> list[Reference]:
    """The answer to a question asked alone, blended and in full. Raises SystemExit when there is none.

    Of full prefill nothing is kept: whoever asks the same would else be answered out of it, and nothing be blended any more.
    """
    found = []
    for own in ({"method": "blend"}, {"method": "full", "cold": True}):
        more = {"logprobs": True, "top_logprobs": 2, "kvblend": own}
        response = await client.post(CHAT, json={**body, **more})
        if response.status_code != 200:
            raise SystemExit(f"a question asked alone got status {response.status_code}: {response.text[:300]}")
        found.append(reference(response.json()))
    return found


async def capacity(client: httpx.AsyncClient, questions: Sequence[Question], seconds: float) -> float:
    """Requests per second when a few at a time are always being answered."""
    until, done = time.monotonic() + seconds, 0

    async def keep_asking(draws: random.Random) -> None:
        nonlocal done
        while time.monotonic() < until:
            response = await client.post(CHAT, json=draws.choice(questions).body)
            done += response.status_code == 200

    begin = time.monotonic()
    await asyncio.gather(*(keep_asking(random.Random(number)) for number in range(TOGETHER)))
    return done / (time.monotonic() - begin)


@dataclass
class Soak:
    """One run. rate: visitors per second. begun: when its clock started."""

    options: argparse.Namespace
    visitors: Visitors
    pid: int
    store: Path
    rate: float
    begun: float
    looks: list[Held] = field(default_factory=list)
    before: Held | None = None

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    async def settle(self) -> None:
        """One of each visitor, then quiet: what is held then is what may be held at the end."""
        someone = self.visitors
        for kind in (someone.whole, someone.stream, someone.leave, someone.nonsense, someone.huge, someone.change):
            await kind()
        await asyncio.sleep(self.options.idle)
        await self._stir()
        self.before = look(self.pid, self.now())
        self.begun = time.monotonic()

    async def run(self) -> None:
        """Everything at once until the time is over; those who are still there may stay until they are answered."""
        until = 60 * self.options.minutes
        others = [asyncio.create_task(one(until)) for one in (self._change, self._fail, self._look, self._tell)]
        visits = set()
        while self.now() < until:
            await asyncio.sleep(self.visitors.draws.expovariate(self.rate))
            visit = asyncio.create_task(self.visitors.visit())
            visits.add(visit)
            visit.add_done_callback(visits.discard)
        await asyncio.gather(*others, *visits)

    async def _change(self, until: float) -> None:
        while self.now() + self.options.change < until:
            await asyncio.sleep(self.options.change)
            try:
                await self.visitors.change()
            except httpx.HTTPError as error:
                self.visitors.ledger.wrong(f"documents: {type(error).__name__}: {error}")

    async def _fail(self, until: float) -> None:
        """Break the store in one way after another."""
        works, fails = self.options.fail
        for number in range(1_000_000):
            if self.now() + works + fails > until:
                return
            await asyncio.sleep(works)
            name = sorted(BREAKS)[number % len(BREAKS)]
            with broken(name, self.store, self.visitors.draws):
                self.visitors.broken = True
                self.visitors.ledger.count(f"store {name}")
                await asyncio.sleep(fails)
            self.visitors.broken, self.visitors.breaks = False, self.visitors.breaks + 1

    async def _look(self, until: float) -> None:
        while self.now() < until:
            self._see()
            await asyncio.sleep(min(5.0, until / 50))

    async def _tell(self, until: float) -> None:
        while self.now() < until:
            await asyncio.sleep(min(60.0, until / 4))
            if self.looks:
                held = self.looks[-1]
                about = f"{held.rss / 1e6:,.0f} MB, {held.threads} threads, {held.files} files"
                print(f"{self.now() / 60:6.1f} min  {about}; {self.visitors.ledger.line()}", flush=True)

    def _see(self) -> Held | None:
        try:
            self.looks.append(look(self.pid, self.now()))
        except OSError:
            return None
        return self.looks[-1]

    async def verdict(self) -> int:
        """Wait until all is quiet; print what was off; 1 when anything was."""
        assert self.before is not None
        until = self.now() + QUIET_S
        while (held := self._see()) and self._more(held) and self.now() < until:
            await asyncio.sleep(1)
            await self._stir()
        off = list(self.visitors.ledger.off)
        if held is None:
            off.append("the server is gone")
        elif more := self._more(held):
            off.append(f"left over after {QUIET_S:.0f} s of quiet: {more}")
        off += [*self._grown(), *filter(None, [self.visitors.ledger.too_few_blended()])]
        print(self.visitors.ledger.line())
        print(
            "\n".join(
                [f"OFF {line}" for line in off]
                or ["PASS: flat, nothing left over, every answer right or a clear error"]
            )
        )
        return 1 if off else 0

    async def _stir(self) -> None:
        """A light request: a server's pool lets idle threads go when it is used, not by itself."""
        with suppress(httpx.HTTPError):
            await self.visitors.client.get("/v1/documents")

    def _more(self, held: Held) -> str:
        """What there is more of than before, in words."""
        assert self.before is not None
        pairs = {"threads": (self.before.threads, held.threads), "open files": (self.before.files, held.files)}
        return ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in pairs.items() if now > was)

    def _grown(self) -> list[str]:
        whole = 60 * self.options.minutes
        looks = [one for one in self.looks if whole / 5 <= one.at_s <= whole]
        grown, allowed = growth(looks), 1e6 * self.options.grow + (0.05 * looks[0].rss if looks else 0.0)
        print(
            f"memory grew by {grown / 1e6:,.1f} MB after the first fifth of the time; {allowed / 1e6:,.0f} MB are allowed"
        )
        return [f"memory grew by {grown / 1e6:,.0f} MB"] if grown > allowed else []
