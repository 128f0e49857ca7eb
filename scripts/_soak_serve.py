"""The soak of a server: visitors who ask, leave and send nonsense, a store that fails, and the verdict on what came back.

An answer is right when it is that of its question asked alone and made of the same caches, or a clear error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx

from _load import Request, Sample, ask
from _servers import CHAT, ProcessUse, growth, look
from blend.serve.events import IN_MEMORY

CORPUS = "soak"
NOTICE = "notice number {} of the harbour office"  # words that stand in one notice and in no other
TIMEOUT_S = 300.0
MEGABYTE = 1 << 20
TIE = 1e-3  # nats between the two likeliest tokens; below it rounding decides
LEAST_BLENDED = 0.5  # of all answers; with fewer a soak is one of something else

How = Literal["blended", "computed", "remembered"]


class Answer(NamedTuple):
    """What came back. made: the caches that decide about it. how: its prompt got its KV."""

    text: str
    made: tuple[Any, ...]
    how: How = "blended"

    @classmethod
    def of(cls, text: str, extension: Mapping[str, Any]) -> Answer:
        """From the text of a reply and its kvblend extension."""
        return cls(text, made_of(extension), how_made(extension.get("figures", {})))


class Reference(NamedTuple):
    """A question's answer asked alone. tokens: the text of each, with the distance in nats to the next likeliest."""

    answer: Answer
    tokens: tuple[tuple[str, float], ...]


def how_made(figures: Mapping[str, Any]) -> How:
    """Blended, computed in full, or remembered: an earlier prompt left full prefill of all that could be blended."""
    all_reused = 0 < figures.get("rows", 0) <= figures.get("rows_reused", 0) + 1
    if figures.get("reason") == IN_MEMORY or all_reused:
        return "remembered"
    return "computed" if figures.get("method") == "full" else "blended"


def made_of(extension: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an answer was made of: full prefill, or the hits, how many better caches were missing, rows reused and computed.

    And the notes: they say, among other things, that a KV correction was missing or did not fit.
    """
    figures = extension.get("figures", {})
    if how_made(figures) != "blended":
        return ("full",)
    hits = tuple(bool(source.get("hit")) for source in extension.get("sources", ()))
    rows = figures.get("rows_reused", 0), figures.get("rows_computed", 0)
    return (figures.get("method"), hits, figures.get("missing"), *rows, *figures.get("notes", ()))


def reference(document: Mapping[str, Any]) -> Reference:
    """Of a whole answer with log-probabilities of two tokens."""
    choice = document["choices"][0]
    tokens = []
    for token in choice["logprobs"]["content"]:
        logprobs = [candidate["logprob"] for candidate in token["top_logprobs"]]
        likeliest, second, *_ = sorted([*logprobs, -math.inf], reverse=True)
        tokens.append((token["token"], likeliest - second))
    return Reference(Answer.of(choice["message"]["content"], document.get("kvblend", {})), tuple(tokens))


def margin(reference: Reference, text: str) -> float:
    """Nats between the two likeliest tokens where an answer first differs from its reference."""
    pairs = zip(reference.answer.text, text, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    end = 0
    for token, distance in reference.tokens:
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
    """What was seen. off: one line for each fault, the first twenty."""

    counts: Counter[str] = field(default_factory=Counter)
    off: list[str] = field(default_factory=list)

    def count(self, kind: str) -> None:
        """Count one more of this kind."""
        self.counts[kind] += 1

    def wrong(self, line: str) -> None:
        """Note a fault."""
        self.counts["OFF"] += 1
        print(f"OFF {line}", flush=True)  # at once: hours may follow
        if len(self.off) < 20:
            self.off.append(line)

    def judge(self, name: str, answer: Answer, references: Sequence[Reference]) -> None:
        """Compare a greedy answer with that of the same question made of the same caches, where there is one."""
        self.count(answer.how)
        same = [reference for reference in references if reference.answer.made == answer.made]
        if not same:
            self.count("made of other caches")
        elif same[0].answer.text == answer.text:
            self.count("same answer")
        elif (distance := margin(same[0], answer.text)) < TIE:
            self.count("another likeliest token within rounding")
        else:
            texts = f"{answer.text!r} instead of {same[0].answer.text!r}"
            self.wrong(f"{name}: {texts}, {distance:.4f} nats apart, both made of {answer.made}")

    def refused(self, name: str, status: int, content: bytes, *, expected: bool) -> None:
        """Judge an answer with another status than 200. expected: whether the store was failing."""
        if not is_clear_error(content):
            self.wrong(f"{name}: status {status} without a clear error: {content[:120]!r}")
        elif status >= 500 and not expected:
            self.wrong(f"{name}: status {status} while nothing was broken: {content[:200]!r}")
        else:
            self.count(f"status {status}")

    def too_few_blended(self) -> str:
        """How the answers were made, where fewer than `LEAST_BLENDED` were blended; else ""."""
        counts = {how: self.counts[how] for how in get_args(How)}
        if counts["blended"] and counts["blended"] >= LEAST_BLENDED * sum(counts.values()):
            return ""
        return "too few answers were blended: " + ", ".join(f"{count} {how}" for how, count in counts.items())

    def line(self) -> str:
        """All counts."""
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))


class Nonsense(NamedTuple):
    """A request that deserves a status from 400 to 499."""

    name: str
    content: bytes
    path: str = CHAT


def nonsense(model: str, megabytes: int) -> tuple[Nonsense, ...]:
    """Bodies that are no JSON, JSON that is no request, requests for what does not exist, and so many megabytes."""
    good = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    bodies: Mapping[str, Any] = {
        "no messages": {"model": model},
        "an unknown field": {**good, "temprature": 0},
        "tokens in words": {**good, "max_tokens": "many"},
        "an unknown model": {**good, "model": "nobody/nothing"},
        "a document that is not there": {**good, "documents": [{"id": "no-such-document"}]},
        "a corpus that is not there": {**good, "kvblend": {"retrieve": {"corpus": "no-such-corpus"}}},
    }
    text = json.dumps(good).encode()
    long = text.replace(b"Hello", b"a question that does not end " * (megabytes * MEGABYTE // 29 + 1))
    return (
        *(Nonsense(name, json.dumps(body).encode()) for name, body in bodies.items()),
        Nonsense("nothing", b""),
        Nonsense("half of it", text[: len(text) // 2]),
        Nonsense("no UTF-8", text.replace(b"Hello", b"\xff\xfe\xfa")),
        Nonsense("very deep", b"[" * 100_000),
        Nonsense("another path", text, "/v1/nothing"),
        Nonsense("megabytes of a message", long),
        Nonsense("megabytes of nothing", b"\x00" * (megabytes * MEGABYTE)),
    )


@dataclass
class Question:
    """A question that is asked again and again. references: its answers alone, one for each way of making it."""

    name: str
    body: Mapping[str, Any]
    references: list[Reference] = field(default_factory=list)


@dataclass
class Visitors:
    """All visitors of the server.

    megabytes: of the largest bodies. failing_until: the moment until which the store failed last. documents: number -> id of
    the notices in the corpus; removed: numbers of those that were.
    """

    client: httpx.AsyncClient
    model: str
    questions: Sequence[Question]
    ledger: Ledger
    draws: random.Random
    megabytes: int = 10
    failing_until: float = -math.inf
    documents: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    number: int = 0

    async def visit(self) -> None:
        """Send one visitor by chance. Nothing is raised."""
        kinds = {self.ask: 72, self.leave: 10, self.nonsense: 10, self.retrieve: 8}
        [kind] = self.draws.choices(list(kinds), weights=list(kinds.values()))
        name = kind.__name__
        self.ledger.count(f"came: {name}")
        try:
            await asyncio.wait_for(kind(), TIMEOUT_S)
        except TimeoutError:
            self.ledger.wrong(f"{name}: no answer within {TIMEOUT_S:.0f} s")
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self.ledger.wrong(f"{name}: {type(error).__name__}: {error}")

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
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05 if pieces == 0 else TIMEOUT_S), request as response:
                async for _ in response.aiter_lines():
                    pieces -= 1
                    if pieces <= 0:
                        break
        self.ledger.count("left")

    async def nonsense(self) -> None:
        """Send what is to be refused; a server may hang up on megabytes."""
        name, content, path = self.draws.choice(nonsense(self.model, self.megabytes))
        since = time.monotonic()
        headers = {"content-type": "application/json"}
        try:
            response = await self.client.post(path, content=content, headers=headers)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if len(content) < MEGABYTE:
                raise
            return self.ledger.count("hung up on megabytes")
        if response.status_code < 400:
            return self.ledger.wrong(f"nonsense, {name}: status {response.status_code}")
        return self._refused(f"nonsense, {name}", response.status_code, response.content, since)

    async def retrieve(self) -> None:
        """Ask the corpus that changes: what was removed before must not be among the sources."""
        if not self.documents:
            return None
        since = time.monotonic()
        removed = set(self.removed)
        question = [{"role": "user", "content": "What does the newest notice say?"}]
        body = {"model": self.model, "messages": question, "max_tokens": 4, "temperature": 0}
        body["kvblend"] = {"retrieve": {"top_k": 3, "corpus": CORPUS}}
        response = await self.client.post(CHAT, json=body)
        if response.status_code != 200:
            return self._refused("retrieve", response.status_code, response.content, since)
        texts = [source["text"] for source in response.json()["kvblend"]["sources"]]
        stale = [text for text in texts if any(NOTICE.format(number) in text for number in removed)]
        if stale:
            return self.ledger.wrong(f"retrieve: a source that was removed before: {stale[0][:80]!r}")
        return self.ledger.count("retrieved")

    async def change(self) -> None:
        """Add a document, or remove the oldest of more than three."""
        since = time.monotonic()
        if len(self.documents) > 3:
            number = next(iter(self.documents))
            place = f"/v1/documents/{self.documents[number]}"
            response = await self.client.delete(place, params={"corpus": CORPUS})
            if response.status_code < 300:
                del self.documents[number]
                self.removed.add(number)
        else:
            self.number += 1
            number = str(self.number)
            times = f"Boats leave at {8 + self.number % 9} o'clock on day {number}. " * 12
            text = f"This is {NOTICE.format(number)}. {times}"
            document = {"id": f"notice-{number}", "title": NOTICE.format(number), "text": text}
            response = await self.client.post("/v1/documents", json={"documents": [document], "corpus": CORPUS})
            if response.status_code < 300:
                self.documents[number] = document["id"]
        if response.status_code >= 300:
            return self._refused("documents", response.status_code, response.content, since)
        return self.ledger.count("corpus changed")

    def _refused(self, name: str, status: int, content: bytes, since: float) -> None:
        """since: when the request was sent; the store may have failed at any moment since."""
        self.ledger.refused(name, status, content, expected=self.failing_until >= since)


BREAKS = ("blocked", "damaged", "gone")


@contextmanager
def broken(name: str, store: Path, draws: random.Random) -> Iterator[None]:
    """Have the store fail until the end of the block: gone, blocked by a file, or damaged for the server to mend."""
    if name == "damaged":
        entries = sorted((store / "kv" / "objects").rglob("*.safetensors"))
        for entry in draws.sample(entries, max(1, len(entries) // 10)) if entries else ():
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
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
        away.rename(place)


async def references(client: httpx.AsyncClient, body: Mapping[str, Any]) -> list[Reference]:
    """The answers to a question asked alone, blended and in full. Raises SystemExit when there is none.

    Of full prefill nothing is kept: the same question would else be answered out of it, and nothing be blended any more.
    """
    answers = []
    for extension in ({"method": "blend"}, {"method": "full", "cold": True}):
        response = await client.post(CHAT, json={**body, "logprobs": True, "top_logprobs": 2, "kvblend": extension})
        if response.status_code != 200:
            raise SystemExit(f"a question asked alone got status {response.status_code}: {response.text[:300]}")
        answers.append(reference(response.json()))
    return answers


@dataclass
class Soak:
    """One run. quiet_s: in which everything opened for requests must be closed again."""

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
        for kind in (visitors.ask, visitors.retrieve, visitors.nonsense, visitors.leave):
            await asyncio.gather(*(kind() for _ in range(self.options.visitors)))
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
        while self.now() < until:
            await self.visitors.visit()
            await asyncio.sleep(self.visitors.draws.expovariate(10))

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
        names = cycle(BREAKS)
        while self.now() + works + fails <= until:
            await asyncio.sleep(works)
            name = next(names)
            with broken(name, self.store, self.visitors.draws):
                self.visitors.failing_until = math.inf
                self.visitors.ledger.count(f"store {name}")
                await asyncio.sleep(fails)
            self.visitors.failing_until = time.monotonic()

    async def _watch(self, until: float) -> None:
        shown = self.now()
        while self.now() < until:
            use = self._look()
            if use and self.now() - shown > min(60.0, until / 4):
                shown = self.now()
                about = f"{use.rss / 1e6:,.0f} MB, {use.threads} threads, {use.files} files"
                print(f"{self.now() / 60:6.1f} min  {about}; {self.visitors.ledger.line()}", flush=True)
            await asyncio.sleep(min(5.0, until / 50))

    def _look(self) -> ProcessUse | None:
        try:
            self.looks.append(look(self.pid, self.now()))
        except OSError:
            return None
        return self.looks[-1]

    async def verdict(self) -> int:
        """Wait until all is quiet; print what was off; 1 when anything was."""
        until = self.now() + self.quiet_s
        while (use := self._look()) and self._left_over(use) and self.now() < until:
            await asyncio.sleep(1)
            await self._stir()
        off = list(self.visitors.ledger.off)
        if use is None:
            off.append("the server is gone")
        elif left_over := self._left_over(use):
            off.append(f"left over after {self.quiet_s:.0f} s of quiet: {left_over}")
        off += filter(None, [self._grown(), self.visitors.ledger.too_few_blended()])
        print(self.visitors.ledger.line())
        for line in off:
            print(f"OFF {line}")
        if not off:
            print("PASS: flat, nothing left over, every answer right or a clear error")
        return int(bool(off))

    async def _stir(self) -> None:
        """Send a light request: a server's pool lets idle threads go when it is used."""
        with suppress(httpx.HTTPError):
            await self.visitors.client.get("/v1/documents")

    def _left_over(self, use: ProcessUse) -> str:
        """What there is more of than before, in words."""
        assert self.before is not None
        pairs = {"threads": (self.before.threads, use.threads), "open files": (self.before.files, use.files)}
        return ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in pairs.items() if now > was)

    def _grown(self) -> str:
        """By how much memory grew, where that was too much; else ""."""
        duration = 60 * self.options.minutes
        looks = [use for use in self.looks if duration / 5 <= use.at_s <= duration]
        grown = growth(looks) / 1e6
        allowed = self.options.grow + 0.05 * max((use.rss for use in looks[:1]), default=0) / 1e6
        print(f"memory grew by {grown:,.1f} MB after the first fifth of the time; allowed: {allowed:,.0f} MB")
        return f"memory grew by {grown:,.0f} MB" if grown > allowed else ""
