"""How much recurring text is reused: two servers over one model, one that blends and one with exact prefixes alone, in turns.

Each request goes to both, in one process; only the first goes on learning. reused: tokens of recurring text that were not
computed but taken from caches (recomputed rows included), as a share of all recurring text. The other figures are of requests
all of whose text but the end is known: TTFT is a median, times that of its sum. moved: the share of rows that an earlier prompt
had elsewhere. KL is to full prefill of the same prompt, over an answer: of the prompt blended from caches, and "served", by the
rows that the server itself has of it, moved ones among them.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from _paths import MODEL, ROOT, command_line
from _results import Results, Row, markdown, measure_and_show, say

if TYPE_CHECKING:
    from blend.prefill.blender import Blend, Blender
    from blend.rag import Rag
    from blend.serve.engine.prefixes import PrefixCache
    from blend.serve.events import Started
    from blend.serve.prompt import Prompt
    from blend.serve.request import Message, Tools
    from blend.serve.service import Service

ANSWER_TOKENS = 16  # over which KL is measured


def prose() -> list[str]:
    """Paragraphs of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    parts = [part.strip() for page in pages for part in re.split(r"\n\n+", page.read_text())]
    return [part for part in parts if len(part) > 80 and "|" not in part]


def passages(count: int, characters: int) -> list[str]:
    """Different passages of about so many characters."""
    paragraphs = iter(prose())
    texts = list[str]()
    while len(texts) < count:
        parts = [next(paragraphs)]
        while sum(map(len, parts)) < characters:
            parts.append(next(paragraphs))
        texts.append("\n\n".join(parts)[:characters].rsplit(" ", 1)[0])
    return texts


class Asked(NamedTuple):
    """A request. recurring: its text that came before. known: whether that is nearly all of its text."""

    messages: Sequence[Message]
    recurring: str
    known: bool
    tools: Tools | None = None


class Arms:
    """A server that blends and learns, and one that remembers exact prefixes alone, over one model."""

    def __init__(self, model: str, folder: Path, twice: Sequence[str]) -> None:
        """twice: texts for which, twice, the learned text has room; without any it has 4 GiB."""
        from blend.model.decoder import Decoder
        from blend.rag import Rag
        from blend.serve.engine.scheduler import EmbeddedEngine
        from blend.serve.service import Service
        from blend.weights import resolve_model

        decoder = Decoder.load(str(resolve_model(model)), name=model, dtype="auto")
        kinds = 2  # of caches: isolated and contextual
        row_bytes = kinds * 2 * sum(layer.width for layer in decoder.rotations)  # in the codec bfloat16
        rows = sum(len(decoder.tokenizer.encode(text, add_special_tokens=False)) for text in twice)
        learn_budget = 2 * rows * row_bytes or 4 << 30
        self._services: dict[bool, Service] = {}
        for full in (False, True):
            rag = Rag(folder / str(full), decoder=decoder)
            engine = EmbeddedEngine(rag.blender, blender_of=lambda _, __, own=rag: own.blender)  # type: ignore[misc]
            self._services[full] = Service(rag, engine, learn_budget=learn_budget, full=full, unnamed="author")
            self._services[full].warm_up()

    def close(self) -> None:
        """End both."""
        for service in self._services.values():
            service.close()

    @property
    def prefixes(self) -> PrefixCache:
        """Of the server that blends: the rows of its prompts."""
        return self._services[False].engine.prefixes

    @property
    def rag(self) -> Rag:
        """Of the server that blends."""
        return self._services[False].tenant("").rag()

    def ask(self, question: Asked, *, full: bool) -> tuple[Prompt, Started]:
        """What one of the servers makes of a request for two tokens. Returns when what the prompt brought is learned."""
        from blend.sampling import Sampling
        from blend.serve.events import Failed, Finished, Started
        from blend.serve.request import Request

        service = self._services[full]
        request = Request(tuple(question.messages), tools=question.tools, sampling=Sampling(max_tokens=2))
        prompt = service.prepare(request)
        events = SimpleQueue[Any]()
        service.take(prompt, events.put)
        started = events.get()
        if not isinstance(started, Started):
            raise SystemExit(f"a request failed: {started}")
        while not isinstance(events.get(), Finished | Failed):
            pass
        while not service.engine.stats().idle:  # what is learned is stored
            time.sleep(0.005)
        while not full and not service.corrector.done:
            time.sleep(0.1)
        return prompt, started


def reused(prompt: Prompt, started: Started) -> int:
    """Tokens that came out of caches, behind the beginning that all prompts share."""
    from blend.layout import PlaceOrigin

    layout = prompt.layout
    rows = set(range(started.figures.rows_reused))
    places = zip(layout.places, layout.chunk_spans, strict=True)
    spans = [span for place, span in places if place.origin is not PlaceOrigin.TEXT]
    for span, hit in zip(spans, started.hits, strict=True):
        rows.update(range(span.start, span.stop) if hit else ())
    return len(rows - set(range(layout.shared_prefix_rows)))


class Distances(NamedTuple):
    """KL of a prompt to full prefill, over the answer's tokens. served: None where the server has no rows of it any more."""

    blended: float
    served: float | None

    @classmethod
    def of(cls, prompt: Prompt, blender: Blender, prefixes: PrefixCache) -> Distances:
        """Of the prompt blended from caches, and of its rows in the server's prefix cache."""
        from blend.compare import Reference
        from blend.model.decoder import full_prefill

        layout = prompt.layout
        full = Reference.of(full_prefill(blender.decoder, layout), layout, ANSWER_TOKENS)
        blended = full.fidelity(blender.prefill(layout, room=ANSWER_TOKENS)).kl
        served = prefill_behind_served(prompt, blender, prefixes)
        return cls(blended, None if served is None else full.fidelity(served).kl)


def prefill_behind_served(prompt: Prompt, blender: Blender, prefixes: PrefixCache) -> Blend | None:
    """The prompt by the rows that the server has of it, wherever these come from; only its last row is computed."""
    from blend.model.passes import run_steps

    layout = prompt.layout
    last = layout.rows - 1
    goes_on = (*layout.token_ids, layout.token_ids[-1])  # the cache finds a prompt where another goes on behind it
    prefix = prefixes.find("", goes_on, author=prompt.author)
    if prefix is None or prefix.cache.tokens < last:
        return None
    rows = prefix.cache.rows(0, last)
    steps = blender.steps(layout.behind(last).all_plain(), room=ANSWER_TOKENS, known=rows)
    return run_steps(steps, lambda request: blender.decoder.prefill([request]))


class Case(NamedTuple):
    """Requests that follow one another. counted: of how many of the last the reuse counts. room: see `Arms`."""

    requests: Callable[[argparse.Namespace], Iterable[Asked]]
    counted: Callable[[int], int] = lambda requests: requests
    room: Callable[[argparse.Namespace], Sequence[str]] = lambda _: ()


def measured(arms: Arms, name: str, requests: Sequence[Asked], counted: int, kl_records: int) -> Row:
    """The figures of one case."""
    shares = list[float]()
    distances = list[Distances]()
    pairs = list[tuple[Any, Any]]()
    rag = arms.rag
    for number, question in enumerate(requests):
        prompt, started = arms.ask(question, full=False)
        figures = started.figures
        if question.recurring and number >= len(requests) - counted:
            shares.append(min(1.0, reused(prompt, started) / rag.template.count(question.recurring)))
        if question.known:
            pairs.append((figures, arms.ask(question, full=True)[1].figures))
            if len(distances) < kl_records:
                distances.append(Distances.of(prompt, rag.blender, arms.prefixes))
        say(f"{name} {number + 1} of {len(requests)}: {figures.rows} rows, {figures.rows_computed} computed")
    row: Row = {"requests": len(requests), "reused": mean(shares), "least": min(shares)}
    for arm, of_arm in zip(("blended", "prefixes"), zip(*pairs, strict=True), strict=False):
        seconds = [figures.ttft_s for figures in of_arm]
        computed = sum(figures.rows_computed for figures in of_arm) / sum(figures.rows for figures in of_arm)
        row[arm] = {"computed": computed, "ttft_s": median(seconds), "sum_s": sum(seconds)}
    if pairs:
        row["moved"] = sum(figures.rows_moved for figures, _ in pairs) / sum(figures.rows for figures, _ in pairs)
    if distances:
        row["kl"] = mean(distance.blended for distance in distances)
    served = [distance.served for distance in distances if distance.served is not None]
    return row | ({"kl_served": mean(served)} if served else {})


def table(results: Results) -> Iterator[str]:
    """A line a case."""
    lines = []
    for row in results.rows("reuse"):
        line = [row["case"], row["requests"], f"{row['reused']:.1%}", f"{row['least']:.1%}"]
        arms = [row[arm] for arm in ("blended", "prefixes") if arm in row]
        for arm in arms:
            line += [f"{arm['computed']:.0%}", f"{arm['ttft_s']:.2f} s"]
        if arms:
            line.append(f"{arms[1]['sum_s'] / arms[0]['sum_s']:.1f}")
            line.append(f"{row['moved']:.0%}" if "moved" in row else None)  # an older file has none
        line += [f"{row[name]:.2g}" for name in ("kl", "kl_served") if name in row]
        lines.append(line)
    heads = "case | requests | reused | least | computed | TTFT | by prefixes: computed | TTFT | times | moved | KL | KL served"
    return markdown(heads, lines)


def measure(cases: Mapping[str, Case], options: argparse.Namespace, results: Results) -> None:
    """Run what the file lacks."""
    results.begin(options, ("json", "show", "only"))
    for name in options.only:
        if not results.find("reuse", {"case": name}):
            case = cases[name]
            requests = list(case.requests(options))
            counted = case.counted(len(requests))
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                arms = stack.enter_context(closing(Arms(options.model, folder, case.room(options))))
                row = measured(arms, name, requests, counted, options.kl_records)
            results.put("reuse", {"case": name}, row)


def reuse_command(text: str | None, cases: Mapping[str, Case], **lengths: tuple[int, str]) -> int:
    """Measure the cases of a script, then show. text: its description. lengths: its options, each with default and help."""
    parser = command_line(text, rows=True, model=MODEL)
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--kl-records", type=int, default=10, help="requests of each case whose KL is measured")
    for name, (default, meaning) in lengths.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")
    return measure_and_show(parser.parse_args(), partial(measure, cases), table)
