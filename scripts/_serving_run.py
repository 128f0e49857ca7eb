"""What `scripts/bench_serve` measures: servers in turns, each alone, every row written as soon as it is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from _results import Results, Row
from _serving import Traffic
from _serving_corpus import Corpus, make_corpus
from _serving_figures import summary
from _serving_load import one_by_one, open_loop
from _serving_parts import decode, plain_rates, stall
from _serving_servers import Running, Server, blend_server, running, vllm_server

MARGIN = 1024  # tokens of a prompt beside its passages and its answer


def say(line: str) -> None:
    """To whoever waits; results go to standard output."""
    print(line, file=sys.stderr, flush=True)


class Bench:
    """The parts of one benchmark. model: a directory. folder: for what nobody needs afterwards."""

    def __init__(self, options: argparse.Namespace, results: Results, model: Path, folder: Path) -> None:
        self.options, self.results, self.model, self.folder = options, results, model, folder
        self.store = options.store or folder / "store"

    @cached_property
    def corpus(self) -> Corpus:
        """Precomputed when it is first asked for."""
        say("precompute")
        given = self.options
        return make_corpus(
            self.model, self.store, questions=given.questions, passages=given.passages, chunk_tokens=given.chunk_tokens,
            threads=given.threads,
        )  # fmt: skip

    @cached_property
    def traffic(self) -> Traffic:
        """What all servers are asked from."""
        return Traffic(self.corpus, self.options.context_tokens, self.options.zipf)

    def ours(self, name: str = "blend", tokens: int | None = None, *extra: str) -> Server:
        """`blend serve`, asked for answers of so many tokens."""
        given = self.options
        return blend_server(
            name, self.store, self.model, threads=given.threads, answer_tokens=tokens or given.answer_tokens,
            way=given.way, extra=extra,
        )  # fmt: skip

    def servers(self) -> list[Callable[[], Server]]:
        """Those that are compared, each made anew for every round."""
        given = self.options
        sizes = {"answer_tokens": given.answer_tokens, "threads": given.threads}
        longest = given.context_tokens + given.answer_tokens + MARGIN
        found: dict[str, Callable[[], Server]] = {
            "blend": lambda: self.ours(),
            "blend --full": lambda: self.ours("blend --full", None, "--full"),
            "vllm": lambda: vllm_server(given.vllm, self.model, longest=longest, **sizes),
        }
        asked = [name for name in found if name in given.servers and (name != "vllm" or given.vllm)]
        return [found[name] for name in asked]

    async def load(self) -> None:
        """Every round of every server."""
        _ = self.corpus
        for turn in range(self.options.rounds):
            servers = self.servers()
            for make in servers if turn % 2 == 0 else reversed(servers):
                server = make()
                lacking = [rate for rate in sorted(self.options.rates) if not self._held(server.name, rate, turn)]
                if lacking:
                    with self._running(server) as up:
                        await self._rates(up, lacking, turn)

    def _held(self, server: str, rate: float, turn: int) -> Row | None:
        return self.results.find("load", {"server": server, "rate": rate, "round": turn})

    def _running(self, server: Server) -> AbstractContextManager[Running]:
        say(f"{server.name} starts")
        return running(server, self.folder / "server.log")

    async def _rates(self, up: Running, rates: list[float], turn: int) -> None:
        """Warm up, then the rates from the lowest on, until one is far too high."""
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
        """Answers that run together: how fast they are, and how long they stand still while others come."""
        given, results = self.options, self.results
        batches = [one for one in given.batches if not results.find("decode", {"batch": one})]
        batches = batches if "decode" in given.only else []
        stalling = "stall" in given.only and not results.rows("stall")
        if not (batches or stalling):
            return
        with self._running(self.ours(tokens=given.decode_tokens)) as up:
            rows = {batch: self._decode(up, batch) for batch in batches}
            if stalling:
                results.put("stall", {"running": given.running, "prefills": given.prefills}, self._stall(up))
        if rows:
            context = max(row["prompt_tokens"] for row in rows.values())
            plain = plain_rates(self.model, context, min(48, given.decode_tokens), batches, given.threads)
            for batch, row in rows.items():
                results.put("decode", {"batch": batch}, {**row, "plain_per_s": plain[batch]})

    def _decode(self, up: Running, batch: int) -> Row:
        say(f"decode, {batch} answers")
        return decode(up.url, self.traffic, up.words, batch, 10 * self.options.drain)

    def _stall(self, up: Running) -> Row:
        given, short = self.options, self.ours(tokens=1).words
        say(f"stall, {given.running} answers and {given.prefills} prompts")
        return stall(
            up.url, self.traffic, up.words, lambda asked: up.named(short(asked)), (given.running, given.prefills),
            10 * given.drain,
        )  # fmt: skip
