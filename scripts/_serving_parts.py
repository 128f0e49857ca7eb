"""Two questions about answers that run together: how fast they decode, and how long they stall while others are prefilled."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx

from _results import Row
from _serving import TimedQuestion, Traffic
from _serving_corpus import project_environment
from _serving_load import LIMITS, TIMEOUT, Request, Sample, Words, ask, open_loop

DECODE_GOAL, STALL_GOAL = 0.85, 3.0


def plain_rates(model: Path, context: int, steps: int, batches: Sequence[int], threads: int) -> dict[int, float]:
    """Tokens per second of a HuggingFace decode step, by batch, alone on the machine and with the server's threads."""
    script = Path(__file__).with_name("_serving_hf.py")
    command = [sys.executable, str(script), str(model), str(context), str(steps), *map(str, batches)]
    done = subprocess.run(command, env=project_environment(threads), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} ended with {done.returncode}; see its own lines above")
    return {int(batch): float(rate) for batch, rate in json.loads(done.stdout).items()}


def decode(url: str, traffic: Traffic, words: Words, batch: int, drain_s: float) -> Row:
    """Tokens per second of `batch` answers, over the time in which all of them run. None where they never did."""
    samples = asyncio.run(open_loop(url, traffic.at_once(batch, (1, batch)), words, drain_s))
    errors = [sample.error for sample in samples if sample.error]
    return {
        "errors": errors,
        "tokens_per_s": None if errors else together(samples),
        "prompt_tokens": samples[0].prompt_tokens,
    }


def together(samples: Sequence[Sample]) -> float | None:
    """Tokens per second of all, from the last one's first piece of text to the first one's last.

    A piece counts as the tokens that pieces of its answer have on average. None when fewer than eight pieces each lie there.
    """
    start, stop = max(one.pieces_s[0] for one in samples), min(one.pieces_s[-1] for one in samples)
    inside = [[moment for moment in one.pieces_s if start < moment <= stop] for one in samples]
    if min(map(len, inside)) < 8:
        return None
    tokens = sum(len(found) * one.tokens / len(one.pieces_s) for found, one in zip(inside, samples, strict=True))
    return tokens / (stop - start)


def stall(url: str, traffic: Traffic, running: Words, coming: Words, counts: tuple[int, int], drain_s: float) -> Row:
    """How long answers stand still while others are prefilled. counts: answers that run, and prompts that come meanwhile.

    The prompts come one after another, the first when the answers have run alone for a while.
    """
    return asyncio.run(_stall(url, traffic, running, coming, counts, drain_s))


async def _stall(
    url: str, traffic: Traffic, running: Words, coming: Words, counts: tuple[int, int], drain_s: float
) -> Row:
    runners, comers = traffic.at_once(counts[0], (2, 0)), traffic.at_once(counts[1], (2, 1))
    async with httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=TIMEOUT, trust_env=False) as client:
        start = time.perf_counter()
        samples = [Sample(0.0) for _ in runners]
        requests = [running(asked) for asked in runners]
        tasks = [asyncio.create_task(ask(client, *pair, start)) for pair in zip(requests, samples, strict=True)]
        await _all_run(tasks, samples, pieces=12)
        begin = time.perf_counter() - start
        others = await _one_after_another(client, comers, coming, start)
        end = time.perf_counter() - start
        await asyncio.wait(tasks, timeout=drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return stalls(samples, others, begin, end)


async def _all_run(tasks: Sequence[asyncio.Task[Sample]], samples: Sequence[Sample], pieces: int) -> None:
    while min(len(sample.pieces_s) for sample in samples) < pieces and not any(task.done() for task in tasks):
        await asyncio.sleep(0.01)


async def _one_after_another(
    client: httpx.AsyncClient, plan: Sequence[TimedQuestion], words: Words, start: float
) -> list[Sample]:
    found = []
    for asked in plan:
        request: Request = words(asked)
        found.append(await ask(client, request, Sample(time.perf_counter() - start), start))
    return found


def stalls(samples: Sequence[Sample], others: Sequence[Sample], begin: float, end: float) -> Row:
    """The answer with the longest gap, in medians of its own.

    median_s: of an answer's gaps from `begin` to `end`, while others are prefilled; alone_s: before. Gaps of before the last
    answer has its first token belong to neither.
    """
    settled = max((one.pieces_s[0] for one in samples if one.pieces_s), default=0.0)
    rows = []
    for one in samples:
        pairs = [(s, t) for s, t in zip(one.pieces_s, one.pieces_s[1:], strict=False) if s >= settled]
        alone, during = [t - s for s, t in pairs if t <= begin], [t - s for s, t in pairs if t > begin and s < end]
        if alone and during:
            found = {
                "alone_s": median(alone),
                "median_s": median(during),
                "longest_s": max(during),
                "gaps": len(during),
            }
            rows.append({**found, "over": max(during) / median(during), "over_alone": max(during) / median(alone)})
    errors = [one.error for one in (*samples, *others) if one.error]
    worst = max(rows, key=lambda row: row["over"], default={})
    return {"answers": len(rows), "prefills": len(others), **worst, "all": rows, "errors": errors}
