"""Questions and their times, drawn from a seed whatever the server, and the load generator that sends each at its time."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from _paths import documentation, project_environment, run_whole  # first: it may start another Python

# isort: split
import httpx
import numpy as np
from numpy.typing import NDArray

FULLNESS = 0.6  # of the tokens that a passage may have; shorter ones are left out, so that prompts are alike
# Every request has a connection of its own: none waits for another one's answer.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16)
TIMEOUT = httpx.Timeout(None, connect=10.0)
UNFINISHED = "unfinished"


class Passage(NamedTuple):
    """A text under a title. tokens: as it stands in a prompt."""

    title: str
    text: str
    tokens: int


class Corpus(NamedTuple):
    """passages: the most popular first. questions: what may be asked, whatever the passages."""

    passages: tuple[Passage, ...]
    questions: tuple[str, ...]


class TimedQuestion(NamedTuple):
    """A question, the passages to answer it from, and when it comes: seconds after the start."""

    at_s: float
    question: str
    passages: tuple[Passage, ...]


class Request(NamedTuple):
    """Where a question goes, and its body."""

    path: str
    body: Mapping[str, Any]


Words = Callable[[TimedQuestion], Request]


def arrivals(rate: float, seconds: float, draws: np.random.Generator) -> NDArray[np.float64]:
    """Times of a Poisson process of `rate` a second below `seconds`, given that there are as many as expected: uniform ones."""
    return np.sort(draws.uniform(0.0, seconds, round(rate * seconds)))


def zipf(count: int, exponent: float) -> NDArray[np.float64]:
    """Chances of ranks 1 to `count`, in proportion to `rank ** -exponent`; 0 makes all alike."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


class Traffic(NamedTuple):
    """Where questions are drawn from. exponent: of the passages' popularity. context_tokens: of a question, at most."""

    corpus: Corpus
    context_tokens: int
    exponent: float

    def poisson(self, rate: float, seconds: float, seed: Sequence[int]) -> list[TimedQuestion]:
        """Questions that come at `rate` a second."""
        draws = np.random.default_rng(seed)
        return self._drawn(arrivals(rate, seconds, draws), draws)

    def at_once(self, count: int, seed: Sequence[int]) -> list[TimedQuestion]:
        """So many questions that all come at the start."""
        return self._drawn(np.zeros(count), np.random.default_rng(seed))

    def _drawn(self, times: NDArray[np.float64], draws: np.random.Generator) -> list[TimedQuestion]:
        passages, questions = self.corpus
        chances = zipf(len(passages), self.exponent)
        drawn = []
        for at_s in times:
            # Exponential races (Efraimidis and Spirakis 2006) give the order in which they are drawn one after another.
            order = np.argsort(draws.exponential(size=len(chances)) / chances)
            question = questions[int(draws.integers(len(questions)))]
            total = np.cumsum([passages[i].tokens for i in order])
            count = max(1, int(np.searchsorted(total, self.context_tokens, side="right")))
            drawn.append(TimedQuestion(float(at_s), question, tuple(passages[i] for i in order[:count])))
        return drawn


@dataclass
class Sample:
    """What became of one request; moments are seconds after the start of the load.

    at_s: when it was to be sent. pieces_s: when each piece of text came. tokens: of the answer, as the server counts them;
    prompt_tokens, cached_tokens: of the prompt. extension: what `blend serve` adds; figures: of its prefill. ended: whether the
    stream said so. error: why there is no whole answer; refused: status and body of such a reply.
    """

    at_s: float
    pieces_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    extension: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    refused: tuple[int, bytes] | None = None
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
        """As JSON, without what the server said."""
        return {key: value for key, value in asdict(self).items() if key not in ("text", "extension", "refused")}


async def ask(client: httpx.AsyncClient, request: Request, sample: Sample, start: float) -> Sample:
    """Send a streaming request and fill in the sample; nothing is raised but a cancellation."""
    body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                sample.refused = response.status_code, await response.aread()
                sample.error = f"{response.status_code}: {response.text[:200]}"
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
    """Take one event of the stream."""
    if data == "[DONE]":
        sample.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        sample.refused = 500, data.encode()
        sample.error = str(event["error"].get("message", event["error"]))
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            sample.pieces_s.append(now)
            sample.text += text
    if extension := event.get("kvblend"):
        sample.extension |= extension
        sample.figures |= extension.get("figures", {})
    if usage := event.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        sample.tokens = usage["completion_tokens"]
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.cached_tokens = details.get("cached_tokens") or 0


def client_of(url: str) -> httpx.AsyncClient:
    """A client of a server, past any proxy, that waits for answers as long as they take."""
    return httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=TIMEOUT, trust_env=False)


async def open_loop(url: str, plan: Sequence[TimedQuestion], words: Words, drain_s: float) -> list[Sample]:
    """Send every question at its time; cancel answers that have not ended `drain_s` after the last question."""
    async with client_of(url) as client:
        requests = list(map(words, plan))  # made before, so that sending takes no time
        samples = [Sample(question.at_s) for question in plan]
        start = time.perf_counter()
        tasks = []
        for sample, request in zip(samples, requests, strict=True):
            await asyncio.sleep(max(0.0, start + sample.at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(client, request, sample, start)))
        _, late = await asyncio.wait(tasks, timeout=drain_s)
        for task, sample in zip(tasks, samples, strict=True):
            if task in late:
                task.cancel()
                sample.error = UNFINISHED
        await asyncio.gather(*tasks, return_exceptions=True)
    return samples


async def one_by_one(url: str, requests: Iterable[Request]) -> list[Sample]:
    """Send every request when the one before it is answered."""
    async with client_of(url) as client:
        return [await ask(client, request, Sample(0.0), time.perf_counter()) for request in requests]


def tiny_model(folder: Path, **shape: Any) -> Path:
    """A random model of four narrow layers, with a tokenizer made of the corpus. shape: entries of its configuration."""
    from tests.tiny_model import save_tiny_model

    text = "\n".join(document.text for document in documentation()[:3])
    return save_tiny_model(folder / "tiny", text[:200_000], **shape)


def chosen_model(options: argparse.Namespace, folder: Path, **shape: Any) -> Path:
    """The directory of --model, or with --tiny a tiny one in `folder`, of this shape."""
    from blend.weights import resolve_model

    return tiny_model(folder, **shape) if options.tiny else Path(resolve_model(options.model))


def make_corpus(model: Path, store: Path, options: argparse.Namespace, *, dtype: str = "float32") -> Corpus:
    """Passages of Python's documentation of about --chunk-tokens tokens in a fixed random order; `store` gets their caches."""
    from blend.corpora import index_dir
    from blend_retrieval import ChunkIndex
    from blend_retrieval.demo_questions import DEMO_QUESTIONS

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "passages.jsonl"
        chosen = _choose(model, options.passages, options.chunk_tokens)
        documents = [{"id": str(i), "title": passage.title, "text": passage.text} for i, passage in enumerate(chosen)]
        file.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
        command = [sys.executable, "-m", "blend", "precompute", str(file), "--store", str(store), "--model", str(model)]
        command += ["--chunk-tokens", str(options.chunk_tokens), "--dtype", dtype]
        run_whole("blend precompute", command, env=project_environment(options.threads))
    index = ChunkIndex.load(index_dir(store, ""))
    stored = [Passage(chunk.title, chunk.text, chunk.tokens) for chunk in index.chunks]
    return Corpus(_shuffled(stored), tuple(question.question for question in DEMO_QUESTIONS))


def _choose(model: Path, count: int, chunk_tokens: int) -> Sequence[Passage]:
    from transformers import AutoTokenizer

    from blend.prompt_template import PromptTemplate, render_chunk
    from blend_retrieval import chunk_documents

    template = PromptTemplate(AutoTokenizer.from_pretrained(str(model)))

    chunks = chunk_documents(
        documentation(), template.encode, chunk_tokens, lambda title, text: render_chunk(Passage(title, text, 0))
    )
    passages = [Passage(chunk.title, chunk.text, chunk.tokens) for chunk in chunks]
    return _shuffled([passage for passage in passages if passage.tokens >= FULLNESS * chunk_tokens])[:count]


def _shuffled(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    order = np.random.default_rng(0).permutation(len(passages))
    return tuple(sorted(passages)[int(i)] for i in order)
