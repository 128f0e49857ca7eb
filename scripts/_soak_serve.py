"""The soak of a server: visitors who ask, leave and send nonsense, a store that fails, and the verdict on what came back."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, takewhile
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from _load import Request, Sample, ask
from _servers import CHAT
from blend.serve.events import IN_MEMORY
from blend.serve.failures import STORE_UNREACHABLE

CORPUS = "soak"
NOTICE = "notice number {} of the harbour office"  # words that stand in one notice and in no other
TIMEOUT_S = 300.0
MEGABYTE = 1 << 20
TIE = 1e-3  # nats between the two likeliest tokens; below it rounding decides
LEAST_BLENDED = 0.5  # of all answers that could be; with fewer a soak is one of something else
FULL_AS_EXPECTED = {"": "full as asked", STORE_UNREACHABLE: "full without the store"}
"""How a prompt got its KV that could not be blended, by the reason in its figures."""


class Answer(NamedTuple):
    """What came back.

    made: the caches that decide about it. how: its prompt got its KV: blended, computed, remembered, or in full as expected.
    """

    text: str
    made: tuple[Any, ...]
    how: str = "blended"

    @classmethod
    def of(cls, text: str, extension: Mapping[str, Any]) -> Answer:
        """From the text of a reply and its kvblend extension. Notes say that a KV correction did not fit."""
        figures = extension.get("figures", {})
        reused = figures.get("rows_reused", 0)
        if figures.get("reason") == IN_MEMORY or 0 < figures.get("rows", 0) <= reused + 1:
            return cls(text, ("full",), "remembered")
        if figures.get("method") == "full":
            return cls(text, ("full",), FULL_AS_EXPECTED.get(figures.get("reason"), "computed"))
        hits = tuple(bool(source.get("hit")) for source in extension.get("sources", ()))
        counts = (figures.get("missing"), reused, figures.get("rows_computed", 0))
        return cls(text, (figures.get("method"), hits, *counts, *figures.get("notes", ())))


class Reference(NamedTuple):
    """A question's answer asked alone. tokens: the text of each, with the distance in nats to the next likeliest."""

    answer: Answer
    tokens: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, document: Mapping[str, Any], text: str | None = None) -> Reference:
        """Of a whole answer with log-probabilities of two tokens. text: of the answer, if it is more than its content."""
        choice = document["choices"][0]
        tokens = []
        for token in choice["logprobs"]["content"]:
            likeliest, second = sorted((candidate["logprob"] for candidate in token["top_logprobs"]), reverse=True)
            tokens.append((token["token"], likeliest - second))
        words = choice["message"]["content"] if text is None else text
        return cls(Answer.of(words, document.get("kvblend", {})), tuple(tokens))

    def margin(self, text: str) -> float:
        """Nats between the two likeliest tokens where an answer first differs from this one."""
        same = sum(1 for _ in takewhile(bool, map(eq, self.answer.text, text)))
        end = 0
        for token, distance in self.tokens:
            end += len(token)
            if end > same:
                return distance
        return math.inf


def is_clear_error(content: bytes) -> bool:
    """Whether a body is an error in OpenAI's shape with a message."""
    try:
        error = json.loads(content)["error"]
        return all(isinstance(error[name], str) and error[name] for name in ("message", "type"))
    except (ValueError, KeyError, TypeError):
        return False


@dataclass
class Ledger:
    """What was seen. off: one line for each fault."""

    counts: Counter[str] = field(default_factory=Counter)
    off: list[str] = field(default_factory=list)

    def wrong(self, line: str) -> None:
        """Note a fault."""
        print(f"OFF {line}", flush=True)  # at once: hours may follow
        self.off.append(line)

    def judge(self, name: str, answer: Answer, references: Sequence[Reference]) -> None:
        """Compare a greedy answer with that of the same question made of the same caches, where there is one."""
        self.counts[answer.how] += 1
        same = [reference for reference in references if reference.answer.made == answer.made]
        if not same:
            self.counts["made of other caches"] += 1
        elif same[0].answer.text == answer.text:
            self.counts["same answer"] += 1
        elif (distance := same[0].margin(answer.text)) < TIE:
            self.counts["another likeliest token within rounding"] += 1
        else:
            texts = f"{answer.text!r} instead of {same[0].answer.text!r}"
            self.wrong(f"{name}: {texts}, {distance:.4f} nats apart, both made of {answer.made}")

    def too_few_blended(self) -> str:
        """How the answers were made, where fewer than `LEAST_BLENDED` were blended; else ""."""
        blended, computed, remembered = (self.counts[how] for how in ("blended", "computed", "remembered"))
        if blended > LEAST_BLENDED * (blended + computed + remembered):
            return ""
        return f"too few answers were blended: {blended} blended, {computed} computed, {remembered} remembered"

    def line(self) -> str:
        """All counts."""
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))


def nonsense(model: str, megabytes: int) -> list[tuple[str, bytes]]:
    """What deserves a status from 400 to 499, by name: no JSON, no request, what does not exist, and so many megabytes."""
    good = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    bodies = {
        "no messages": {"model": model},
        "an unknown field": {**good, "temprature": 0},
        "a document that is not there": {**good, "documents": [{"id": "no-such-document"}]},
    }
    text = json.dumps(good).encode()
    return [
        *((name, json.dumps(body).encode()) for name, body in bodies.items()),
        ("half of it", text[: len(text) // 2]),
        ("no UTF-8", text.replace(b"Hello", b"\xff\xfe\xfa")),
        ("very deep", b"[" * 100_000),
        ("megabytes of a message", text.replace(b"Hello", b"an endless question " * (megabytes * MEGABYTE // 20 + 1))),
        ("megabytes of nothing", b"\x00" * (megabytes * MEGABYTE)),
    ]


class Question(NamedTuple):
    """A question that is asked again and again. references: its answers alone, one for each way of making it."""

    name: str
    body: Mapping[str, Any]
    references: Sequence[Reference]


@dataclass
class Visitors:
    """All visitors. failing_until: until when the store failed last. oldest, newest: numbers of the notices in the corpus."""

    client: httpx.AsyncClient
    model: str
    questions: Sequence[Question]
    ledger: Ledger
    draws: random.Random
    megabytes: int = 10
    failing_until: float = -math.inf
    oldest: int = 1
    newest: int = 0

    @property
    def kinds(self) -> dict[Callable[[], Awaitable[None]], int]:
        """What visitors come for, with how often."""
        return {self.ask: 72, self.leave: 10, self.nonsense: 10, self.retrieve: 8}

    async def visit(self, kind: Callable[[], Awaitable[None]]) -> None:
        """Send one visitor. Nothing is raised."""
        try:
            await asyncio.wait_for(kind(), TIMEOUT_S)
        except TimeoutError:
            self.ledger.wrong(f"{kind.__name__}: no answer within {TIMEOUT_S:.0f} s")
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self.ledger.wrong(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def ask(self) -> None:
        """Ask for an answer piece by piece."""
        question = self.draws.choice(self.questions)
        since = time.monotonic()
        sample = await ask(self.client, Request(CHAT, question.body), Sample(0.0), time.perf_counter())
        if sample.refused is not None:
            self._refused("ask", *sample.refused, since)
        elif sample.error is not None or not sample.ended:
            self.ledger.wrong(f"ask: {sample.error or 'ended without [DONE]'}")
        else:
            self.ledger.judge(question.name, Answer.of(sample.text, sample.extension), question.references)

    async def leave(self) -> None:
        """Go away before the first word or after some."""
        question = self.draws.choice(self.questions)
        pieces = self.draws.randrange(4)
        request = self.client.stream("POST", CHAT, json={**question.body, "stream": True})
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(TIMEOUT_S if pieces else 0.05), request as response:
                lines = response.aiter_lines()
                for _ in range(pieces):
                    await anext(lines)
        self.ledger.counts["left"] += 1

    async def nonsense(self) -> None:
        """Send what is to be refused; a server may hang up on megabytes."""
        name, content = self.draws.choice(nonsense(self.model, self.megabytes))
        since = time.monotonic()
        try:
            response = await self.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if len(content) < MEGABYTE:
                raise
            self.ledger.counts["hung up on megabytes"] += 1
            return
        if response.status_code < 400:
            self.ledger.wrong(f"nonsense, {name}: status {response.status_code}")
        else:
            self._refused(f"nonsense, {name}", response.status_code, response.content, since)

    async def retrieve(self) -> None:
        """Ask the corpus that changes: what was removed before must not be among the sources."""
        since = time.monotonic()
        removed = [NOTICE.format(number) for number in range(1, self.oldest)]
        question = [{"role": "user", "content": "What does the newest notice say?"}]
        body = {"model": self.model, "messages": question, "max_tokens": 4, "temperature": 0}
        body["kvblend"] = {"retrieve": {"top_k": 3, "corpus": CORPUS}}
        response = await self.client.post(CHAT, json=body)
        if response.status_code != 200:
            self._refused("retrieve", response.status_code, response.content, since)
            return
        texts = [source["text"] for source in response.json()["kvblend"]["sources"]]
        stale = [text for text in texts if any(words in text for words in removed)]
        if stale:
            self.ledger.wrong(f"retrieve: a source that was removed before: {stale[0][:80]!r}")
        else:
            self.ledger.counts["retrieved"] += 1

    async def change(self) -> None:
        """Add a notice, or remove the oldest of more than three."""
        since = time.monotonic()
        removes = self.newest - self.oldest >= 3
        if removes:
            response = await self.client.delete(f"/v1/documents/notice-{self.oldest}", params={"corpus": CORPUS})
        else:
            number = self.newest + 1
            text = f"This is {NOTICE.format(number)}. " + f"Boats leave at {8 + number % 9} o'clock. " * 20
            document = {"id": f"notice-{number}", "title": NOTICE.format(number), "text": text}
            response = await self.client.post("/v1/documents", json={"documents": [document], "corpus": CORPUS})
        if response.status_code >= 300:
            self._refused("documents", response.status_code, response.content, since)
            return
        self.oldest += removes
        self.newest += not removes
        self.ledger.counts["corpus changed"] += 1

    def _refused(self, name: str, status: int, content: bytes, since: float) -> None:
        """Judge an answer with another status than 200. since: when it was asked for; the store may have failed since then."""
        if not is_clear_error(content):
            self.ledger.wrong(f"{name}: status {status} without a clear error: {content[:120]!r}")
        elif status >= 500 and self.failing_until < since:
            self.ledger.wrong(f"{name}: status {status} while nothing was broken: {content[:200]!r}")
        else:
            self.ledger.counts[f"status {status}"] += 1


BREAKS = ("blocked", "damaged", "gone")


@contextmanager
def broken(name: str, store: Path, draws: random.Random) -> Iterator[None]:
    """Have the store fail until the end of the block: gone, blocked by a file, or damaged for the server to mend."""
    if name == "damaged":
        entries = sorted((store / "kv" / "objects").rglob("*.safetensors"))
        for entry in draws.sample(entries, -(-len(entries) // 10)):
            half = entry.with_suffix(".half")
            half.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
            half.replace(entry)  # a new file: damage is found when a file is opened
        yield
        return
    place = store / "kv" if name == "gone" else store / "kv" / "objects"
    away = place.with_name(f"{place.name}.away")
    place.rename(away)
    if name == "blocked":
        place.write_bytes(b"")
    try:
        yield
    finally:
        if name == "blocked":
            place.unlink()
        shutil.rmtree(place, ignore_errors=True)  # the server may have made it anew
        away.rename(place)


async def references(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    texts_of: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
) -> list[Reference]:
    """The answers to a question asked alone, blended and in full. Of full prefill nothing is kept, or nothing would blend.

    texts_of: the texts of a reply's answers; by default their content.
    """
    answers = []
    for extension in ({"method": "blend"}, {"method": "full", "cold": True}):
        response = await client.post(CHAT, json={**body, "logprobs": True, "top_logprobs": 2, "kvblend": extension})
        if response.status_code != 200:
            raise SystemExit(f"a question asked alone got status {response.status_code}: {response.text[:300]}")
        document = response.json()
        answers.append(Reference.of(document, texts_of(document)[0] if texts_of else None))
    return answers


class ProcessUse(NamedTuple):
    """What a process uses: when it was looked at, bytes of memory, threads, open files."""

    at_s: float
    rss: int
    threads: int
    files: int


def look(pid: int, at_s: float) -> ProcessUse:
    """What the process uses now. Raises SystemExit when it is gone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    if "VmRSS" not in status:
        raise SystemExit("OFF the server is gone")
    kilobytes, threads = (int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmRSS", "Threads"))
    return ProcessUse(at_s, kilobytes << 10, threads, len(list(Path(f"/proc/{pid}/fd").iterdir())))


def growth(looks: Sequence[ProcessUse]) -> float:
    """Bytes that memory grows by from the first tenth of the looks to the last; their medians do not see peaks."""
    tenth = -(-len(looks) // 10)
    first, last = (median(use.rss for use in some) for some in (looks[:tenth], looks[-tenth:]))
    return last - first


@dataclass
class Soak:
    """One run. quiet_s: in which everything opened for requests must be closed again. before: what the server held at rest."""

    options: argparse.Namespace
    visitors: Visitors
    pid: int
    store: Path
    quiet_s: float = 60.0
    begun: float = field(default_factory=time.monotonic)
    looks: list[ProcessUse] = field(default_factory=list)
    before: ProcessUse | None = None

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    async def settle(self) -> None:
        """As many of each visitor as come at a time, then quiet: what the server holds then it may hold at the end."""
        visitors = self.visitors
        await visitors.change()
        for kind in visitors.kinds:
            await asyncio.gather(*(visitors.visit(kind) for _ in range(self.options.visitors)))
        await asyncio.sleep(self.options.idle)
        await self._stir()
        self.before = look(self.pid, self.now())
        self.begun = time.monotonic()

    async def run(self) -> None:
        """Everything at once until the time is over, then the answers that are still due."""
        until = 60 * self.options.minutes
        visitors = [self._come(until) for _ in range(self.options.visitors)]
        await asyncio.gather(self._change(until), self._fail(until), self._watch(until), *visitors)

    async def _come(self, until: float) -> None:
        visitors = self.visitors
        kinds = visitors.kinds
        while self.now() < until:
            await visitors.visit(*visitors.draws.choices(list(kinds), weights=list(kinds.values())))
            await asyncio.sleep(visitors.draws.expovariate(10))

    async def _change(self, until: float) -> None:
        while self.now() + self.options.change < until:
            await asyncio.sleep(self.options.change)
            await self.visitors.visit(self.visitors.change)

    async def _fail(self, until: float) -> None:
        """Break the store in one way after another."""
        works, fails = self.options.fail
        names = cycle(BREAKS)
        while self.now() + works + fails <= until:
            await asyncio.sleep(works)
            name = next(names)
            with broken(name, self.store, self.visitors.draws):
                self.visitors.failing_until = math.inf
                self.visitors.ledger.counts[f"store {name}"] += 1
                await asyncio.sleep(fails)
            self.visitors.failing_until = time.monotonic()

    async def _watch(self, until: float) -> None:
        """Look at the server every few seconds, and print every twelfth look."""
        while self.now() < until:
            self.looks.append(look(self.pid, self.now()))
            if len(self.looks) % 12 == 0:
                print(f"{self.now() / 60:6.1f} min  {self.looks[-1]}; {self.visitors.ledger.line()}", flush=True)
            await asyncio.sleep(min(5.0, until / 50))

    async def verdict(self) -> int:
        """Wait until all is quiet; print what was off; 1 when anything was."""
        until = self.now() + self.quiet_s
        while (left_over := self._left_over()) and self.now() < until:
            await asyncio.sleep(1)
            await self._stir()
        ledger = self.visitors.ledger
        off = [*ledger.off, *filter(None, [left_over, self._grown(), ledger.too_few_blended()])]
        print(ledger.line())
        for line in off:
            print(f"OFF {line}")
        if not off:
            print("PASS: flat, nothing left over, every answer right or a clear error")
        return int(bool(off))

    async def _stir(self) -> None:
        """Send a light request: a server's pool lets idle threads go when it is used."""
        with suppress(httpx.HTTPError):
            await self.visitors.client.get("/v1/documents")

    def _left_over(self) -> str:
        """What there is more of than before, in words."""
        assert self.before is not None
        use = look(self.pid, self.now())
        if use.threads <= self.before.threads and use.files <= self.before.files:
            return ""
        return f"left over in quiet: {use}, before {self.before}"

    def _grown(self) -> str:
        """By how much memory grew, where that was too much; else ""."""
        duration = 60 * self.options.minutes
        looks = [use for use in self.looks if duration / 5 <= use.at_s]
        grown = growth(looks) / 1e6
        allowed = self.options.grow + 0.05 * looks[0].rss / 1e6
        print(f"memory grew by {grown:,.1f} MB after the first fifth of the time; allowed: {allowed:,.0f} MB")
        return f"memory grew by {grown:,.0f} MB" if grown > allowed else ""
