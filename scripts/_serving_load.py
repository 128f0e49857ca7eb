"""The load generator: streaming requests to an OpenAI-compatible server, each sent at its time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from _serving import TimedQuestion

# Every request has a connection of its own: none waits for another one's answer.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16)
TIMEOUT = httpx.Timeout(None, connect=10.0)
UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Request:
    """Where a question goes, and in which words."""

    path: str
    body: Mapping[str, Any]


Words = Callable[[TimedQuestion], Request]


@dataclass
class Sample:
    """What became of one request; a moment is in seconds after the first moment of the load.

    at_s: when it was to be sent; late_s: so much later it was. pieces_s: when each piece of text came. tokens: of the answer,
    as the server counts them; prompt_tokens, cached_tokens: of the prompt.
    figures: what our own server says of the prefill. error: why it has no whole answer.
    """

    at_s: float
    late_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    done_s: float | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From when it was to be sent to the first text."""
        return self.pieces_s[0] - self.at_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first."""
        complete = self.error is None and self.tokens > 1 and self.pieces_s
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.tokens - 1) if complete else None

    @property
    def gaps_s(self) -> list[float]:
        """Between a piece of text and the next."""
        return [after - before for before, after in zip(self.pieces_s, self.pieces_s[1:], strict=False)]

    def plain(self) -> dict[str, Any]:
        """As JSON, without the text."""
        return {key: value for key, value in asdict(self).items() if key != "text"}


async def ask(client: httpx.AsyncClient, request: Request, sample: Sample, start: float) -> Sample:
    """Send a streaming request and fill in the sample; nothing is raised but a cancellation."""
    body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
    sample.late_s = time.perf_counter() - start - sample.at_s
    try:
        async with client.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                sample.error = _error(response.status_code, await response.aread())
                return sample
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _take(line[5:].strip(), sample, time.perf_counter() - start)
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
        return sample
    sample.done_s = time.perf_counter() - start
    if sample.error is None and not sample.tokens:
        sample.error = "the stream ended without usage"
    return sample


def _take(data: str, sample: Sample, now: float) -> None:
    """One event of the stream."""
    if data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        sample.error = str(event["error"].get("message", event["error"]))
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            sample.pieces_s.append(now)
            sample.text += text
    if own := event.get("kvblend"):
        sample.figures |= own.get("figures", {})
    if usage := event.get("usage"):
        sample.tokens, sample.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _error(status: int, content: bytes) -> str:
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {content[:200].decode(errors='replace')}"


async def open_loop(url: str, plan: Sequence[TimedQuestion], words: Words, drain_s: float) -> list[Sample]:
    """Send every question at its time; wait for answers until `drain_s` after the last, and give the others up."""
    async with httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=TIMEOUT, trust_env=False) as client:
        requests = [words(asked) for asked in plan]  # made before, so that sending takes no time
        samples = [Sample(asked.at_s) for asked in plan]
        start = time.perf_counter()
        tasks = []
        for sample, request in zip(samples, requests, strict=True):
            await asyncio.sleep(max(0.0, start + sample.at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(client, request, sample, start)))
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
        for task, sample in zip(tasks, samples, strict=True):
            if not task.done():
                task.cancel()
                sample.error = UNFINISHED
        await asyncio.gather(*tasks, return_exceptions=True)
    return samples


async def one_by_one(url: str, plan: Sequence[TimedQuestion], words: Words) -> list[Sample]:
    """Every question when the one before it is answered."""
    async with httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=TIMEOUT, trust_env=False) as client:
        found = []
        for asked in plan:
            start = time.perf_counter()
            found.append(await ask(client, words(asked), Sample(0.0), start))
        return found
