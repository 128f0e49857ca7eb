"""What `scripts/bench_vllm` measures and shows: vLLM's server with kvblend in it and without, asked the same in turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median

import httpx

from _load import TIMEOUT, Corpus, Request, Sample, TimedQuestion, Traffic, ask, make_corpus, one_by_one, open_loop
from _results import Results, Row, markdown, say
from _servers import Running, Server, Vllm, chat, greedy, running
from _serving import MARGIN, together

PLAIN, BLENDED = "vllm", "vllm + kvblend"
TTFT_GOAL, DECODE_GOAL = 3.0, 0.95
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
CHAT = "/v1/chat/completions"
WARM_TOKENS = 4  # of an answer whose first token is timed


class VllmBench:
    """The parts of one benchmark. model: a directory. folder: temporary."""

    def __init__(self, options: argparse.Namespace, results: Results, model: Path, folder: Path) -> None:
        self.options, self.results, self.model, self.folder = options, results, model, folder
        self.store = options.store or folder / "store"

    @cached_property
    def corpus(self) -> Corpus:
        """Precomputed when it is first asked for."""
        given = self.options
        sizes = {"passages": given.passages, "chunk_tokens": given.chunk_tokens, "threads": given.threads}
        return make_corpus(self.model, self.store, questions=None, dtype=given.dtype, **sizes)

    def asked(self, count: int, context: int, *seed: int) -> list[TimedQuestion]:
        """So many questions, each over passages of its own draw, all equally likely."""
        return Traffic(self.corpus, context, 0.0).at_once(count, (self.options.seed, context, *seed))

    def servers(self) -> list[Server]:
        """The two servers, without kvblend and with it."""
        given = self.options
        longest = max(given.context_tokens) + 2 * given.chunk_tokens + given.answer_tokens + MARGIN
        made = Vllm(given.vllm, self.model, given.threads, given.answer_tokens, longest, given.tiny, given.dtype)
        return [made.plain(), made.blended(self.store, given.ratio)]

    def measure(self) -> None:
        """Measure what was asked for and is not in the results yet."""
        only, _ = self.options.only, self.corpus
        with ExitStack() as stack:
            ups: list[Running] = []
            for server in self.servers():
                say(f"{server.name} starts")
                ups.append(stack.enter_context(running(server, self.folder / f"{server.name.replace(' ', '')}.log")))
            for up in ups:
                say(f"{up.server.name} is warmed up")
                for context in self.options.context_tokens:
                    self._samples(up, self.asked(WARM, context, 9))
            if "first" in only:
                for context in self.options.context_tokens:
                    self._first(ups, context)
            if "warm" in only:
                self._warm(ups)
            if "together" in only:
                self._together(ups)
            if "generator" in only:
                self._generator(ups)

    def _samples(self, up: Running, plan: list[TimedQuestion]) -> list[Sample]:
        return asyncio.run(one_by_one(up.url, plan, up.words))

    def _first(self, ups: list[Running], context: int) -> None:
        """Each question to both, one after the other."""
        for number, asked in enumerate(self.asked(self.options.questions, context, 0)):
            for up in ups if number % 2 == 0 else ups[::-1]:
                key = {"server": up.server.name, "context": context, "question": number}
                if self.results.find("first", key) is None:
                    [sample] = self._samples(up, [asked])
                    came = "no text" if sample.ttft_s is None else f"{sample.ttft_s:.2f} s"
                    say(f"{up.server.name}, {sample.prompt_tokens} tokens: {sample.error or came}")
                    times = {"ttft_s": sample.ttft_s, "tpot_s": sample.tpot_s}
                    self.results.put("first", key, {**replace(sample, pieces_s=[]).plain(), **times})

    def _warm(self, ups: list[Running]) -> None:
        """The same messages to both, in turns: known passages in a new order, the prompt again, turns of a conversation."""
        for turn in range(self.options.rounds):
            asked, other = self.asked(2, self.options.context_tokens[0], 3, turn)
            messages = chat(asked, "pasted")["messages"]
            said = {"role": "assistant", "content": "I have read it."}
            more = {"role": "user", "content": f"And this?\n\n{other.passages[0].text}\n\n{other.question}"}
            short = [{"role": "user", "content": words} for words in ("Say it in other words.", "Why?")]
            steps = {
                "known text": messages,
                "again": messages,
                "turn 2": [*messages, said, short[0]],
                "turn 3, more text": [*messages, said, short[0], said, more],
                "turn 4": [*messages, said, short[0], said, more, said, short[1]],
            }
            for step, conversation in steps.items():
                for up in ups if turn % 2 == 0 else ups[::-1]:
                    key = {"server": up.server.name, "step": step, "turn": turn}
                    if self.results.find("warm", key) is None:
                        body = {"messages": conversation, **greedy(WARM_TOKENS)}
                        sample = asyncio.run(_asked(up, Request(CHAT, body)))
                        say(f"{up.server.name}, {step}: {sample.error or sample.ttft_s}")
                        self.results.put("warm", key, {"ttft_s": sample.ttft_s, "error": sample.error})

    def _together(self, ups: list[Running]) -> None:
        """Answers that run together over one prompt length, in turns."""
        batch, context = self.options.batch, self.options.context_tokens[0]
        for turn in range(2):
            plan = self.asked(batch, context, 1, turn)
            for up in ups if turn % 2 == 0 else ups[::-1]:
                key = {"server": up.server.name, "turn": turn, "batch": batch}
                if self.results.find("together", key) is None:
                    say(f"{up.server.name}, {batch} answers")
                    samples = asyncio.run(open_loop(up.url, plan, up.words, DRAIN_S))
                    errors = [one.error for one in samples if one.error]
                    rate = None if errors else together(samples)
                    ttft = sorted(sample.ttft_s for sample in samples if sample.ttft_s is not None)
                    self.results.put("together", key, {"tokens_per_s": rate, "errors": errors, "first_tokens_s": ttft})

    def _generator(self, ups: list[Running]) -> None:
        """VLLM's own load generator, which asks both the same texts."""
        for turn, rate in enumerate(self.options.rates):
            plan = self.asked(self.options.prompts, self.options.context_tokens[0], 2, turn)
            file = self.folder / "prompts.jsonl"
            lines = [{"prompt": chat(asked, "pasted")["messages"][0]["content"]} for asked in plan]
            file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
            for up in ups if turn % 2 == 0 else ups[::-1]:
                key = {"server": up.server.name, "rate": rate}
                if self.results.find("generator", key) is None:
                    say(f"vllm bench serve against {up.server.name}, {rate:g}/s")
                    self.results.put("generator", key, self._bench_serve(up, file, rate))

    def _bench_serve(self, up: Running, prompts: Path, rate: float) -> Row:
        given, out = self.options, self.folder / "generator.json"
        command = [
            *(given.vllm, "-c", BENCH_SERVE, "--backend", "openai-chat"),
            *("--endpoint", "/v1/chat/completions", "--base-url", up.url, "--model", up.model),
            *("--tokenizer", str(self.model), "--dataset-name", "custom", "--dataset-path", str(prompts)),
            *("--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(given.answer_tokens)),
            *("--num-prompts", str(given.prompts), "--request-rate", str(rate), "--seed", str(given.seed)),
            *("--ignore-eos", "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--metric-percentiles", "95,99", "--save-result", "--result-dir", str(out.parent)),
            *("--result-filename", out.name, "--disable-tqdm"),
        ]
        environment, pipe, same = dict(up.server.environment), subprocess.PIPE, subprocess.STDOUT
        done = subprocess.run(command, env=environment, text=True, check=False, stdout=pipe, stderr=same)
        if done.returncode:
            raise SystemExit(f"vllm bench serve ended with {done.returncode}:\n{done.stdout[-2000:]}")
        found = json.loads(out.read_text(encoding="utf-8"))
        return {
            "ttft_s": {name: found[key] / 1e3 for name, key in _FIGURES.items()},
            "tpot_s": {"p50": found["median_tpot_ms"] / 1e3, "p95": found["p95_tpot_ms"] / 1e3},
            "completed": found["completed"],
            "requests": given.prompts,
            "requests_per_s": found["request_throughput"],
            "prompt_tokens": found["total_input_tokens"],
        }


async def _asked(up: Running, request: Request) -> Sample:
    async with httpx.AsyncClient(base_url=up.url, timeout=TIMEOUT, trust_env=False) as client:
        return await ask(client, up.named(request), Sample(0.0), time.perf_counter())


def _pairs(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[Row, Row]]:
    """Rows of the two servers about the same question, without those that failed or have no times."""
    whole = [row for row in rows if not row.get("error") and all(row.get(key, 0) is not None for key in _TIMES)]
    held = {(row["server"], *(row[key] for key in keys)): row for row in whole}
    plain = {key[1:]: row for key, row in held.items() if key[0] == PLAIN}
    return [(row, held[BLENDED, *key]) for key, row in plain.items() if (BLENDED, *key) in held]


def first_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of each length, and of the ratios of pairs."""
    lines = []
    for context in sorted({row["context"] for row in rows}):
        pairs = _pairs([row for row in rows if row["context"] == context], ["question"])
        if pairs:
            cells = [f"{median(plain['prompt_tokens'] for plain, _ in pairs):,.0f}", len(pairs)]
            for name, scale, unit, goal in (("ttft_s", 1.0, "s", TTFT_GOAL), ("tpot_s", 1e3, "ms", DECODE_GOAL)):
                cells += [f"{scale * median(pair[i][name] for pair in pairs):.2f} {unit}" for i in (0, 1)]
                ratio = median(plain[name] / ours[name] for plain, ours in pairs)
                cells += [f"{ratio:.2f}", f"{'PASS' if ratio >= goal else 'FAIL'} {goal:g}"]
            lines.append(cells)
    figures = "{} | + kvblend | ratio | goal"
    return markdown(f"tokens | pairs | {figures.format('TTFT vllm')} | {figures.format('a token')}", lines)


def warm_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of each step, and of the ratios of pairs."""
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        pairs = _pairs([row for row in rows if row["step"] == step], ["turn"])
        if pairs:
            times = [f"{median(pair[i]['ttft_s'] for pair in pairs):.2f} s" for i in (0, 1)]
            ratios = [plain["ttft_s"] / ours["ttft_s"] for plain, ours in pairs]
            lines.append([step, len(pairs), *times, f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return markdown("prompt | pairs | TTFT vllm | + kvblend | ratio | range", lines)


def together_line(rows: Sequence[Row]) -> Iterator[str]:
    """Answers that decode together."""
    pairs = [pair for pair in _pairs(rows, ["turn", "batch"]) if all(one["tokens_per_s"] for one in pair)]
    if pairs:
        plain, ours = (median(pair[i]["tokens_per_s"] for pair in pairs) for i in (0, 1))
        verdict = "PASS" if ours >= DECODE_GOAL * plain else "FAIL"
        yield f"{pairs[0][0]['batch']} answers together: {plain:.1f} tokens/s, with kvblend {ours:.1f}   {verdict}"
        first, middle = ([pair[1]["first_tokens_s"][at] for pair in pairs] for at in (0, pairs[0][0]["batch"] // 2))
        yield f"with kvblend their first tokens come after {median(first):.2f} s, half of them within {median(middle):.2f} s"


def generator_table(rows: Sequence[Row]) -> Iterator[str]:
    """The figures of vLLM's load generator."""
    lines = []
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        times = [f"{row['ttft_s'][name]:.1f} s" for name in ("p50", "p95", "p99")]
        ended = [f"{row['requests_per_s']:.3f}", f"{row['completed']}/{row['requests']}"]
        lines.append([f"{row['rate']:g}", row["server"], *times, f"{row['tpot_s']['p50'] * 1e3:.0f} ms", *ended])
    heads = "vllm bench serve: a second | server | TTFT p50 | p95 | p99 | a token | ended/s | ended"
    return markdown(heads, lines, names=2)
