"""What `scripts/bench_serve` measures and shows: servers in turns under load, decoding together, gaps while others prefill.

Called as `_serving.py MODEL DTYPE CONTEXT STEPS BATCH...` it measures a plain HuggingFace decode step, in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from _load import (
    LIMITS,
    TIMEOUT,
    Corpus,
    Sample,
    TimedQuestion,
    Traffic,
    Words,
    ask,
    make_corpus,
    one_by_one,
    open_loop,
)
from _paths import project_environment
from _results import Results, Row, markdown, say
from _servers import Running, Server, Vllm, blend_server, running

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (50, 95, 99)
OURS = "blend"
MARGIN = 1024  # tokens of a prompt around its passages and its answer
# Okabe and Ito's palette, which colour-blind readers can tell apart, each with its own marker.
STYLES = (("#0072B2", "o"), ("#000000", "s"), ("#D55E00", "^"), ("#009E73", "D"))


class Bench:
    """The parts of one benchmark, each row written as soon as it is there. model: a directory. folder: temporary."""

    def __init__(self, options: argparse.Namespace, results: Results, model: Path, folder: Path) -> None:
        self.options, self.results, self.model, self.folder = options, results, model, folder
        self.store = options.store or folder / "store"

    @cached_property
    def traffic(self) -> Traffic:
        """What all servers are asked from; the caches are computed when it is first needed."""
        say("precompute")
        given = self.options
        sizes = {"passages": given.passages, "chunk_tokens": given.chunk_tokens, "threads": given.threads}
        corpus: Corpus = make_corpus(self.model, self.store, questions=given.questions, dtype=given.dtype, **sizes)
        return Traffic(corpus, given.context_tokens, given.zipf)

    def ours(self, name: str = OURS, tokens: int | None = None, *extra: str) -> Server:
        """`blend serve`, asked for answers of so many tokens."""
        given = self.options
        sizes = {"threads": given.threads, "answer_tokens": tokens or given.answer_tokens}
        return blend_server(name, self.store, self.model, dtype=given.dtype, extra=extra, **sizes)

    def servers(self) -> list[Callable[[], Server]]:
        """Those that are compared, each made anew for every round."""
        given = self.options
        longest = given.context_tokens + given.answer_tokens + MARGIN
        found: dict[str, Callable[[], Server]] = {
            "blend": lambda: self.ours(),
            "blend --full": lambda: self.ours("blend --full", None, "--full"),
            "vllm": lambda: Vllm(
                given.vllm, self.model, given.threads, given.answer_tokens, longest, dtype=given.dtype
            ).plain(),
        }
        return [found[name] for name in found if name in given.servers and (name != "vllm" or given.vllm)]

    async def load(self) -> None:
        """Every round of every server, each alone on the machine."""
        _ = self.traffic
        for turn in range(self.options.rounds):
            for make in self.servers() if turn % 2 == 0 else reversed(self.servers()):
                server = make()
                key = {"server": server.name, "round": turn}
                missing = [r for r in sorted(self.options.rates) if not self.results.find("load", {**key, "rate": r})]
                if missing:
                    with self._running(server) as up:
                        await self._rates(up, missing, turn)

    def _running(self, server: Server) -> AbstractContextManager[Running]:
        say(f"{server.name} starts")
        return running(server, self.folder / "server.log")

    async def _rates(self, up: Running, rates: list[float], turn: int) -> None:
        """Warm up, then measure the rates from the lowest on, until one is far too high."""
        given, words = self.options, up.words
        await one_by_one(up.url, self.traffic.at_once(given.warm, (given.seed, turn, 0)), words)
        for number, rate in enumerate(rates):
            seconds = max(given.seconds, given.least / rate)
            say(f"{up.server.name}, round {turn + 1} of {given.rounds}, {rate:g}/s for {seconds:.0f} s")
            plan = self.traffic.poisson(rate, seconds, (given.seed, turn, 1, int(rate * 1e6)))
            samples = await open_loop(up.url, plan, words, given.drain)
            row = summary(samples, seconds, given.slo)
            key = {"server": up.server.name, "rate": rate, "round": turn}
            self.results.put("load", key, {"seconds": seconds, **row, "samples": [one.plain() for one in samples]})
            late = row["ttft_s"]["p95"]
            if late is None or late > given.beyond * max(given.slo):
                for higher in rates[number + 1 :]:
                    self.results.put("load", {**key, "rate": higher}, {"why_not": f"too late at {rate:g}/s already"})
                return

    def together(self) -> None:
        """Answers that run together: how fast they decode, and how long they wait while others are prefilled."""
        given, results = self.options, self.results
        batches = [
            one for one in given.batches if "decode" in given.only and not results.find("decode", {"batch": one})
        ]
        stalling = "stall" in given.only and not results.rows("stall")
        if not (batches or stalling):
            return
        with self._running(self.ours(tokens=given.decode_tokens)) as up:
            rows = {batch: self._decode(up, batch) for batch in batches}
            if stalling:
                results.put("stall", {"running": given.running, "prefills": given.prefills}, self._stall(up))
        if rows:
            context = max(row["prompt_tokens"] for row in rows.values())
            plain = plain_rates(self.model, given.dtype, context, min(48, given.decode_tokens), batches, given.threads)
            for batch, row in rows.items():
                results.put("decode", {"batch": batch}, {**row, "plain_per_s": plain[batch]})

    def _decode(self, up: Running, batch: int) -> Row:
        say(f"decode, {batch} answers")
        plan = self.traffic.at_once(batch, (1, batch))
        samples = asyncio.run(open_loop(up.url, plan, up.words, 10 * self.options.drain))
        errors = [sample.error for sample in samples if sample.error]
        rate = None if errors else together(samples)
        return {"errors": errors, "tokens_per_s": rate, "prompt_tokens": samples[0].prompt_tokens}

    def _stall(self, up: Running) -> Row:
        given = self.options
        say(f"stall, {given.running} answers and {given.prefills} prompts")
        plans = self.traffic.at_once(given.running, (2, 0)), self.traffic.at_once(given.prefills, (2, 1))
        long, short = (self.ours(tokens=tokens).words for tokens in (8 * given.decode_tokens, 1))
        words = (lambda asked: up.named(long(asked))), (lambda asked: up.named(short(asked)))
        return asyncio.run(stall(up.url, plans, words, 10 * given.drain))


async def stall(
    url: str, plans: tuple[Sequence[TimedQuestion], Sequence[TimedQuestion]], words: tuple[Words, Words], drain_s: float
) -> Row:
    """Gaps of answers that run (the first plan) while prompts come one after another (the second).

    The answers are cut off once each has a piece of text behind the last prompt.
    """
    async with httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=TIMEOUT, trust_env=False) as client:
        start = time.perf_counter()
        samples = [Sample(0.0) for _ in plans[0]]
        pairs = zip(map(words[0], plans[0]), samples, strict=True)
        tasks = [asyncio.create_task(ask(client, *pair, start)) for pair in pairs]

        async def reached(enough: Callable[[Sample], bool]) -> None:
            while not all(enough(one) or task.done() for one, task in zip(samples, tasks, strict=True)):
                await asyncio.sleep(0.01)

        await reached(lambda one: len(one.pieces_s) > 0)
        ready = time.perf_counter() - start
        await reached(lambda one: len([moment for moment in one.pieces_s if moment > ready]) >= 12)
        begin = time.perf_counter() - start
        others = [await ask(client, words[1](asked), Sample(time.perf_counter() - start), start) for asked in plans[1]]
        end = time.perf_counter() - start
        with suppress(TimeoutError):
            await asyncio.wait_for(reached(lambda one: one.pieces_s[-1:] > [end]), drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return stalls(samples, others, begin, end)


def stalls(samples: Sequence[Sample], others: Sequence[Sample], begin: float, end: float) -> Row:
    """The answer with the longest gap, relative to the medians of its own gaps.

    median_s: of an answer's gaps from `begin` to `end`, while others are prefilled; alone_s: before. Gaps before the last
    answer has its first token belong to neither.
    """
    settled = max((one.pieces_s[0] for one in samples if one.pieces_s), default=0.0)
    rows = []
    for one in samples:
        pairs = [(s, t) for s, t in zip(one.pieces_s, one.pieces_s[1:], strict=False) if s >= settled]
        alone, during = [t - s for s, t in pairs if t <= begin], [t - s for s, t in pairs if t > begin and s < end]
        if alone and during:
            times = {"alone_s": median(alone), "median_s": median(during), "longest_s": max(during)}
            over = {"over": max(during) / median(during), "over_alone": max(during) / median(alone)}
            rows.append({**times, "gaps": len(during), **over})
    errors = [one.error for one in (*samples, *others) if one.error]
    worst = max(rows, key=lambda row: row["over"], default={})
    return {"answers": len(rows), "prefills": len(others), **worst, "all": rows, "errors": errors}


def together(samples: Sequence[Sample]) -> float | None:
    """Tokens per second of all, from the last one's first piece of text to the first one's last.

    A piece counts as the mean number of tokens a piece of its answer has. None when fewer than eight pieces each lie there.
    """
    start, stop = max(one.pieces_s[0] for one in samples), min(one.pieces_s[-1] for one in samples)
    inside = [[moment for moment in one.pieces_s if start < moment <= stop] for one in samples]
    if min(map(len, inside)) < 8:
        return None
    tokens = sum(len(found) * one.tokens / len(one.pieces_s) for found, one in zip(inside, samples, strict=True))
    return tokens / (stop - start)


def plain_rates(
    model: Path, dtype: str, context: int, steps: int, batches: Sequence[int], threads: int
) -> dict[int, float]:
    """Tokens per second of a HuggingFace decode step by batch, alone on the machine and with the server's threads."""
    command = [sys.executable, __file__, str(model), dtype, str(context), str(steps), *map(str, batches)]
    done = subprocess.run(command, env=project_environment(threads), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the plain decode step ended with {done.returncode}; see its own lines above")
    return {int(batch): float(rate) for batch, rate in json.loads(done.stdout).items()}


def decode_step(model: Any, context: int, steps: int, batch: int) -> float:
    """Tokens per second of the whole batch, median over the steps; one prompt is prefilled and its cache repeated."""
    import torch

    from blend.model.cache import cache_argument, output_cache

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=generator)
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
        cache, token = output_cache(out), out.logits[:, -1:].argmax(-1).repeat(batch, 1)
        cache.batch_repeat_interleave(batch)
        taken = []
        for _ in range(steps + 2):  # the first two warm up
            begin = time.perf_counter()
            token = model(token, use_cache=True, **{cache_argument(model): cache}).logits[:, -1:].argmax(-1)
            taken.append(time.perf_counter() - begin)
    return batch / median(taken[2:])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of the values that `percent` of them do not exceed; None without values, or where it is infinite."""
    if not values:
        return None
    found = float(np.percentile(values, percent, method="inverted_cdf"))
    return found if math.isfinite(found) else None


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Those of `SHARES` and the largest."""
    return {**{f"p{share}": percentile(values, share) for share in SHARES}, "max": percentile(values, 100)}


def summary(samples: Sequence[Sample], seconds: float, slos: Iterable[float]) -> Row:
    """The row of a load of `seconds`. A request without a first token counts as one whose first token never came.

    completed_per_s: whole answers, over the time until the last of them. within: whole answers per second whose first token
    came within so many seconds, for each of `slos`. hit_share: of chunks, those out of the store. computed_share: of rows.
    late_s: by how much a question was sent too late at most.
    """
    ends = [sample.done_s for sample in samples if sample.error is None and sample.done_s is not None]
    taken = max([seconds, *ends])
    whole = [sample for sample in samples if sample.error is None]
    errors = [sample.error for sample in samples if sample.error is not None]
    return {
        "requests": len(samples),
        "completed": len(whole),
        "completed_per_s": len(whole) / taken,
        "ttft_s": percentiles([math.inf if sample.ttft_s is None else sample.ttft_s for sample in samples]),
        "tpot_s": percentiles([one.tpot_s for one in samples if one.tpot_s is not None]),
        "gap_s": percentiles([gap for one in samples for gap in one.gaps_s]),
        "within": {f"{slo:g}": sum((one.ttft_s or math.inf) <= slo for one in whole) / taken for slo in slos},
        "tokens_per_s": sum(one.tokens for one in whole) / taken,
        "answer_tokens": fmean(one.tokens for one in whole) if whole else None,
        "prompt_tokens": fmean(one.prompt_tokens for one in whole) if whole else None,
        "cached_share": _ratio(sum(one.cached_tokens for one in whole), sum(one.prompt_tokens for one in whole)),
        "hit_share": _ratio(_total(whole, "hits"), _total(whole, "chunks")),
        "computed_share": _ratio(_total(whole, "rows_computed"), _total(whole, "rows")),
        "late_s": max((one.late_s for one in samples), default=0.0),
        "errors": {error: errors.count(error) for error in errors},
    }


def _total(samples: Iterable[Sample], figure: str) -> float:
    return float(sum(sample.figures.get(figure, 0) for sample in samples))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def capacity(rows: Iterable[Mapping[str, Any]], slo: float) -> str:
    """Requests a second of one server at which the first token of 95 % comes in time, from its rows at several rates.

    Between the last rate whose p95 is in time and the next it is interpolated, straight in the logarithm of p95.
    """
    rate = late = 0.0
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        later = row["ttft_s"]["p95"]
        if later is None or later > slo:
            share = math.log(slo / late) / math.log(later / late) if later and late else 0.0
            return f"{rate + share * (row['rate'] - rate):.3g}" if rate else "none"
        rate, late = float(row["rate"]), later
    return f">= {rate:.3g}" if rate else "none"


def pooled(rows: Sequence[Row], slos: Sequence[float]) -> list[Row]:
    """Rows of several rounds as one row for each server and rate, over all of their samples."""
    rows = [row for row in rows if "why_not" not in row]
    keys = dict.fromkeys((row["server"], row["rate"]) for row in rows)
    return [_pool(key, [row for row in rows if (row["server"], row["rate"]) == key], slos) for key in keys]


def _pool(key: tuple[str, float], held: Sequence[Row], slos: Sequence[float]) -> Row:
    samples = [Sample(**sample) for row in held for sample in row["samples"]]
    found = summary(samples, sum(row["seconds"] for row in held), slos)
    # Rounds follow one another, so their times add up; moments inside a round do not say how long all of them took.
    found["within"] = {name: fmean(row["within"][name] for row in held) for name in held[0]["within"]}
    found |= {name: fmean(row[name] for row in held) for name in ("completed_per_s", "tokens_per_s")}
    return {"server": key[0], "rate": key[1], "rounds": len(held), **found}


def seconds_text(value: float | None) -> str:
    """Seconds in short; a value that is missing never came."""
    if value is None:
        return "never"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def load_table(rows: Sequence[Row], slo: float) -> Iterator[str]:
    """The pooled rows of `load`."""
    lines = []
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        times = [row["ttft_s"][name] for name in ("p50", "p95", "p99")] + [row["tpot_s"]["p50"], row["gap_s"]["p99"]]
        cached = "" if row["cached_share"] is None else f"{row['cached_share']:.0%}"
        counts = [f"{row['completed_per_s']:.3g}", f"{row['within'][f'{slo:g}']:.3g}", cached]
        cells = [*map(seconds_text, times), *counts, f"{row['requests'] - row['completed']}/{row['requests']}"]
        lines.append([f"{row['rate']:g}", row["server"], *cells])
    heads = "rate | server | TTFT p50 | p95 | p99 | per token | gap p99 | answers/s | in {:g} s | cached | lost"
    return markdown(heads.format(slo), lines, names=2)


def capacity_lines(rows: Sequence[Row], slos: Sequence[float]) -> Iterator[str]:
    """Requests a second of each server at the same p95 time to first token."""
    names = dict.fromkeys(row["server"] for row in rows)
    for slo in slos:
        found = {name: capacity([row for row in rows if row["server"] == name], slo) for name in names}
        yield f"requests/s with p95 TTFT <= {slo:g} s: " + ", ".join(f"{name} {one}" for name, one in found.items())


def decode_table(rows: Sequence[Row]) -> Iterator[str]:
    """Tokens per second of answers that run together."""
    lines = []
    for row in rows:
        rate, plain = row["tokens_per_s"], row["plain_per_s"]
        never = [f"never all at once: raise --decode-tokens; {'; '.join(row['errors'])}"]
        cells = never if rate is None else [f"{rate:.1f}", f"{plain:.1f}", f"{rate / plain:.2f}"]
        lines.append([row["batch"], *cells])
    return markdown("answers | tokens/s | plain step | ratio", lines)


def stall_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The longest gap of running answers while others are prefilled."""
    for row in rows:
        if "over" not in row:
            yield f"\nstall: the answers ended before others were prefilled; raise --decode-tokens. {'; '.join(row['errors'])}"
            continue
        longest, middle, alone = (seconds_text(row[name]) for name in ("longest_s", "median_s", "alone_s"))
        times = f"{longest}, {row['over']:.2f} times the median of {middle} meanwhile"
        before = f"{row['over_alone']:.1f} times that of {alone} before"
        yield f"\nlongest gap of {row['answers']} answers while {row['prefills']} others are prefilled: {times}, {before}"


def draw(rows: Sequence[Row], slos: Sequence[float], title: str, foot: str, file: Path) -> None:
    """Draw pooled rows to a .png, .svg or .pdf file: time to first token, answers within it, time per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    first, answers, pace = figure.subplots(1, 3)
    slo = f"{slos[0]:g}"
    _lines(first, rows, lambda row: row["ttft_s"]["p95"], lambda row: row["ttft_s"]["p50"])
    first.set(yscale="log", title="time to first token: p95, dashed p50", ylabel="seconds")
    for one in slos:
        first.axhline(one, color="#999999", linewidth=0.8, linestyle=":")
    _lines(answers, rows, lambda row: row["within"][slo], lambda row: row["completed_per_s"])
    answers.set(title=f"answers: first token within {slo} s, dashed all", ylabel="a second")
    ends = [0.0, max(row["rate"] for row in rows)]
    answers.plot(ends, ends, color="#999999", linewidth=0.8, linestyle=":")
    _lines(pace, rows, lambda row: row["tpot_s"]["p95"], lambda row: row["tpot_s"]["p50"])
    pace.set(title="time per token after the first: p95, dashed p50", ylabel="seconds")
    for axes in (first, answers, pace):
        axes.set_xlabel("requests offered per second")
        axes.grid(alpha=0.25)
        axes.title.set_fontsize(9.5)
        axes.margins(y=0.1)
    first.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11.5, fontweight="bold", parse_math=False)
    figure.supxlabel(foot, fontsize=7.5, color="#555555", parse_math=False)
    figure.savefig(file, dpi=160)


def _lines(
    axes: Axes, rows: Sequence[Row], solid: Callable[[Row], float | None], dashed: Callable[[Row], float | None]
) -> None:
    """A server's values over its rates; where a value is missing, the line has a gap."""
    for number, name in enumerate(dict.fromkeys(row["server"] for row in rows)):
        held = sorted((row for row in rows if row["server"] == name), key=lambda row: float(row["rate"]))
        rates = [row["rate"] for row in held]
        color, marker = STYLES[number % len(STYLES)]
        full, dots = ([math.nan if (one := value(row)) is None else one for row in held] for value in (solid, dashed))
        axes.plot(rates, full, color=color, marker=marker, markersize=5, label=name)
        axes.plot(rates, dots, color=color, linestyle="--", linewidth=1, alpha=0.7)


def main() -> None:
    """Measure the plain decode step of every batch; print one JSON object, batch -> tokens per second."""
    from transformers import AutoModelForCausalLM

    folder, dtype, context, steps, *batches = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    print(json.dumps({batch: decode_step(model, int(context), int(steps), int(batch)) for batch in batches}))


if __name__ == "__main__":
    main()
