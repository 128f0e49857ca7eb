"""Agents that begin together and read the same files in orders and for tasks of their own: what all of them cost.

One server, asked through its service by as many threads as there are agents. Rows are those of every pass, caches of text
included, until the last agent has its first token. `one` is a single agent at a server that is as new. KL is to full prefill
of the same prompt, over an answer: "served", by the rows that the server has of it, and "learned", of the prompt blended from
caches alone once all text is learned, which is what the same request costs in quality later. The difference of both has a 95 %
interval over the agents.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from _paths import MODEL, ROOT, command_line
from _results import Results, Row, markdown, measure_and_show, say
from _reuse import Distances

if TYPE_CHECKING:
    import torch

    from blend.model.decoder import Decoder
    from blend.model.passes import RowRequest
    from blend.rag import Rag
    from blend.serve.events import Started
    from blend.serve.prompt import Prompt
    from blend.serve.request import Request
    from blend.serve.service import Service

FILES = 4
RULES = "You are a subagent. Read the files that you are given, do your task alone, and report in a few sentences."
TASKS = (
    "List the functions that may raise an error, and say which error.",
    "Say which of these modules depend on another one, and why.",
    "Look for a value that is computed twice, and name the place.",
    "Explain to a newcomer what the second file is for.",
    "Find the class with the most methods, and name them.",
    "Say which tests you would write first for this code.",
    "Look for text that a user could misunderstand.",
    "Name the constants of these files, with their units.",
)


def file_texts(tokenizer: Any, tokens: int) -> list[str]:
    """Source files of this repository, each cut at so many tokens."""
    texts = list[str]()
    for path in sorted((ROOT / "blend").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > tokens:
            cut = tokenizer.decode(ids[:tokens]).rsplit("\n", 1)[0]
            texts.append(f"--- {path.relative_to(ROOT)}\n{cut}")
        if len(texts) == FILES + 1:
            return texts
    raise SystemExit("this repository has no files that long")


def request_of(number: int, files: Sequence[str], *, words: str = "") -> Request:
    """The request of an agent: its task, the files in an order of its own, and the task's end."""
    from blend.sampling import Sampling
    from blend.serve.request import Message, Request

    order = list(files)
    random.Random(number).shuffle(order)
    task = words or TASKS[number % len(TASKS)]
    text = "\n\n".join((f"Task {number + 1}: {task}", *order, f"Now do task {number + 1}. {task}"))
    messages = (Message("system", RULES), Message("user", text))
    return Request(messages, sampling=Sampling(max_tokens=2, ignore_eos=True))


class Agent(NamedTuple):
    """What an agent's request became. seconds: from its start to its first token."""

    prompt: Prompt
    started: Started
    seconds: float


class CountedRows:
    """Counts the rows of a decoder's passes."""

    def __init__(self, decoder: Decoder) -> None:
        self.rows = 0
        self._prefill = decoder.prefill
        decoder.prefill = self._counted  # type: ignore[method-assign]

    def _counted(self, requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
        self.rows += sum(int(request.positions.shape[0]) for request in requests)
        return self._prefill(requests, **more)


class Subagents:
    """A server over a store that holds nothing of the files."""

    def __init__(self, decoder: Decoder, counted: CountedRows, folder: Path, options: argparse.Namespace) -> None:
        from blend.config import BlendConfig
        from blend.rag import Rag
        from blend.serve.engine.scheduler import EmbeddedEngine
        from blend.serve.service import Service

        self._counted = counted
        self.rag: Rag = Rag(folder, decoder=decoder, blend=BlendConfig(ratio=options.ratio))
        engine = EmbeddedEngine(self.rag.blender)
        self.service: Service = Service(self.rag, engine, unnamed="author")
        self.service.warm_up()

    def close(self) -> None:
        """End it."""
        self.service.close()

    def settle(self) -> None:
        """Wait until all that was brought is learned, and the KV corrections are fitted."""
        while not (self.service.engine.stats().idle and self.service.corrector.done):
            time.sleep(0.02)

    def run(self, requests: Sequence[Request]) -> tuple[list[Agent], int, float]:
        """Ask all at once. Returns the agents, the rows of all passes, and the seconds, until the last first token."""
        agents = dict[int, Agent]()
        ready = threading.Barrier(len(requests) + 1)
        counts = [self._counted.rows]

        def ask(number: int, request: Request) -> None:
            ready.wait()
            asked_at = time.monotonic()
            prompt = self.service.prepare(request)
            events = SimpleQueue[Any]()
            self.service.take(prompt, events.put)
            started = events.get()
            counts.append(self._counted.rows)
            agents[number] = Agent(prompt, started, time.monotonic() - asked_at)
            while not getattr(events.get(), "last", False):
                pass

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(requests)]
        for thread in threads:
            thread.start()
        ready.wait()
        for thread in threads:
            thread.join()
        in_order = [agents[number] for number in range(len(requests))]
        return in_order, max(counts) - counts[0], max(agent.seconds for agent in in_order)


def measured(decoder: Decoder, options: argparse.Namespace) -> Iterator[Row]:
    """The figures of one agent alone, of all of them, and of their answers."""
    counted = CountedRows(decoder)
    *files, other = file_texts(decoder.tokenizer, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "prepared")
        with closing(Subagents(decoder, counted, prepared, options)) as agents:  # fits the KV corrections
            agents.run([request_of(0, [other], words="Say what this is.")])
            agents.settle()
        for name, count in (("one", 1), ("all", options.agents)):
            store = Path(shutil.copytree(prepared, Path(folder, name)))
            with closing(Subagents(decoder, counted, store, options)) as agents:
                requests = [request_of(number, files) for number in range(count)]
                answered, rows, seconds = agents.run(requests)
                say(f"{name}: {rows} rows, {seconds:.2f} s")
                yield {name: figures_of(answered, rows, seconds)}
                if count > 1:
                    yield distances(agents, answered, options.kl_records)


def figures_of(answered: Sequence[Agent], rows: int, seconds: float) -> Row:
    """What all these agents cost together. rows, seconds: until the last one's first token."""
    figures = [agent.started.figures for agent in answered]
    return {
        "prompt_rows": mean(one_agents.rows for one_agents in figures),
        "rows": rows,
        "last_s": seconds,
        "first_s": min(agent.seconds for agent in answered),
        "computed": [one_agents.rows_computed for one_agents in figures],
        "ahead": [getattr(one_agents, "rows_ahead", 0) for one_agents in figures],
        "ttft_s": [agent.seconds for agent in answered],
    }


def distances(agents: Subagents, answered: Sequence[Agent], most: int) -> Row:
    """The mean KL of the first answers, as they were served and from learned text alone."""
    blender = agents.rag.blender
    prefixes = agents.service.engine.prefixes
    agents.settle()
    served = list[float | None]()
    learned = list[float]()
    for number, agent in enumerate(answered[:most]):
        prompt = agents.service.prepare(agent.prompt.request)
        distance = Distances.of(prompt, blender, prefixes)
        learned.append(distance.blended)
        served.append(distance.served)
        say(f"KL {number + 1} of {most}: {distance}")
    return {"kl_served": served, "kl_learned": learned}


def measure_agents(options: argparse.Namespace, results: Results) -> None:
    """Run what the file lacks."""
    from blend.model.decoder import Decoder
    from blend.weights import resolve_model

    key = {"agents": options.agents, "tokens": options.tokens, "ratio": options.ratio}
    if (row := results.find("subagents", key)) and "kl_learned" in row:
        return
    decoder = Decoder.load(str(resolve_model(options.model)), name=options.model, dtype="auto")
    row = {}
    for part in measured(decoder, options):
        row |= part
        results.put("subagents", key, row)


def agents_table(results: Results) -> Iterator[str]:
    """One agent alone, and all of them."""
    rows = results.rows("subagents")
    if not rows:
        return
    lines = []
    for row in rows:
        one, every = row["one"], row["all"]
        lines.append(
            [
                row["agents"],
                f"{row['ratio']:.0%}",
                one["rows"],
                every["rows"],
                f"{every['rows'] / one['rows']:.2f}",
                f"{one['last_s']:.1f} s",
                f"{every['first_s']:.1f} s",
                f"{every['last_s']:.1f} s",
                *compared(row),
            ]
        )
    heads = "agents | ratio | rows of one | of all | times | one's first token | first | last | KL served | learned"
    heads += " | difference"
    yield from markdown(heads, lines)


def compared(row: Row) -> list[str | None]:
    """Mean KL as served and of learned text, and their difference with its interval, over the agents that have both."""
    from blend.intervals import paired_interval

    pairs = zip(row.get("kl_served", ()), row.get("kl_learned", ()), strict=False)
    both = [(served, learned) for served, learned in pairs if served is not None]
    if not both:
        return [None, None, None]
    served, learned = zip(*both, strict=True)
    difference = paired_interval(served, learned)
    interval = f"{difference.mean:.2g} ({difference.low:.2g} to {difference.high:.2g})"
    return [f"{mean(served):.2g}", f"{mean(learned):.2g}", interval]


def agents_command(arguments: Sequence[str]) -> int:
    """Measure, then show."""
    parser = command_line(__doc__, rows=True, model=MODEL)
    parser.add_argument("--agents", type=int, default=8, help="that begin together (default 8)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each of the four files (default 1000)")
    parser.add_argument(
        "--ratio", type=float, default=0.15, help="share of the cached rows to recompute (default 0.15)"
    )
    parser.add_argument("--kl-records", type=int, default=8, help="agents whose KL is measured (default 8)")
    return measure_and_show(parser.parse_args(arguments), measure_agents, agents_table)
