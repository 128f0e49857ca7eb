"""Contents of documents and sheets, drawn by chance, with the 20 facts that each states. No format is known here."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from _reader_facts import BLANK, TICKED, Fact, Group

FACTS = 20  # of each document
FILLER = (
    "The harbour office keeps this list for masters of ships that call during the season.",
    "Changes are announced on the board beside the gate, and by radio every morning.",
    "Ships that carry passengers are served first when the weather allows it.",
    "Masters who cannot keep these times call the office before the tide turns.",
)
_TOWNS = [
    "Alnmouth", "Brodick", "Carrick", "Dunvegan", "Eyemouth", "Fortrose", "Gairloch", "Helmsdale", "Inverkip",
    "Jemimaville", "Kinlochbervie", "Lerwick", "Mallaig", "Nairn", "Oban", "Portree", "Quoyburray", "Rothesay",
    "Stranraer", "Tarbert", "Ullapool", "Voe", "Wick", "Yell", "Arisaig", "Ballachulish", "Corpach", "Drumbeg",
    "Edderton", "Findhorn", "Golspie", "Hopeman", "Inchnadamph", "Kyleakin", "Lochaline", "Melvaig", "Newtonmore",
    "Onich", "Plockton", "Rosehearty", "Scrabster", "Tongue", "Uig", "Whaligoe", "Achiltibuie", "Bonar", "Cromarty",
    "Dornoch", "Evanton", "Foyers", "Glenelg", "Halkirk", "Invergordon", "Kilchoan", "Lybster", "Munlochy", "Nigg",
    "Ormlie", "Poolewe", "Raasay", "Shieldaig", "Tomatin", "Unapool", "Vatten", "Waternish",
]  # fmt: skip
_COLUMNS = ("Berths", "Cranes", "Tonnage", "Ferries", "Pilots", "Moorings")
_GROUPS = (("Spring", "Autumn"), ("Arrivals", "Departures"))
_VERBS = ("Close the valve at", "Sound the horn at", "Lower the boom at", "Light the lamp at", "Call the pilot at")
_COLOURS = ("Crimson", "Turquoise", "Magenta", "Ochre", "Indigo")


class Draws:
    """Names and numbers that do not repeat within one document."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._towns = iter(self.random.sample(_TOWNS, len(_TOWNS)))
        self._numbers = iter(self.random.sample(range(1013, 9973), 4000))

    def towns(self, count: int) -> list[str]:
        return [next(self._towns) for _ in range(count)]

    def numbers(self, count: int) -> list[str]:
        return [str(next(self._numbers)) for _ in range(count)]


@dataclass(frozen=True)
class Block:
    """A part of a document, and the facts that it states."""

    facts: list[Fact] = field(repr=False)


@dataclass(frozen=True)
class Pairs(Block):
    """Labels with values. name: what they are: Fields, Sections, Notes, Links, Edits, Comments, Powers or Code."""

    name: str
    pairs: list[tuple[str, str]]
    old: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Running(Block):
    """What stands at the top or the bottom of every page."""

    name: str
    text: str


@dataclass(frozen=True)
class Table(Block):
    """header: rows of (label, columns that it spans); the first column holds the rows' labels."""

    caption: str
    header: list[list[tuple[str, int]]]
    rows: list[list[str]]


@dataclass(frozen=True)
class Steps(Block):
    """A list with numbers from `start` on."""

    start: int
    items: list[str]


@dataclass(frozen=True)
class Bullets(Block):
    """A list of lists."""

    items: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Form(Block):
    """Boxes that are ticked or not, and a choice of one in several."""

    boxes: list[tuple[str, bool]]
    label: str
    choices: list[str]
    chosen: str


@dataclass(frozen=True)
class Picture(Block):
    """A picture with a caption, and a text in its place."""

    caption: str
    alt: str


class Content(NamedTuple):
    """A document."""

    title: str
    blocks: list[Block]

    @property
    def facts(self) -> list[Fact]:
        return [fact for block in self.blocks for fact in block.facts]


def pairs(draws: Draws, name: str, count: int) -> Pairs:
    """Labels with numbers; the labels of fields have two words, those of headings and anchors one."""
    suffix = {"Fields": " depth", "Links": " tables", "Edits": " rent", "Powers": " volume", "Code": "_limit"}.get(
        name, ""
    )
    labels = [f"{town}{suffix}" for town in draws.towns(count)]
    values = draws.numbers(count)
    forms: list[tuple[str, ...]] = [(value,) for value in values]
    old = draws.numbers(count) if name == "Edits" else []
    if name == "Links":
        values = [f"https://harbours.example/{value}.html" for value in values]
        forms = [(value,) for value in values]
    if name == "Powers":
        values = [f"{value[0]}.{value[1]}·10^{value[2]}" for value in values]
        forms = [(value, value.replace("·", " · "), value.replace("·", "*")) for value in values]
    group = Group(tuple(labels), tuple(values))
    relation = "note" if name in ("Notes", "Comments") else "after"
    kind = name.lower()
    facts = [
        Fact(kind, relation, label, form, group, wrong=(old[index],) if old else ())
        for index, (label, form) in enumerate(zip(labels, forms, strict=True))
    ]
    return Pairs(facts, name, list(zip(labels, values, strict=True)), old)


def running(draws: Draws, name: str) -> Running:
    """A head or a foot."""
    [number] = draws.numbers(1)
    label = {"Head": "Contract", "Foot": "Archive"}[name]
    return Running([Fact(name.lower(), "line", label, (number,), Group((label,)))], name, f"{label} no. {number}")


def table(draws: Draws, rows: int, columns: int, *, length: int = 0, blanks: bool = False) -> Table:
    """A table under one row of header. length: its rows in all, of which `rows` are asked for; blanks: empty cells."""
    names = draws.random.sample(_COLUMNS, columns)
    towns = draws.towns(rows)
    labels = [*towns]
    for quay in range(1, 1 + max(0, length - rows)):
        labels.insert(draws.random.randrange(len(labels) + 1), f"Quay {quay:02d}")
    cells = {town: draws.numbers(columns) for town in labels}
    if blanks:
        for place, town in enumerate(labels):
            if place % 2 and town not in towns:
                cells[town][0] = ""
    facts = [_cell(town, labels, cells[town], place, (names,)) for town in towns for place in range(columns)]
    [number] = draws.numbers(1)
    caption = f"Table {number}: what the harbours have"
    facts.append(Fact("caption", "line", "what the harbours have", (number,), Group(())))
    header = [("Harbour", 1), *((name, 1) for name in names)]
    return Table(facts, caption, [header], [[town, *cells[town]] for town in labels])


def merged_table(draws: Draws, rows: int) -> Table:
    """A table whose header has two rows: years over seasons."""
    groups, years = draws.random.choice(_GROUPS), ("Year 2031", "Year 2032")
    labels = draws.towns(rows)
    cells = {town: draws.numbers(4) for town in labels}
    levels = ([year for year in years for _ in groups], [*groups, *groups])
    facts = [_cell(town, labels, cells[town], place, levels) for town in labels for place in range(4)]
    [number] = draws.numbers(1)
    facts.append(Fact("caption", "line", "ships of each season", (number,), Group(())))
    header = [[("Harbour", 1), *((year, 2) for year in years)], [("", 1), *((name, 1) for name in (*groups, *groups))]]
    return Table(facts, f"Table {number}: ships of each season", header, [[town, *cells[town]] for town in labels])


def _cell(
    label: str,
    labels: Sequence[str],
    cells: Sequence[str],
    place: int,
    levels: Sequence[Sequence[str]],
    kind: str = "table",
) -> Fact:
    columns = tuple(tuple(dict.fromkeys(level)) for level in levels)
    group = Group(tuple(labels), tuple(filter(None, cells)), columns)
    return Fact(kind, "row", label, (cells[place],), group, tuple(level[place] for level in levels))


def steps(draws: Draws, count: int, start: int) -> Steps:
    """Steps with numbers."""
    items = [
        f"{verb} {town}" for verb, town in zip(draws.random.sample(_VERBS, count), draws.towns(count), strict=True)
    ]
    facts = [
        Fact("number", "line", item, (f"{number}.", f"{number})", f"({number})"), Group(tuple(items)))
        for number, item in enumerate(items, start)
    ]
    return Steps(facts, start, items)


def bullets(draws: Draws, parents: int, children: int) -> Bullets:
    """A list of lists."""
    names = draws.towns(parents)
    lists = [draws.numbers(children) for _ in names]
    group = Group(tuple(names))
    facts = [
        Fact("list", "after", name, (value,), group)
        for name, values in zip(names, lists, strict=True)
        for value in values
    ]
    return Bullets(
        facts, [(name, [f"mooring {value}" for value in values]) for name, values in zip(names, lists, strict=True)]
    )


def form(draws: Draws, count: int) -> Form:
    """Boxes and a choice."""
    ticked = [True, False, *(draws.random.random() < 0.5 for _ in range(count))][:count]
    boxes = [(f"{town} ferry", state) for town, state in zip(draws.towns(count), ticked, strict=True)]
    choices = draws.random.sample(_COLOURS, 3)
    chosen = choices[draws.random.randrange(1, 3)]
    facts = [Fact("box", "tick", label, TICKED if state else BLANK, Group(())) for label, state in boxes]
    facts.append(Fact("choice", "chosen", "Colour of the flag", (chosen,), Group((), tuple(choices))))
    return Form(facts, boxes, "Colour of the flag", choices, chosen)


def picture(draws: Draws) -> Picture:
    """A picture with a caption, and a text in its place."""
    [town] = draws.towns(1)
    number, height = draws.numbers(2)
    facts = [
        Fact("caption", "line", f"mast of {town}", (number,), Group(())),
        Fact("picture's text", "line", f"painted mast at {town}", (height,), Group(())),
    ]
    return Picture(facts, f"Figure {number}: mast of {town}", f"painted mast at {town}, {height} cm")


def report(seed: int) -> Content:
    """Fields, a table, steps, notes, a header and a footer."""
    draws = Draws(seed)
    blocks: list[Block] = [
        running(draws, "Head"),
        pairs(draws, "Fields", 3),
        pairs(draws, "Notes", 2),
        table(draws, 3, 2),
    ]
    blocks += [steps(draws, 3, 1), pairs(draws, "Sections", 2), pairs(draws, "Code", 1), running(draws, "Foot")]
    return Content(f"Report on {draws.towns(1)[0]}", blocks)


def registration(seed: int) -> Content:
    """A table of years and seasons, nested lists, boxes, powers and a picture."""
    draws = Draws(seed)
    blocks: list[Block] = [merged_table(draws, 2), bullets(draws, 2, 2), form(draws, 3)]
    return Content(f"Registration of {draws.towns(1)[0]}", [*blocks, pairs(draws, "Powers", 1), picture(draws)])


def contract(seed: int) -> Content:
    """Edits, comments, notes, links, sections, and steps that start later."""
    draws = Draws(seed)
    names = (("Fields", 2), ("Edits", 2), ("Comments", 2), ("Notes", 2), ("Links", 2), ("Sections", 4))
    middle = [pairs(draws, name, count) for name, count in names]
    return Content(
        f"Contract with {draws.towns(1)[0]}",
        [running(draws, "Head"), *middle, steps(draws, 3, 5), bullets(draws, 1, 1), running(draws, "Foot")],
    )


def register(seed: int) -> Content:
    """A long table with empty cells, and what stands around it."""
    draws = Draws(seed)
    blocks: list[Block] = [pairs(draws, "Fields", 2), table(draws, 4, 3, length=60, blanks=True)]
    return Content(
        f"Register of {draws.towns(1)[0]}", [*blocks, pairs(draws, "Notes", 1), picture(draws), steps(draws, 2, 3)]
    )


DOCUMENTS = (report, registration, contract, register)


class Cell(NamedTuple):
    """A cell: what it holds, the format of its number, and what a person sees in it. right: more forms of the same value."""

    value: object
    shown: str
    number_format: str = "General"
    right: tuple[str, ...] = ()


class Sheet(NamedTuple):
    """A sheet with one table. header: rows of (label, columns that it spans). notes: beside the cells of these rows."""

    name: str
    caption: str
    header: list[list[tuple[str, int]]]
    rows: list[list[Cell]]
    facts: list[Fact]
    notes: dict[int, str] = {}  # noqa: RUF012  (never changed)


def plain_sheet(draws: Draws, name: str, rows: int, columns: int, *, length: int = 0, caption: bool = True) -> Sheet:
    """Numbers under one row of header, and under a caption."""
    block = table(draws, rows, columns, length=length, blanks=bool(length))
    cells = [[Cell(label, label), *(Cell(int(value), value) if value else Cell(None, "") for value in values)]
             for label, *values in block.rows]  # fmt: skip
    facts = [fact._replace(values=(*fact.values, f"{fact.values[0]}.0")) for fact in block.facts]
    facts = facts if caption else facts[:-1]
    return Sheet(name, block.caption if caption else "", block.header, cells, facts)


def merged_sheet(draws: Draws, rows: int, notes: int) -> Sheet:
    """Years over seasons, with notes at the rows' labels."""
    block = merged_table(draws, rows)
    cells = [[Cell(label, label), *(Cell(int(value), value) for value in values)] for label, *values in block.rows]
    labels = [label for label, *_ in block.rows]
    remarks = dict(enumerate(draws.numbers(notes)))
    group = Group(tuple(labels))
    extra = [Fact("notes", "note", labels[row], (value,), group) for row, value in remarks.items()]
    texts = {row: f"Dredged to {value}" for row, value in remarks.items()}
    return Sheet("Seasons", block.caption, block.header, cells, [*block.facts, *extra], texts)


def formatted_sheet(draws: Draws, rows: int, comma: bool = False) -> Sheet:
    """Codes, shares, amounts, days and hours, as a person sees them. comma: decimal commas."""
    names = ["Code", "Share", "Amount", "Day", "Hours"]
    labels = draws.towns(rows)
    table_rows: list[list[Cell]] = []
    facts: list[Fact] = []
    for label in labels:
        cells = list(_formatted(draws, comma))
        table_rows.append([Cell(label, label), *cells])
        shown = [cell.shown for cell in cells]
        for place, cell in enumerate(cells):
            fact = _cell(label, labels, shown, place, (names,), f"cell: {names[place].lower()}")
            facts.append(fact._replace(values=(cell.shown, *cell.right)))
    return Sheet("Fees", "", [[("Harbour", 1), *((name, 1) for name in names)]], table_rows, facts)


def _formatted(draws: Draws, comma: bool) -> Iterator[Cell]:
    code, share, amount, day, hours = map(int, draws.numbers(5))

    def written(number: str) -> str:
        return number.translate(str.maketrans(",.", ".,")) if comma else number

    rate = written(f"{share // 10 % 100}.{share % 10}")
    cents = amount + 0.5
    amounts = [written(f"{cents:,.2f}"), written(f"{cents:.2f}")]
    amount_forms = [sign.format(number) for number in amounts for sign in ("€{}", "€ {}", "{} €")]
    year_first = f"2031-{day % 12 + 1:02d}-{day % 28 + 1:02d}"
    time = f"{hours % 40 + 25}:{hours % 60:02d}"
    days = (hours % 40 + 25) / 24 + hours % 60 / 1440
    yield Cell(code, f"{code:05d}", "00000")
    yield Cell(float(rate.replace(",", ".")) / 100, f"{rate}%", "0.0%", (f"{rate} %",))
    yield Cell(cents, amount_forms[0], '"€"#,##0.00', tuple(amount_forms[1:]))
    yield Cell(year_first, "/".join(reversed(year_first.split("-"))), "dd/mm/yyyy", (year_first,))
    yield Cell(days, time, "[h]:mm", (f"{time}:00",))


def sheets(number: int, comma: bool = False) -> list[Sheet]:
    """The sheets of a file of tables; six kinds."""
    draws = Draws(9000 + number)
    kind = number % 6
    if kind in (0, 5):
        return [formatted_sheet(draws, 4, comma)]
    if kind == 1:
        return [plain_sheet(draws, "North", 3, 3), plain_sheet(draws, "South", 3, 3)]
    if kind == 2:
        return [merged_sheet(draws, 4, 3)]
    if kind == 3:
        return [plain_sheet(draws, "Register", 5, 4, length=300, caption=False)]
    block = merged_sheet(draws, 2, 1)
    return [block, formatted_sheet(draws, 2, comma)]
