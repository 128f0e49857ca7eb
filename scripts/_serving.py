"""What benchmarks of servers make of samples: a row of a load, of answers that run together, and the rates that are in time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from _load import Request, Sample, ask, client_of
from _results import Row

SEED = 0
PIECES_BEFORE = 12  # of every answer, before others are prefilled
MARGIN = 1024  # tokens of a prompt around its passages and its answer


def together(samples: Sequence[Sample]) -> Row:
    """tokens_per_s: of all answers while all run, by pieces of mean length; None where less than eight of one come then."""
    errors = [sample.error for sample in samples if sample.error]
    if errors or not all(sample.pieces_s for sample in samples):
        return {"errors": errors, "tokens_per_s": None}
    start = max(sample.pieces_s[0] for sample in samples)
    stop = min(sample.pieces_s[-1] for sample in samples)
    counts = [sum(start < moment <= stop for moment in sample.pieces_s) for sample in samples]
    if min(counts) < 8:
        return {"errors": [], "tokens_per_s": None}
    tokens = sum(count * sample.tokens / len(sample.pieces_s) for count, sample in zip(counts, samples, strict=True))
    return {"errors": [], "tokens_per_s": tokens / (stop - start)}


async def stall(url: str, answers: Sequence[Request], prompts: Sequence[Request], drain_s: float) -> Row:
    """How long running answers wait for their next token while prompts come one after another.

    The answers are cut off once each has a piece of text behind the last prompt, or `drain_s` seconds after it.
    """
    async with client_of(url) as client:
        start = time.perf_counter()
        samples = [Sample(0.0) for _ in answers]
        pairs = zip(answers, samples, strict=True)
        tasks = [asyncio.create_task(ask(client, request, sample, start)) for request, sample in pairs]

        async def reached(after_s: float, pieces: int) -> None:
            """Wait until every answer that still runs has so many pieces of text after this moment."""
            while any(
                sum(moment > after_s for moment in sample.pieces_s) < pieces and not task.done()
                for sample, task in zip(samples, tasks, strict=True)
            ):
                await asyncio.sleep(0.01)

        await reached(0.0, 1)
        await reached(time.perf_counter() - start, PIECES_BEFORE)
        begin_s = time.perf_counter() - start
        prefills = [await ask(client, prompt, Sample(time.perf_counter() - start), start) for prompt in prompts]
        end_s = time.perf_counter() - start
        with suppress(TimeoutError):
            await asyncio.wait_for(reached(end_s, 1), drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return stalls(samples, prefills, begin_s, end_s)


def stalls(samples: Sequence[Sample], prefills: Sequence[Sample], begin_s: float, end_s: float) -> Row:
    """Gaps between pieces of running answers: before `begin_s`, and from then to `end_s`, while others are prefilled.

    Gaps before the last answer has its first piece belong to neither: answers are prefilled then, too. The times are None where
    an answer ended before others were prefilled.
    """
    settled_s = max((sample.pieces_s[0] for sample in samples if sample.pieces_s), default=0.0)
    before: list[float] = []
    meanwhile: list[float] = []
    stalled = 0
    for sample in samples:
        gaps = [(start, stop) for start, stop in pairwise(sample.pieces_s) if start >= settled_s]
        before += [stop - start for start, stop in gaps if stop <= begin_s]
        overlapping = [stop - start for start, stop in gaps if stop > begin_s and start < end_s]
        meanwhile += overlapping
        stalled += bool(overlapping)
    errors = [sample.error for sample in (*samples, *prefills) if sample.error]
    row: Row = {"answers": len(samples), "prefills": len(prefills), "errors": errors}
    if not before or stalled < len(samples):
        return row | {"before_s": None, "median_s": None, "longest_s": None}
    return row | {"before_s": median(before), "median_s": median(meanwhile), "longest_s": max(meanwhile)}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of the values that `percent` of them do not exceed; None without values, or where it is infinite."""
    if not values:
        return None
    value = float(np.percentile(values, percent, method="inverted_cdf"))
    return value if math.isfinite(value) else None


def summary(rounds: Sequence[Row], slo: float) -> Row:
    """One row for rounds of the same load, each with its `samples` and the `seconds` in which questions came.

    A request without a first token counts as one whose first token never came. completed_per_s: whole answers, over the time
    until the last of them. in_time_per_s: those of them whose first token came within `slo` seconds.
    """
    every = []
    duration = 0.0  # until the last whole answer of each round
    for row in rounds:
        samples = [Sample(**sample) for sample in row["samples"]]
        duration += max(row["seconds"], *(sample.done_s or 0.0 for sample in samples if sample.error is None), 0.0)
        every += samples
    whole = [sample for sample in every if sample.error is None]
    firsts = [math.inf if sample.ttft_s is None else sample.ttft_s for sample in every]
    in_time = sum(sample.ttft_s is not None and sample.ttft_s <= slo for sample in whole)
    prompt_tokens = sum(sample.prompt_tokens for sample in whole)
    cached_tokens = sum(sample.cached_tokens for sample in whole)
    return {
        "requests": len(every),
        "completed": len(whole),
        "completed_per_s": len(whole) / duration,
        "in_time_per_s": in_time / duration,
        "ttft_s": {f"p{percent}": percentile(firsts, percent) for percent in (50, 95, 99)},
        "tpot_p50_s": percentile([sample.tpot_s for sample in every if sample.tpot_s is not None], 50),
        "gap_p99_s": percentile([gap for sample in every for gap in sample.gaps_s], 99),
        "cached_share": cached_tokens / prompt_tokens if prompt_tokens else None,
    }


def capacity(rows: Iterable[Mapping[str, Any]], slo: float) -> str:
    """Requests a second of one server at which the first token of 95 % comes in time, interpolated in the logarithm of p95."""
    rate = late = 0.0
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        later = row["ttft_s"]["p95"]
        if later is None or later > slo:
            share = math.log(slo / late) / math.log(later / late) if later and late else 0.0
            return f"{rate + share * (row['rate'] - rate):.3g}" if rate else "none"
        rate = float(row["rate"])
        late = later
    return f">= {rate:.3g}" if rate else "none"
