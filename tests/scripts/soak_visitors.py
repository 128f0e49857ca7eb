"""Visitors of a soak whose server is a function."""

from __future__ import annotations

import random
from collections.abc import Callable

import httpx

from _soak_serve import Answer, Ledger, Question, Reference, Visitors

OWN = {"figures": {"method": "blend", "missing": 0}, "sources": [{"hit": True}] * 2}

MADE, OTHERWISE = ("blend", (True, True), 0, 0, 0), ("blend", (True, False), 1, 0, 0)


def held(text: str = "The bell", *distances: float) -> Reference:
    tokens = tuple(zip(("The", " be", "ll"), distances or (1.0, 1.0, 1.0), strict=True))
    return Reference(Answer(text, MADE), tokens)


def visitors(answer: Callable[[httpx.Request], httpx.Response]) -> Visitors:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here")
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    return Visitors(client, "m", [Question("q", body, [held()])], Ledger(), random.Random(0))
