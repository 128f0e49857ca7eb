"""The clients of `scripts/soak_serve`: they ask and wait, leave, send nonsense, change the corpus."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from _soak_judge import Answer, Ledger, Reference
from _soak_nonsense import CHAT, Nonsense, huge, nonsense

CORPUS = "soak"
PATIENCE_S = 300.0


@dataclass
class Question:
    """What is asked again and again; its sources never change. references: its answers alone, one for each way of making it."""

    name: str
    body: Mapping[str, Any]
    references: list[Reference] = field(default_factory=list)


@dataclass
class Visitors:
    """Everybody who comes.

    megabytes: of the largest bodies. broken: whether the store fails now; breaks: how often it was mended. documents: number
    -> id of the notices that are there; removed: the numbers of those that were.
    """

    client: httpx.AsyncClient
    model: str
    questions: Sequence[Question]
    ledger: Ledger
    draws: random.Random
    megabytes: int = 10
    broken: bool = False
    breaks: int = 0
    documents: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    number: int = 0

    async def visit(self) -> None:
        """Somebody, by chance. Nothing is raised."""
        kinds = {self.whole: 20, self.stream: 52, self.leave: 10, self.nonsense: 9, self.huge: 1, self.retrieve: 8}
        [kind] = self.draws.choices(list(kinds), weights=list(kinds.values()))
        name = kind.__name__
        self.ledger.count(f"came: {name}")
        try:
            await asyncio.wait_for(kind(), PATIENCE_S)
        except TimeoutError:
            self.ledger.wrong(f"{name}: no answer within {PATIENCE_S:.0f} s")
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self.ledger.wrong(f"{name}: {type(error).__name__}: {error}")

    async def whole(self) -> None:
        """An answer in one piece."""
        question, breaks, broken = self.draws.choice(self.questions), self.breaks, self.broken
        response = await self.client.post(CHAT, json=question.body)
        if response.status_code != 200:
            return self._refused("whole", response.status_code, response.content, breaks, broken)
        document = response.json()
        answer = Answer.of(document["choices"][0]["message"]["content"], document.get("kvblend", {}))
        return self.ledger.judge(question.name, answer, question.references)

    async def stream(self) -> None:
        """An answer piece by piece."""
        question, breaks, broken = self.draws.choice(self.questions), self.breaks, self.broken
        async with self.client.stream("POST", CHAT, json={**question.body, "stream": True}) as response:
            if response.status_code != 200:
                content = await response.aread()
                return self._refused("stream", response.status_code, content, breaks, broken)
            text, told, ended = "", dict[str, Any](), False
            async for line in response.aiter_lines():
                event = json.loads(line[5:]) if line.startswith("data:") and "[DONE]" not in line else {}
                if "error" in event:
                    return self._refused("stream", 500, line[5:].encode(), breaks, broken)
                told = event.get("kvblend") or told
                text += "".join((choice["delta"].get("content") or "") for choice in event.get("choices", ()))
                ended = ended or "[DONE]" in line
        if not ended:
            return self.ledger.wrong("stream: ended without [DONE]")
        return self.ledger.judge(question.name, Answer.of(text, told), question.references)

    async def leave(self) -> None:
        """Somebody who goes away, before the first word or after some."""
        question, pieces = self.draws.choice(self.questions), self.draws.randrange(4)
        request = self.client.stream("POST", CHAT, json={**question.body, "stream": True})
        try:
            async with asyncio.timeout(0.05 if pieces == 0 else PATIENCE_S), request as response:
                async for _ in response.aiter_lines():
                    pieces -= 1
                    if pieces <= 0:
                        break
        except TimeoutError:
            pass
        self.ledger.count("left")

    async def nonsense(self) -> None:
        """What is to be refused."""
        await self._bad(self.draws.choice(nonsense(self.model)))

    async def huge(self) -> None:
        """Megabytes; a server may hang up on whoever sends so much."""
        try:
            await self._bad(self.draws.choice(huge(self.model, self.megabytes)))
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            self.ledger.count("hung up on megabytes")

    async def _bad(self, one: Nonsense) -> None:
        breaks, broken = self.breaks, self.broken
        headers = {"content-type": "application/json"}
        response = await self.client.request(one.method, one.path, content=one.content, headers=headers)
        if response.status_code < 400:
            return self.ledger.wrong(f"nonsense, {one.name}: status {response.status_code}")
        return self._refused(f"nonsense, {one.name}", response.status_code, response.content, breaks, broken)

    async def retrieve(self) -> None:
        """A question to the corpus that changes: what was removed before it came must not be among its sources."""
        if not self.documents:
            return None
        breaks, broken, removed = self.breaks, self.broken, set(self.removed)
        own = {"retrieve": {"top_k": 3, "corpus": CORPUS}}
        question = [{"role": "user", "content": "What does the newest notice say?"}]
        body = {"model": self.model, "messages": question, "max_tokens": 4, "temperature": 0, "kvblend": own}
        response = await self.client.post(CHAT, json=body)
        if response.status_code != 200:
            return self._refused("retrieve", response.status_code, response.content, breaks, broken)
        texts = [source["text"] for source in response.json()["kvblend"]["sources"]]
        gone = [text for text in texts if any(notice_name(number) in text for number in removed)]
        if gone:
            return self.ledger.wrong(f"retrieve: a source that was removed before: {gone[0][:80]!r}")
        return self.ledger.count("retrieved")

    async def change(self) -> None:
        """Add a document, or remove the oldest of more than three."""
        breaks, broken = self.breaks, self.broken
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
            document = {"id": f"notice-{number}", "title": notice_name(number), "text": notice(number)}
            response = await self.client.post("/v1/documents", json={"documents": [document], "corpus": CORPUS})
            if response.status_code < 300:
                self.documents[number] = document["id"]
        if response.status_code >= 300:
            return self._refused("documents", response.status_code, response.content, breaks, broken)
        return self.ledger.count("corpus changed")

    def _refused(self, name: str, status: int, content: bytes, breaks: int, broken: bool) -> None:
        """breaks, broken: as they were when it came; the store may have failed at any moment since."""
        excused = broken or self.broken or breaks != self.breaks
        self.ledger.refused(name, status, content, expected=excused)


def notice_name(number: str) -> str:
    """What stands in one notice and in no other."""
    return f"notice number {number} of the harbour office"


def notice(number: str) -> str:
    """A document of a few sentences."""
    hours = ", ".join(f"{8 + hour} o'clock" for hour in range(int(number) % 7 + 2))
    return f"This is {notice_name(number)}. " + f"Boats leave at {hours} on day {number}. " * 12
