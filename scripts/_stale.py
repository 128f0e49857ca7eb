"""Stale answers: a fact of the history is edited, and the question's answer follows from it through text that stays.

Each item is a conversation in three versions. The server gets the first two in turn, and then the third with the question.
`old` is what follows from the second version, `new` what follows from the third. Only items count that full prefill answers
rightly in both. An answer is stale if it says `old`, and right if it says `new`. The recovery is the share of the change
between full prefill's answers that a way follows: of log p(new) - log p(old), at the first token of the answer in which they
differ. Ways:

exact     exact prefixes: all text behind the edit is computed
moved     all text behind the edit moves, and none of it is computed
fast      the same with the first rows behind the edit and a few by the question: `kvblend.edits: fast`
apart     caches that were computed apart, as for text of another conversation
checked   the default
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from _paths import MODEL, command_line
from _results import Results, Row, grouped, markdown, measure_and_show, say
from _reuse import prose

if TYPE_CHECKING:
    from blend.serve.events import Figures, Token
    from blend.serve.request import Message
    from blend.serve.service import Service

WAYS = ("exact", "moved", "fast", "apart", "checked")
DISTANCES = (0, 50, 250, 1000)
ANSWER_TOKENS = 10
USER = "user"
ALTERNATIVES = 20
UNLIKELY = -15.0  # log-probability of a token that is not listed

COLOURS = [
    "amber",
    "birch",
    "cobalt",
    "dune",
    "ember",
    "fjord",
    "grove",
    "heron",
    "iris",
    "jade",
    "maple",
    "onyx",
    "pearl",
]
GROUPS = ["team", "project", "route", "ship", "garden", "crew", "lodge", "train", "club"]
NUMBERED = ["gate", "room", "shelf", "line", "port"]
PEOPLE = ["Carla Mendez", "Ruth Olsen", "Ivan Petrov", "Hugo Brandt", "Mina Sato", "Lena Fischer", "Paul Novak"]
TOWNS = ["Delmar", "Kestrel", "Orvin", "Tarbek", "Lundby", "Mersey", "Pinar", "Rosta"]
GOODS = ["lamps", "chairs", "books", "ropes", "stoves", "mirrors", "tents", "drums"]
BUILDINGS = ["bridge", "tunnel", "tower", "canal", "wall", "mast", "pier"]
UNITS = ["meters", "feet", "yards", "miles"]
CONSTANTS = ["LIMIT", "BATCH", "DEPTH", "RETRIES"]


class Story(NamedTuple):
    """What is told, in three versions.

    facts: of each version. text: stands behind and depends on them. answers: to the question, in each version.
    """

    facts: Sequence[str]
    text: str
    question: str
    answers: Sequence[str]


class Item(NamedTuple):
    """A conversation in three versions, and the question that the last one ends with."""

    shape: str
    distance: int
    number: int
    versions: tuple[Sequence[Message], ...]
    question: str
    old: str
    new: str


def codes(draw: random.Random) -> Sequence[str]:
    """Three numbers with different first digits."""
    first = draw.sample("123456789", 3)
    return [digit + str(draw.randrange(10, 99)) for digit in first]


def alias(draw: random.Random, _: Callable[[int], str]) -> Story:
    """A name that stands in a table."""
    group = draw.choice(GROUPS)
    names = draw.sample(COLOURS, 3)
    numbers = codes(draw)
    pairs = list(zip(names, numbers, strict=True))[1:]
    lines = sorted(f"The {name} {group} has the number {number}." for name, number in pairs)
    facts = [f"Our {group} is the {name} {group}." for name in names]
    return Story(
        tuple(facts), "\n".join(lines), f"Which number has our {group}? Answer with the number alone.", numbers
    )


def numbered(draw: random.Random, _: Callable[[int], str]) -> Story:
    """The same with a number."""
    kind = draw.choice(NUMBERED)
    names = [str(number) for number in draw.sample(range(110, 990), 3)]
    numbers = codes(draw)
    pairs = list(zip(names, numbers, strict=True))[1:]
    lines = sorted(f"For {kind} {name} the code is {number}." for name, number in pairs)
    facts = [f"We use {kind} {name}." for name in names]
    question = f"Which code has the {kind} that we use? Answer with the number alone."
    return Story(facts, "\n".join(lines), question, numbers)


def unit(draw: random.Random, _: Callable[[int], str]) -> Story:
    """A unit that holds for a length further on."""
    building = draw.choice(BUILDINGS)
    units = draw.sample(UNITS, 3)
    length = draw.randrange(20, 90)
    text = f"The {building} is {length} long, and {length // 3} wide at its widest place."
    facts = tuple(f"All lengths in these notes are in {name}." for name in units)
    question = f"How long is the {building}? Answer with the number and its unit alone."
    return Story(facts, text, question, tuple(f"{length} {name}" for name in units))


def person(draw: random.Random, _: Callable[[int], str]) -> Story:
    """A person who is named by an office further on."""
    town = draw.choice(TOWNS)
    people = draw.sample(PEOPLE, 3)
    goods = draw.choice(GOODS)
    facts = tuple(f"The manager of the {town} office is {name}." for name in people)
    text = f"All contracts for {goods} are signed by the manager of the {town} office."
    return Story(facts, text, f"Who signs the contracts for {goods}? Answer with the name alone.", tuple(people))


def listed(draw: random.Random, _: Callable[[int], str]) -> Story:
    """A list with an entry that a summary further on counts among others."""
    goods = draw.choice(GOODS)
    marks = draw.sample(["red", "green", "blue", "white", "black"], 3)
    numbers = codes(draw)
    lines = sorted(
        f"Everything {mark} costs {number} coins." for mark, number in list(zip(marks, numbers, strict=True))[1:]
    )
    facts = tuple(f"List of the stock:\n- the {goods} are {mark}" for mark in marks)
    return Story(facts, "\n".join(lines), f"How many coins do the {goods} cost? Answer with the number alone.", numbers)


def removed(draw: random.Random, _: Callable[[int], str]) -> Story:
    """A sentence that says what to ignore, and is taken out."""
    town = draw.choice(TOWNS)
    kind = draw.choice(["shop", "ferry", "library", "school"])
    old, new, _other = codes(draw)
    rule = f"The first price list below holds for every {kind}, unless this paragraph says otherwise."
    exception = f"{rule} Ignore the first price list below for the {town} {kind}; the second one holds there."
    text = f"First price list: a ticket costs {new}. Second price list: a ticket costs {old}."
    question = f"What does a ticket cost at the {town} {kind}? Answer with the number alone."
    return Story((rule, exception, rule), text, question, (new, old, new))


def cancelled(draw: random.Random, _: Callable[[int], str]) -> Story:
    """An order that is cancelled."""
    goods = draw.choice(GOODS)
    old, new, _other = codes(draw)
    days = draw.sample(["Monday", "Tuesday", "Thursday", "Friday"], 2)
    valid = [f"The {day} order of {goods} is valid. The {gone} order is cancelled." for day, gone in (days, days[::-1])]
    text = f"The {days[0]} order is for {old} {goods}. The {days[1]} order is for {new} {goods}."
    question = f"How many {goods} does the valid order hold? Answer with the number alone."
    return Story((valid[1], valid[0], valid[1]), text, question, (new, old, new))


def setting(draw: random.Random, _: Callable[[int], str]) -> Story:
    """A constant that code further on uses."""
    name = draw.choice(CONSTANTS)
    work = draw.choice(["load", "fetch", "split", "queue"])
    numbers = codes(draw)
    text = f"def {work}_size():\n    return {name}"
    facts = tuple(f"{name} = {number}" for number in numbers)
    return Story(facts, text, f"Which number does {work}_size() return? Answer with the number alone.", numbers)


def twice(draw: random.Random, filler: Callable[[int], str]) -> Story:
    """A name that stands in a table of people, whose names stand in another table."""
    group = draw.choice(GROUPS)
    names = draw.sample(COLOURS, 3)
    people = draw.sample(PEOPLE, 3)
    numbers = codes(draw)
    led = list(zip(names, people, numbers, strict=True))[1:]
    leaders = sorted(f"The {name} {group} is led by {leader}." for name, leader, _number in led)
    phones = sorted(f"The telephone of {leader} is {number}." for _name, leader, number in led)
    facts = tuple(f"Our {group} is the {name} {group}." for name in names)
    text = "\n".join([*leaders, "", filler(60), "", *phones])
    question = f"Our {group} has a leader. What is the telephone of this leader? Answer with the number alone."
    return Story(facts, text, question, numbers)


SHAPES: dict[str, Callable[[random.Random, Callable[[int], str]], Story]] = {
    "alias": alias,
    "number": numbered,
    "unit": unit,
    "person": person,
    "list": listed,
    "removed": removed,
    "order": cancelled,
    "setting": setting,
    "read again": setting,
    "twice": twice,
}
NUMBERS = ("number", "setting")
"""Shapes with twice as many items: where numbers change in their place, rows may move by default."""


def items(tokenizer: Any, shapes: Sequence[str], per_cell: int) -> Iterator[Item]:
    """So many items of each of these shapes at each distance."""
    texts = [" ".join(text.split()) for text in prose() if not {"`", "#", "["} & set(text)]
    for shape in shapes:
        for distance in DISTANCES:
            for number in range(per_cell * (2 if shape in NUMBERS else 1)):
                draw = random.Random(f"{shape} {distance} {number}")

                def filler(tokens: int, draw: random.Random = draw) -> str:
                    return filler_text(tokenizer, texts, tokens, draw)

                story = SHAPES[shape](draw, filler)
                parts = filler(70), filler(distance), filler(70)
                versions = tuple(_conversation(shape, story, version, parts) for version in range(3))
                yield Item(shape, distance, number, versions, story.question, *story.answers[1:])


def filler_text(tokenizer: Any, texts: Sequence[str], tokens: int, draw: random.Random) -> str:
    """Text of about so many tokens that has nothing to do with the facts."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer.encode("\n\n" + draw.choice(texts), add_special_tokens=False)
    text: str = tokenizer.decode(ids[:tokens]).strip()
    return text.rsplit(" ", 1)[0] if tokens else ""


def _conversation(shape: str, story: Story, version: int, parts: tuple[str, str, str]) -> Sequence[Message]:
    from blend.serve.request import Message

    lead, between, tail = parts
    fact = story.facts[version]
    if shape not in ("setting", "read again"):
        text = "\n\n".join(filter(None, [f"Background:\n{lead}", f"{fact}\n{between}".strip(), story.text, tail]))
        return [
            Message("system", "You answer briefly."),
            Message("user", text),
            Message("assistant", "I have read it."),
        ]
    read_again = shape == "read again" and version == 2
    shown = "[read again below]" if read_again else fact
    docstring = f'"""{between}"""\n\n\n' if between else ""
    said = [
        Message("system", "You are a coding agent."),
        Message("user", f"settings.py:\n# {lead}\n{shown}\n"),
        Message("assistant", "I have read settings.py."),
        Message("user", f"work.py:\nfrom settings import *\n\n\n{docstring}{story.text}\n\n\n# {tail}\n"),
        Message("assistant", "I have read work.py."),
    ]
    if read_again:
        said += [Message("user", f"settings.py, read again:\n{fact}\n"), Message("assistant", "I have read it.")]
    return said


class Reply(NamedTuple):
    """An answer of the server."""

    text: str
    tokens: Sequence[Token]
    figures: Figures


class Server:
    """A server over one model. learns: also computes text of prompts apart, when it is idle."""

    def __init__(self, decoder: Any, folder: Path, *, learns: bool) -> None:
        from blend.rag import Rag
        from blend.serve.engine.scheduler import EmbeddedEngine
        from blend.serve.service import Service

        rag = Rag(folder, decoder=decoder)
        engine = EmbeddedEngine(rag.blender, blender_of=lambda *_: rag.blender, remember=learns)
        self._service: Service = Service(rag, engine, unnamed="author")
        self._service.warm_up()
        self._learns = learns

    def close(self) -> None:
        """End it."""
        self._service.close()

    def forget(self, session: str) -> None:
        """Forget a session's rows and text."""
        self._service.end_session("", USER, session)

    def ask(
        self, messages: Sequence[Message], question: str, tokens: int, *, sampled: int | None = None, **fields: Any
    ) -> Reply:
        """Its answer. Returns when nothing is left to do. sampled: a seed; without one the answer is greedy."""
        from blend.sampling import Sampling
        from blend.serve.events import Failed, Finished, Output, Started
        from blend.serve.request import Message, Request

        temperature = 0.0 if sampled is None else 1.0
        sampling = Sampling(max_tokens=tokens, logprobs=ALTERNATIVES, temperature=temperature, seed=sampled)
        said = (*messages, Message("user", question))
        events = SimpleQueue[Any]()
        self._service.submit(Request(said, sampling=sampling, user=USER, **fields), events.put)
        text = ""
        answer: list[Token] = []
        figures: Figures | None = None
        while not isinstance(event := events.get(), Finished):
            if isinstance(event, Failed):
                raise SystemExit(f"a request failed: {event.error}")
            if isinstance(event, Started):
                figures = event.figures
            if isinstance(event, Output):
                text += event.text
                answer += event.tokens
        while not self._service.engine.stats().idle or (self._learns and not self._service.corrector.done):
            time.sleep(0.005)
        assert figures is not None
        return Reply(text, answer, figures)


def verdict(item: Item, text: str) -> str:
    """Whether an answer says the new or the old value."""
    says_new, says_old = (answer.lower() in text.lower() for answer in (item.new, item.old))
    if says_new == says_old:
        return "neither"
    return "right" if says_new else "stale"


def margin(item: Item, reply: Reply, tokenizer: Any) -> float | None:
    """Log p(new) - log p(old) where both answers differ first; None where the reply says something else before."""
    new, old = (tokenizer.encode(answer, add_special_tokens=False) for answer in (item.new, item.old))
    shared = 0
    while new[shared] == old[shared]:
        shared += 1
    if shared >= len(reply.tokens) or [token.id for token in reply.tokens[:shared]] != new[:shared]:
        return None
    likely = {token.id: token.logprob for token in reply.tokens[shared].top}
    return likely.get(new[shared], UNLIKELY) - likely.get(old[shared], UNLIKELY)


def measured(item: Item, servers: Callable[[str], Server], ways: Sequence[str], tokenizer: Any) -> Iterator[Row]:
    """A row for full prefill, and for each way if full prefill answers rightly before and after the edit."""
    _, second, third = item.versions
    server = servers("checked")
    of_second = _session()  # its rows are there for all ways
    before = server.ask(second, item.question, ANSWER_TOKENS, method="full", session=of_second)
    after = server.ask(third, item.question, ANSWER_TOKENS, method="full", cold=True)
    able = (verdict(item, before.text), verdict(item, after.text)) == ("stale", "right")
    margins = [margin(item, reply, tokenizer) for reply in (before, after)]
    texts = [before.text, after.text]
    yield {
        "way": "full",
        "able": able,
        "margins": margins,
        "texts": texts,
        "rows": after.figures.rows,
        "verdict": "right",
    }
    for way in ways if able else ():
        yield {"way": way} | _of_way(way, item, servers(way), margins, tokenizer)
    server.forget(of_second)


def _of_way(way: str, item: Item, server: Server, margins: Sequence[float | None], tokenizer: Any) -> Row:
    from blend.prefill import plan

    first, second, third = item.versions
    edits = {"exact": "exact", "moved": "fast", "fast": "fast"}.get(way, "checked")
    session = _session()
    asked_in = _session() if way == "apart" else session  # in another session nothing moves
    nothing = {"SEAM": 0, "MOVED_RATIO": 0.0, "PER_EDITED": 0} if way == "moved" else {"SEAM": plan.SEAM}
    with patch.multiple(plan, **nothing):
        for version in (first, second) if way == "checked" else (second,):
            server.ask(version, "Thanks. Say OK.", 2, edits=edits, session=session)
        reply = server.ask(third, item.question, ANSWER_TOKENS, edits=edits, session=asked_in)
    for name in {session, asked_in}:
        server.forget(name)
    figures = reply.figures
    return {
        "verdict": verdict(item, reply.text),
        "text": reply.text,
        "recovery": _recovery(margins, margin(item, reply, tokenizer)),
        "rows": figures.rows,
        "computed": figures.rows_computed,
        "moved": figures.rows_moved,
        "edits": figures.edits,
        "method": figures.method,
        "ttft_s": figures.ttft_s,
    }


def _session() -> str:
    return f"s{random.getrandbits(64):x}"


def _recovery(margins: Sequence[float | None], moved: float | None) -> float | None:
    before, after = margins
    if before is None or after is None or moved is None or after - before < 0.5:
        return None
    return (moved - before) / (after - before)


def measure(options: argparse.Namespace, results: Results) -> None:
    """Run what the file lacks."""
    from blend.model.decoder import Decoder
    from blend.weights import resolve_model

    results.begin(options, ("json", "show", "ways", "shapes"))
    decoder = Decoder.load(str(resolve_model(options.model)), name=options.model, dtype="auto")
    with ExitStack() as stack:
        made: dict[bool, Server] = {}

        def servers(way: str) -> Server:
            learns = way == "apart"
            if learns not in made:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                made[learns] = stack.enter_context(closing(Server(decoder, folder, learns=learns)))
            return made[learns]

        for item in items(decoder.tokenizer, options.shapes, options.per_cell):
            key = {"shape": item.shape, "distance": item.distance, "number": item.number}
            if results.find("stale", key):
                continue
            rows = list(measured(item, servers, options.ways, decoder.tokenizer))
            for row in rows:
                results.put("stale", key | {"way": row["way"]}, row)
            say(f"{item.shape}, {item.distance} tokens, {item.number}: {_told(rows)}")


def _told(rows: Sequence[Row]) -> str:
    if not rows[0]["able"]:
        return f"full prefill answers {rows[0]['texts']}"
    return ", ".join(f"{row['way']} {row['verdict']}" for row in rows[1:])


def tables(results: Results) -> Iterator[str]:
    """Ways over all items, and what is stale by distance and by shape."""
    rows = results.rows("stale")
    full = [row for row in rows if row["way"] == "full"]
    able = sum(row["able"] for row in full)
    yield f"{len(full)} items, {able} of which full prefill answers rightly before and after the edit."
    asked = [row for row in rows if row["way"] != "full"]
    lines = []
    for (way,), of_way in grouped(asked, "way").items():
        counts = [sum(row["verdict"] == verdict for row in of_way) for verdict in ("right", "stale", "neither")]
        recoveries = [row["recovery"] for row in of_way if row["recovery"] is not None]
        computed = sum(row["computed"] for row in of_way) / sum(row["rows"] for row in of_way)
        seconds = median(row["ttft_s"] for row in of_way)
        lines.append([way, len(of_way), *counts, f"{median(recoveries):.2f}", f"{computed:.0%}", f"{seconds:.2f} s"])
    yield from markdown("way | items | right | stale | neither | recovery | rows computed | TTFT", lines)
    for name in ("distance", "shape"):
        heads = list(dict.fromkeys(row[name] for row in asked))
        lines = []
        for (way,), of_way in grouped(asked, "way").items():
            cells = [[row["verdict"] == "stale" for row in of_way if row[name] == head] for head in heads]
            lines.append([way, *(f"{sum(cell)} of {len(cell)}" for cell in cells)])
        yield from markdown(f"stale, by {name} | {' | '.join(map(str, heads))}", lines)


def stale_command(arguments: Sequence[str]) -> int:
    """Measure, then show."""
    parser = command_line(__doc__, rows=True, model=MODEL)
    parser.add_argument("--per-cell", type=int, default=4, help="items of each shape at each distance (default 4)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    return measure_and_show(parser.parse_args(arguments), measure, tables)
