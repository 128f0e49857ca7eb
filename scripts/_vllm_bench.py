"""What `scripts/bench_vllm` measures and shows: vLLM's server with kvblend in it and without, asked the same in turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from _load import Corpus, Request, Sample, TimedQuestion, Traffic, ask, client_of, make_corpus, one_by_one, open_loop
from _results import Results, Row, grouped, in_turns, markdown, say
from _servers import CHAT, Running, Server, Vllm, greedy, pasted, running
from _serving import MARGIN, SEED, together

PLAIN, BLENDED = "vllm", "vllm + kvblend"
TTFT_GOAL, DECODE_GOAL = 3.0, 0.95
FIRST_GOAL = 1.3  # the first of several first tokens, in times that of one alone
DRAIN_S = 1800.0
WARM = 2  # questions before the first that counts: vLLM compiles for them
# `vllm bench serve` without its own command, which does not start in the CPU build for lack of metadata.
BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_FIGURES = {"p50": "median_ttft_ms", "p95": "p95_ttft_ms", "p99": "p99_ttft_ms"}
_TIMES = ("ttft_s", "tpot_s")
WARM_TOKENS = 4  # of an answer whose first token is timed


class VllmBench:
    """The parts of one benchmark. model: a directory. folder: temporary."""

    def __init__(self, options: argparse.Namespace, results: Results, model: Path, folder: Path) -> None:
        self.options, self.results, self.model, self.folder = options, results, model, folder
        self.store = options.store or folder / "store"
        self.corpus: Corpus = make_corpus(model, self.store, options, dtype=options.dtype)

    def questions(self, count: int, context: int, *seed: int) -> list[TimedQuestion]:
        """So many questions, each over passages of its own draw, all equally likely."""
        return Traffic(self.corpus, context, 0.0).at_once(count, (SEED, context, *seed))

    def servers(self) -> list[Server]:
        """The two servers, without kvblend and with it."""
        options = self.options
        longest = max(options.context_tokens) + 2 * options.chunk_tokens + options.answer_tokens + MARGIN
        sizes = (options.threads, options.answer_tokens, longest)
        vllm = Vllm(options.vllm, self.model, *sizes, eager=options.tiny, dtype=options.dtype)
        return [vllm.plain(), vllm.blended(self.store, options.ratio)]

    def measure(self) -> None:
        """Measure what was asked for and is not in the results yet."""
        parts = {"first": self._first, "warm": self._warm, "together": self._together, "generator": self._generator}
        with ExitStack() as stack:
            ups: list[Running] = []
            for server in self.servers():
                say(f"{server.name} starts")
                ups.append(stack.enter_context(running(server, self.folder / f"{server.name.replace(' ', '')}.log")))
            for up in ups:
                say(f"{up.server.name} is warmed up")
                for context in self.options.context_tokens:
                    self._samples(up, self.questions(WARM, context, 9))
            for name, part in parts.items():
                if name in self.options.only:
                    part(ups)

    def _both(self, ups: list[Running], table: str, turn: int, about: Row, measure: Callable[[Running], Row]) -> None:
        """Measure both servers, in the other order in every second turn, and put down what is not there yet."""
        for up in in_turns(ups, turn):
            key = {"server": up.server.name, **about}
            if self.results.find(table, key) is None:
                row = measure(up)
                say(f"{up.server.name}, {table}, {about}: {row.get('error') or 'measured'}")
                self.results.put(table, key, row)

    def _samples(self, up: Running, plan: list[TimedQuestion]) -> list[Sample]:
        return asyncio.run(one_by_one(up.url, plan, up.words))

    def _first(self, ups: list[Running]) -> None:
        """Each question of each length to both, one after the other."""

        def measure(up: Running, question: TimedQuestion) -> Row:
            [sample] = self._samples(up, [question])
            return {**replace(sample, pieces_s=[]).plain(), "ttft_s": sample.ttft_s, "tpot_s": sample.tpot_s}

        for context in self.options.context_tokens:
            for number, question in enumerate(self.questions(self.options.questions, context, 0)):
                about = {"context": context, "question": number}
                self._both(ups, "first", number, about, partial(measure, question=question))

    def _warm(self, ups: list[Running]) -> None:
        """The same messages to both, in turns: known passages in a new order, the prompt again, turns of a conversation."""

        def measure(up: Running, messages: list[dict[str, str]]) -> Row:
            sample = asyncio.run(_answer(up, Request(CHAT, {"messages": messages, **greedy(WARM_TOKENS)})))
            return {"ttft_s": sample.ttft_s, "error": sample.error}

        for turn in range(self.options.rounds):
            question, later = self.questions(2, self.options.context_tokens[0], 3, turn)
            begun = [_user(pasted(question))]
            answer = {"role": "assistant", "content": "I have read it."}
            second = [*begun, answer, _user("Say it in other words.")]
            third = [*second, answer, _user(f"And this?\n\n{later.passages[0].text}\n\n{later.question}")]
            steps = {
                "known text": begun,
                "again": begun,
                "turn 2": second,
                "turn 3, more text": third,
                "turn 4": [*third, answer, _user("Why?")],
            }
            for step, messages in steps.items():
                self._both(ups, "warm", turn, {"step": step, "turn": turn}, partial(measure, messages=messages))

    def _together(self, ups: list[Running]) -> None:
        """An answer alone, then some that run together over one prompt length, in turns."""
        batch = self.options.batch

        def measure(up: Running, plan: list[TimedQuestion]) -> Row:
            [alone] = self._samples(up, plan[:1])
            samples = asyncio.run(open_loop(up.url, plan[1:], up.words, DRAIN_S))
            firsts = sorted(sample.ttft_s for sample in samples if sample.ttft_s is not None)
            return {**together(samples), "first_tokens_s": firsts, "alone_s": alone.ttft_s}

        for turn in range(self.options.rounds):
            plan = self.questions(1 + batch, self.options.context_tokens[0], 1, turn)
            self._both(ups, "together", turn, {"turn": turn, "batch": batch}, partial(measure, plan=plan))

    def _generator(self, ups: list[Running]) -> None:
        """VLLM's own load generator, which asks both the same texts."""
        file = self.folder / "prompts.jsonl"
        for turn, rate in enumerate(self.options.rates):
            plan = self.questions(self.options.prompts, self.options.context_tokens[0], 2, turn)
            file.write_text("\n".join(json.dumps({"prompt": pasted(question)}) for question in plan), encoding="utf-8")
            self._both(ups, "generator", turn, {"rate": rate}, partial(self._bench_serve, prompts=file, rate=rate))

    def _bench_serve(self, up: Running, prompts: Path, rate: float) -> Row:
        options = self.options
        out = self.folder / "generator.json"
        command = [
            *(options.vllm, "-c", BENCH_SERVE, "--backend", "openai-chat"),
            *("--endpoint", CHAT, "--base-url", up.url, "--model", up.model),
            *("--tokenizer", str(self.model), "--dataset-name", "custom", "--dataset-path", str(prompts)),
            *("--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(options.answer_tokens)),
            *("--num-prompts", str(options.prompts), "--request-rate", str(rate), "--seed", str(SEED)),
            *("--ignore-eos", "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--metric-percentiles", "95,99", "--save-result", "--result-dir", str(out.parent)),
            *("--result-filename", out.name, "--disable-tqdm"),
        ]
        process = subprocess.run(
            command,
            env=dict(up.server.environment),
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if process.returncode:
            raise SystemExit(f"vllm bench serve ended with {process.returncode}:\n{process.stdout[-2000:]}")
        figures = json.loads(out.read_text(encoding="utf-8"))
        return {
            "ttft_s": {name: figures[key] / 1e3 for name, key in _FIGURES.items()},
            "tpot_s": {"p50": figures["median_tpot_ms"] / 1e3, "p95": figures["p95_tpot_ms"] / 1e3},
            "completed": figures["completed"],
            "requests": options.prompts,
            "requests_per_s": figures["request_throughput"],
            "prompt_tokens": figures["total_input_tokens"],
        }


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _answer(up: Running, request: Request) -> Sample:
    async with client_of(up.url) as client:
        return await ask(client, up.named(request), Sample(0.0), time.perf_counter())


def _pairs(rows: Iterable[Row], *keys: str) -> list[tuple[Row, Row]]:
    """Rows of the two servers about the same question, without those that failed or have no times."""
    whole = [row for row in rows if not row.get("error") and all(row.get(key, 0) is not None for key in _TIMES)]
    by_server = ({row["server"]: row for row in same} for same in grouped(whole, *keys).values())
    return [(servers[PLAIN], servers[BLENDED]) for servers in by_server if servers.keys() >= {PLAIN, BLENDED}]


def first_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of each length, and of the ratios of pairs."""
    lines = []
    for _, same_length in sorted(grouped(rows, "context").items()):
        pairs = _pairs(same_length, "question")
        if pairs:
            tokens = median(plain["prompt_tokens"] for plain, _ in pairs)
            figures = (
                *_compared(pairs, "ttft_s", 1.0, "s", TTFT_GOAL),
                *_compared(pairs, "tpot_s", 1e3, "ms", DECODE_GOAL),
            )
            lines.append([f"{tokens:,.0f}", len(pairs), *figures])
    heads = "tokens | pairs | TTFT vllm | + kvblend | ratio | goal | a token | + kvblend | ratio | goal"
    return markdown(heads, lines)


def _compared(pairs: Sequence[tuple[Row, Row]], name: str, scale: float, unit: str, goal: float) -> Iterator[str]:
    """A figure's medians, the median ratio of the pairs, and whether that reaches the goal."""
    for rows in zip(*pairs, strict=True):
        yield f"{scale * median(row[name] for row in rows):.2f} {unit}"
    ratio = median(plain[name] / ours[name] for plain, ours in pairs)
    verdict = "PASS" if ratio >= goal else "FAIL"
    yield f"{ratio:.2f}"
    yield f"{verdict} {goal:g}"


def warm_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of each step, and of the ratios of pairs."""
    lines = []
    for (step,), same_step in grouped(rows, "step").items():
        pairs = _pairs(same_step, "turn")
        if pairs:
            times = [f"{median(pair[i]['ttft_s'] for pair in pairs):.2f} s" for i in (0, 1)]
            ratios = [plain["ttft_s"] / ours["ttft_s"] for plain, ours in pairs]
            lines.append([step, len(pairs), *times, f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return markdown("prompt | pairs | TTFT vllm | + kvblend | ratio | range", lines)


def together_line(rows: Sequence[Row]) -> Iterator[str]:
    """Answers that decode together."""
    pairs = _pairs([row for row in rows if row["tokens_per_s"]], "turn", "batch")
    if pairs:
        batch = pairs[0][0]["batch"]
        plain, ours = (median(pair[i]["tokens_per_s"] for pair in pairs) for i in (0, 1))
        verdict = "PASS" if ours >= DECODE_GOAL * plain else "FAIL"
        yield f"{batch} answers together: {plain:.1f} tokens/s, with kvblend {ours:.1f}   {verdict}"
        rows = [blended for _, blended in pairs]
        first, middle = (median(row["first_tokens_s"][at] for row in rows) for at in (0, batch // 2))
        alone = median(row["alone_s"] for row in rows)
        ratio = median(row["first_tokens_s"][0] / row["alone_s"] for row in rows)
        verdict = "PASS" if ratio <= FIRST_GOAL else "FAIL"
        yield f"with kvblend their first tokens come after {first:.2f} s, half of them within {middle:.2f} s"
        yield f"one alone comes after {alone:.2f} s; the first of them takes {ratio:.2f} times as long   {verdict}"


def generator_table(rows: Sequence[Row]) -> Iterator[str]:
    """The figures of vLLM's load generator."""
    lines = []
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        times = [f"{row['ttft_s'][name]:.1f} s" for name in ("p50", "p95", "p99")]
        pace = f"{row['tpot_s']['p50'] * 1e3:.0f} ms"
        counts = [f"{row['requests_per_s']:.3f}", f"{row['completed']}/{row['requests']}"]
        lines.append([f"{row['rate']:g}", row["server"], *times, pace, *counts])
    heads = "vllm bench serve: a second | server | TTFT p50 | p95 | p99 | a token | ended/s | ended"
    return markdown(heads, lines, names=2)
