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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from _load import Corpus, Request, Sample, Traffic, ask, client_of, make_corpus, one_by_one, open_loop
from _paths import project_environment
from _results import Results, Row, grouped, in_turns, markdown, say
from _servers import Running, Server, Vllm, blend_server, running

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARES = (50, 95, 99)
OURS = "blend"
SEED = 0
MARGIN = 1024  # tokens of a prompt around its passages and its answer
# Okabe and Ito's palette, which colour-blind readers can tell apart, each with its own marker.
STYLES = (("#0072B2", "o"), ("#000000", "s"), ("#D55E00", "^"))


class ServerBench:
    """The parts of one benchmark, each row written as soon as it is there. model: a directory. folder: temporary."""

    def __init__(self, options: argparse.Namespace, results: Results, model: Path, folder: Path) -> None:
        self.options, self.results, self.model, self.folder = options, results, model, folder
        self.store = options.store or folder / "store"

    @cached_property
    def traffic(self) -> Traffic:
        """What all servers are asked from; the caches are computed when it is first needed."""
        say("precompute")
        options = self.options
        corpus: Corpus = make_corpus(self.model, self.store, options, questions=options.questions, dtype=options.dtype)
        return Traffic(corpus, options.context_tokens, options.zipf)

    def ours(self, answer_tokens: int, name: str = OURS, *extra: str) -> Server:
        """`blend serve`, asked for answers of so many tokens."""
        sizes = {"threads": self.options.threads, "answer_tokens": answer_tokens}
        return blend_server(name, self.store, self.model, dtype=self.options.dtype, extra=extra, **sizes)

    def server(self, name: str) -> Server:
        """One of those that are compared, made anew for every round."""
        options = self.options
        if name == "blend":
            return self.ours(options.answer_tokens)
        if name == "blend --full":
            return self.ours(options.answer_tokens, name, "--full")
        longest = options.context_tokens + options.answer_tokens + MARGIN
        sizes = (options.threads, options.answer_tokens, longest)
        return Vllm(options.vllm, self.model, *sizes, dtype=options.dtype).plain()

    async def load(self) -> None:
        """Every round of every server, each alone on the machine."""
        _ = self.traffic
        names = [name for name in self.options.servers if name != "vllm" or self.options.vllm]
        for turn in range(self.options.rounds):
            for name in in_turns(names, turn):
                keys = [{"server": name, "rate": rate, "round": turn} for rate in sorted(self.options.rates)]
                missing = [key["rate"] for key in keys if not self.results.find("load", key)]
                if missing:
                    with self._running(self.server(name)) as up:
                        await self._rates(up, missing, turn)

    def _running(self, server: Server) -> AbstractContextManager[Running]:
        say(f"{server.name} starts")
        return running(server, self.folder / "server.log")

    async def _rates(self, up: Running, rates: list[float], turn: int) -> None:
        """Warm up, then measure the rates from the lowest on, until one is far too high."""
        options = self.options
        await one_by_one(up.url, self.traffic.at_once(options.warm, (SEED, turn, 0)), up.words)
        for number, rate in enumerate(rates):
            seconds = max(options.seconds, options.least / rate)
            say(f"{up.server.name}, round {turn + 1} of {options.rounds}, {rate:g}/s for {seconds:.0f} s")
            plan = self.traffic.poisson(rate, seconds, (SEED, turn, 1, int(rate * 1e6)))
            samples = await open_loop(up.url, plan, up.words, options.drain)
            row = summary(samples, seconds, options.slo)
            key = {"server": up.server.name, "rate": rate, "round": turn}
            plain = [sample.plain() for sample in samples]
            self.results.put("load", key, {"seconds": seconds, **row, "samples": plain})
            late = row["ttft_s"]["p95"]
            if late is None or late > max(options.slo):
                for higher in rates[number + 1 :]:
                    self.results.put("load", {**key, "rate": higher}, {"why_not": f"too late at {rate:g}/s already"})
                return

    def together(self) -> None:
        """Answers that run together: how fast they decode, and how long they wait while others are prefilled."""
        options, results = self.options, self.results
        batches: list[int] = []
        if "decode" in options.only:
            batches = [batch for batch in options.batches if not results.find("decode", {"batch": batch})]
        stalling = "stall" in options.only and not results.rows("stall")
        if not (batches or stalling):
            return
        with self._running(self.ours(options.decode_tokens)) as up:
            rows = {batch: self._decode(up, batch) for batch in batches}
            if stalling:
                results.put("stall", {"running": options.running, "prefills": options.prefills}, self._stall(up))
        if rows:
            context = max(row["prompt_tokens"] for row in rows.values())
            steps = min(48, options.decode_tokens)
            plain = plain_rates(self.model, options.dtype, context, steps, batches, options.threads)
            for batch, row in rows.items():
                results.put("decode", {"batch": batch}, {**row, "plain_per_s": plain[batch]})

    def _decode(self, up: Running, batch: int) -> Row:
        say(f"decode, {batch} answers")
        plan = self.traffic.at_once(batch, (1, batch))
        samples = asyncio.run(open_loop(up.url, plan, up.words, 10 * self.options.drain))
        return {**together(samples), "prompt_tokens": samples[0].prompt_tokens}

    def _stall(self, up: Running) -> Row:
        """Answers that run long enough, and prompts whose answers are one token."""
        options = self.options
        say(f"stall, {options.running} answers and {options.prefills} prompts")
        long = self.ours(8 * options.decode_tokens).words
        short = self.ours(1).words
        answers = [up.named(long(question)) for question in self.traffic.at_once(options.running, (2, 0))]
        prompts = [up.named(short(question)) for question in self.traffic.at_once(options.prefills, (2, 1))]
        return asyncio.run(stall(up.url, answers, prompts, 10 * options.drain))


async def stall(url: str, answers: Sequence[Request], prompts: Sequence[Request], drain_s: float) -> Row:
    """Gaps of answers that run while prompts come one after another.

    The answers are cut off once each has a piece of text behind the last prompt.
    """
    async with client_of(url) as client:
        start = time.perf_counter()
        samples = [Sample(0.0) for _ in answers]
        pairs = zip(answers, samples, strict=True)
        tasks = [asyncio.create_task(ask(client, *pair, start)) for pair in pairs]

        async def reached(after: float, pieces: int) -> None:
            """Wait until every answer that still runs has so many pieces of text after this moment."""
            while any(
                sum(moment > after for moment in sample.pieces_s) < pieces and not task.done()
                for sample, task in zip(samples, tasks, strict=True)
            ):
                await asyncio.sleep(0.01)

        await reached(0.0, 1)
        await reached(time.perf_counter() - start, 12)
        begin = time.perf_counter() - start
        prefills = [await ask(client, prompt, Sample(time.perf_counter() - start), start) for prompt in prompts]
        end = time.perf_counter() - start
        with suppress(TimeoutError):
            await asyncio.wait_for(reached(end, 1), drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return stalls(samples, prefills, begin, end)


def stalls(samples: Sequence[Sample], prefills: Sequence[Sample], begin: float, end: float) -> Row:
    """The answer with the longest gap, relative to the medians of its own gaps.

    median_s: of an answer's gaps from `begin` to `end`, while others are prefilled; alone_s: before. Gaps before the last
    answer has its first token belong to neither.
    """
    settled = max((sample.pieces_s[0] for sample in samples if sample.pieces_s), default=0.0)
    rows = []
    for sample in samples:
        gaps = [(start, stop) for start, stop in pairwise(sample.pieces_s) if start >= settled]
        alone = [stop - start for start, stop in gaps if stop <= begin]
        during = [stop - start for start, stop in gaps if stop > begin and start < end]
        if alone and during:
            times = {"alone_s": median(alone), "median_s": median(during), "longest_s": max(during)}
            over = {"over": max(during) / median(during), "over_alone": max(during) / median(alone)}
            rows.append({**times, "gaps": len(during), **over})
    errors = [sample.error for sample in (*samples, *prefills) if sample.error]
    worst = max(rows, key=lambda row: row["over"], default={})
    return {"answers": len(rows), "prefills": len(prefills), **worst, "all": rows, "errors": errors}


def together(samples: Sequence[Sample]) -> Row:
    """tokens_per_s: of all answers, from the last one's first piece of text to the first one's last. errors: of answers.

    A piece counts as the mean number of tokens a piece of its answer has. tokens_per_s is None when an answer failed or
    had no text, or when fewer than eight pieces of an answer lie there.
    """
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


def plain_rates(
    model: Path, dtype: str, context: int, steps: int, batches: Sequence[int], threads: int
) -> dict[int, float]:
    """Tokens per second of a HuggingFace decode step by batch, alone on the machine and with the server's threads."""
    command = [sys.executable, __file__, str(model), dtype, str(context), str(steps), *map(str, batches)]
    environment = project_environment(threads)
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"the plain decode step ended with {process.returncode}; see its own lines above")
    return {int(batch): float(rate) for batch, rate in json.loads(process.stdout).items()}


def decode_step(model: Any, context: int, steps: int, batch: int) -> float:
    """Tokens per second of the whole batch, median over the steps; one prompt is prefilled and its cache repeated."""
    import torch

    from blend.model.cache import cache_argument, output_cache

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=generator)
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1).repeat(batch, 1)
        cache = output_cache(out)
        cache.batch_repeat_interleave(batch)
        seconds = []
        for _ in range(steps + 2):  # the first two warm up
            begin = time.perf_counter()
            token = model(token, use_cache=True, **{cache_argument(model): cache}).logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - begin)
    return batch / median(seconds[2:])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of the values that `percent` of them do not exceed; None without values, or where it is infinite."""
    if not values:
        return None
    value = float(np.percentile(values, percent, method="inverted_cdf"))
    return value if math.isfinite(value) else None


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The percentiles of `SHARES` and the largest value."""
    return {**{f"p{share}": percentile(values, share) for share in SHARES}, "max": percentile(values, 100)}


def summary(samples: Sequence[Sample], seconds: float, slos: Iterable[float]) -> Row:
    """The row of a load of `seconds`. A request without a first token counts as one whose first token never came.

    completed_per_s: whole answers, over the time until the last of them. within: whole answers per second whose first token
    came within so many seconds, for each of `slos`. hit_share: of chunks, those out of the store. computed_share: of rows.
    late_s: by how much a question was sent too late at most.
    """
    whole = [sample for sample in samples if sample.error is None]
    errors = [sample.error for sample in samples if sample.error is not None]
    duration = max([seconds, *(sample.done_s for sample in whole if sample.done_s is not None)])
    firsts = [math.inf if sample.ttft_s is None else sample.ttft_s for sample in samples]
    in_time = {f"{slo:g}": sum((sample.ttft_s or math.inf) <= slo for sample in whole) for slo in slos}
    tokens = sum(sample.tokens for sample in whole)
    prompt_tokens = sum(sample.prompt_tokens for sample in whole)
    cached_tokens = sum(sample.cached_tokens for sample in whole)
    return {
        "requests": len(samples),
        "completed": len(whole),
        "completed_per_s": len(whole) / duration,
        "ttft_s": percentiles(firsts),
        "tpot_s": percentiles([sample.tpot_s for sample in samples if sample.tpot_s is not None]),
        "gap_s": percentiles([gap for sample in samples for gap in sample.gaps_s]),
        "within": {slo: count / duration for slo, count in in_time.items()},
        "tokens_per_s": tokens / duration,
        "answer_tokens": _ratio(tokens, len(whole)),
        "prompt_tokens": _ratio(prompt_tokens, len(whole)),
        "cached_share": _ratio(cached_tokens, prompt_tokens),
        "hit_share": _ratio(_total(whole, "hits"), _total(whole, "chunks")),
        "computed_share": _ratio(_total(whole, "rows_computed"), _total(whole, "rows")),
        "late_s": max((sample.late_s for sample in samples), default=0.0),
        "errors": dict(Counter(errors)),
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
        rate = float(row["rate"])
        late = later
    return f">= {rate:.3g}" if rate else "none"


def pooled(rows: Sequence[Row], slos: Sequence[float]) -> list[Row]:
    """Rows of several rounds as one row for each server and rate, over all of their samples."""
    groups = grouped([row for row in rows if "why_not" not in row], "server", "rate")
    return [{"server": server, "rate": rate, **_pool(rounds, slos)} for (server, rate), rounds in groups.items()]


def _pool(rounds: Sequence[Row], slos: Sequence[float]) -> Row:
    samples = [Sample(**sample) for row in rounds for sample in row["samples"]]
    pool = summary(samples, sum(row["seconds"] for row in rounds), slos)
    # Rounds follow one another, so their times add up; moments inside a round do not say how long all of them took.
    pool["within"] = {name: fmean(row["within"][name] for row in rounds) for name in rounds[0]["within"]}
    pool |= {name: fmean(row[name] for row in rounds) for name in ("completed_per_s", "tokens_per_s")}
    return {"rounds": len(rounds), **pool}


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
    servers = grouped(rows, "server")
    for slo in slos:
        capacities = [f"{name} {capacity(rates, slo)}" for (name,), rates in servers.items()]
        yield f"requests/s with p95 TTFT <= {slo:g} s: {', '.join(capacities)}"


def decode_table(rows: Sequence[Row]) -> Iterator[str]:
    """Tokens per second of answers that run together."""
    lines = []
    for row in rows:
        rate, plain = row["tokens_per_s"], row["plain_per_s"]
        if rate is None:
            lines.append([row["batch"], f"never all at once: raise --decode-tokens; {'; '.join(row['errors'])}"])
        else:
            lines.append([row["batch"], f"{rate:.1f}", f"{plain:.1f}", f"{rate / plain:.2f}"])
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


def draw(rows: Sequence[Row], slos: Sequence[float], title: str, foot: str) -> Figure:
    """A picture of pooled rows: time to first token, answers within it, time per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    first, answers, pace = figure.subplots(1, 3)
    slo = f"{slos[0]:g}"
    _lines(first, rows, lambda row: row["ttft_s"]["p95"], lambda row: row["ttft_s"]["p50"])
    first.set(yscale="log", title="time to first token: p95, dashed p50", ylabel="seconds")
    for seconds in slos:
        first.axhline(seconds, color="#999999", linewidth=0.8, linestyle=":")
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
    return figure


def _lines(axes: Axes, rows: Sequence[Row], solid: Callable[[Row], float], dashed: Callable[[Row], float]) -> None:
    """A server's values over its rates; where a value is missing, the line has a gap."""
    for (color, marker), ((name,), unsorted) in zip(STYLES, grouped(rows, "server").items(), strict=False):
        points = sorted(unsorted, key=lambda row: float(row["rate"]))
        rates = [row["rate"] for row in points]
        axes.plot(rates, list(map(solid, points)), color=color, marker=marker, markersize=5, label=name)
        axes.plot(rates, list(map(dashed, points)), color=color, linestyle="--", linewidth=1, alpha=0.7)


def main() -> None:
    """Measure the plain decode step of every batch; print one JSON object, batch -> tokens per second."""
    from transformers import AutoModelForCausalLM

    folder, dtype, context, steps, *batches = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    print(json.dumps({batch: decode_step(model, int(context), int(steps), int(batch)) for batch in batches}))


if __name__ == "__main__":
    main()
