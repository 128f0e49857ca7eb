"""Question files: JSON Lines, one record a line.

    {"id": "q1", "question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}], "gold_chunks": [0]}

`id`, `question` and `chunks` are required. `answers` (gold answers, the best one counts), `gold_chunks` (indices of the
chunks that hold the answer), `task` (a label to report by) and `all_values` (values that must all be named) may be left
out; other keys are ignored. `"chunks": []` asks the bare question.

`make_needles` builds records instead of reading them: invented facts hidden in real text.

    needle-single     one fact in one chunk
    needle-multikey   the same, with facts of the same form about others in other chunks
    needle-twohop     two facts in two chunks, both needed, with other pairs as distractors
    needle-split      one statement across a chunk boundary: the end of a chunk names a person, the start of the next says
                      what is asked about "this ...". Reuse without attention between chunks should fail here.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from blend.errors import ConfigError, DatasetError
from blend_retrieval.decoding import marked_encoding

LINE = '{"id": "q1", "question": "...", "answers": ["..."], "chunks": [{"title": "...", "text": "..."}]}'
LONGEST_LINE = 100_000_000  # characters
MIN_CHUNKS = 4


@dataclass(frozen=True)
class RecordChunk:
    """One retrieved text; the title may be empty, the text is not."""

    title: str
    text: str


@dataclass(frozen=True)
class Record:
    """One question with the chunks to answer it from."""

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[RecordChunk, ...]
    gold_chunks: tuple[int, ...] = ()
    task: str = "qa"
    all_values: tuple[str, ...] = ()


def load_dataset(path: str | Path, limit: int | None = None) -> list[Record]:
    """The first `limit` records of a question file, or all; lines after them are not read and blank lines are skipped.

    Raises `DatasetError` naming file and line for what cannot be read, a repeated id, or a file without records, and
    `ConfigError` for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}")
    path = Path(path)
    records: dict[str, Record] = {}
    for place, line in islice(_lines(path), limit):
        record = _record(place, line)
        if record.id in records:
            raise DatasetError(f"{place}: id {record.id!r} was used before; ids must be unique")
        records[record.id] = record
    if not records:
        raise DatasetError(f"{path}: holds no records; expected lines like {LINE}")
    return list(records.values())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with its place as `file:line`."""
    number = 0
    try:
        with path.open("rb") as data:
            file = io.TextIOWrapper(data, marked_encoding(data.peek(4)))
            # No more than a line may have is read at once: a device may never end one.
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), ""), start=1):
                if len(line) > LONGEST_LINE:
                    raise DatasetError(f"{path}:{number}: longer than {LONGEST_LINE:,} characters; expected JSON Lines")
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        place = f" soon after line {number}" if number else ""
        raise DatasetError(f"{path}: not UTF-8 text{place}; expected JSON Lines") from error


def _record(place: str, line: str) -> Record:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DatasetError(f"{place}: not JSON ({reason}); expected one JSON object a line") from error
    if not isinstance(fields, dict):
        raise DatasetError(f"{place}: expected a JSON object, not {_kind(fields)}")
    return _Fields(place, fields).record()


_KINDS_OF_JSON = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_T = TypeVar("_T")


def _kind(value: object) -> str:
    return _KINDS_OF_JSON.get(type(value), "a number")


class _Fields:
    """The keys of one line, each checked as it is taken."""

    def __init__(self, place: str, fields: dict[str, object]) -> None:
        self._place = place
        self._fields = fields

    def record(self) -> Record:
        chunks = tuple(self._chunk(f'"chunks"[{i}]', one) for i, one in enumerate(self._required("chunks", list)))
        number = self._fields.get("id")  # row numbers are common ids
        return Record(
            id=str(number) if type(number) is int else self._filled("id"),
            question=self._filled("question"),
            answers=self._texts("answers"),
            chunks=chunks,
            gold_chunks=self._indices("gold_chunks", len(chunks)),
            task="qa" if self._fields.get("task") is None else self._filled("task"),
            all_values=self._texts("all_values"),
        )

    def _required(self, key: str, kind: type[_T]) -> _T:
        if key not in self._fields:
            raise self._error(f'"{key}" is missing; a line looks like {LINE}')
        return self._checked(f'"{key}"', self._fields[key], kind)

    def _filled(self, key: str) -> str:
        text = self._required(key, str)
        if not text.strip():
            raise self._error(f'"{key}" is empty')
        return text

    def _checked(self, what: str, value: object, kind: type[_T]) -> _T:
        if not isinstance(value, kind):
            raise self._error(f"{what} must be {_KINDS_OF_JSON[kind]}, not {_kind(value)}")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise self._error(f"{what} holds half of a surrogate pair, which is not text")
        return value

    def _list(self, key: str) -> list[object]:
        return [] if self._fields.get(key) is None else self._required(key, list)

    def _texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._checked(f'"{key}"[{i}]', value, str) for i, value in enumerate(self._list(key)))

    def _indices(self, key: str, count: int) -> tuple[int, ...]:
        found = []
        for value in self._list(key):
            if type(value) is not int or not 0 <= value < count:
                raise self._error(f'"{key}" must hold indices of its {count} chunks, counted from 0, not {value!r:.40}')
            found.append(value)
        return tuple(found)

    def _chunk(self, what: str, value: object) -> RecordChunk:
        fields = self._checked(what, value, dict)
        title = "" if fields.get("title") is None else fields["title"]
        text = self._checked(f"{what}.text", fields.get("text"), str)
        if not text.strip():
            raise self._error(f"{what} has no text")
        return RecordChunk(self._checked(f"{what}.title", title, str), text)

    def _error(self, problem: str) -> DatasetError:
        return DatasetError(f"{self._place}: {problem}")


_MAX_DISTRACTORS = 4
_PLACES = (
    "Aldmoor, Brackwater, Calderwick, Dunmarrow, Elverstone, Farrowgate, Glenhollow, Harrowmere, Inverlatch, "
    "Juniper Cross, Kestrel Bay, Larkhaven, Mossbridge, Netherfold, Oakhampton, Pellworth, Quillbury, Ravensmoor, "
    "Saltmarsh, Thornaby, Umberleigh, Vexford, Wrenfield, Yarrowdale"
)
_PEOPLE = (
    "Wanda Pryor, Yusuf Ivers, Marta Vogel, Tobias Quick, Ingrid Solheim, Pavel Novotny, Amara Diallo, Hugo Lindqvist, "
    "Priya Raman, Connor Blythe, Lucia Ferrante, Emeka Okafor, Saskia Bloem, Dario Conti, Freya Halvorsen, Kenji Morita, "
    "Noemi Szabo, Gareth Penrose, Leila Haddad, Rufus Tennant"
)


class _Form(NamedTuple):
    """How one kind of fact is written and asked for; `first` and `second` are the two parts of a fact that has two."""

    question: str
    first: str
    second: str = ""


_SINGLE_FORMS = tuple(
    _Form(f"What is the {number} of the {{place}} {thing}?", f"The {number} of the {{place}} {thing} is {{value}}.")
    for number, thing in (("access code", "archive"), ("order number", "bell"), ("radio call number", "ferry"))
)
_TWO_HOP_FORMS = (
    _Form(
        "What is the door code of the observatory where {person} works?",
        *("{person} works at the {place} observatory.", "The door code of the {place} observatory is {value}."),
    ),
    _Form(
        "What is the registration number of the ship whose captain is {person}?",
        *("{person} is the captain of the ship {place}.", "The registration number of the ship {place} is {value}."),
    ),
)
_SPLIT_FORMS = (
    _Form(
        "What was the badge number of {person}?",
        *("The next keeper of the {place} lighthouse was {person}.", "The badge number of this keeper was {value}."),
    ),
    _Form(
        "What is the number of the locker of {person}?",
        *("The head gardener of {place} Park is {person}.", "The locker of this gardener has the number {value}."),
    ),
)


_Place = Literal["start", "inside", "end"]


class _Fact(NamedTuple):
    """One sentence and where in which chunk it goes."""

    chunk: int
    sentence: str
    place: _Place = "inside"


class _Needle(NamedTuple):
    """A question, its answer, the facts that hold it, and the facts that only look like it."""

    question: str
    answer: str
    facts: list[_Fact]
    distractors: list[_Fact]


def make_needles(filler: Sequence[str], *, per_kind: int, chunks: int, seed: int) -> list[Record]:
    """`per_kind` records of each kind, kinds in turn; every record has `chunks` chunks, each one paragraph of `filler`.

    The same arguments give the same records, and a larger `per_kind` only adds to them. No name or number of a fact
    occurs in the filler around it. Raises `ConfigError` for less than 4 chunks or too little filler.
    """
    paragraphs = list(dict.fromkeys(text.strip() for text in filler if text.strip()))
    if chunks < MIN_CHUNKS or per_kind < 1:
        raise ConfigError(
            f"needles need at least {MIN_CHUNKS} chunks and 1 question a kind, not {chunks} and {per_kind}"
        )
    if len(paragraphs) < chunks:
        raise ConfigError(
            f"needles over {chunks} chunks need as many different paragraphs of filler, not {len(paragraphs)}"
        )
    return [_needle_record(kind, number, paragraphs, chunks, seed) for number in range(per_kind) for kind in _KINDS]


def _needle_record(kind: str, number: int, paragraphs: list[str], chunks: int, seed: int) -> Record:
    rng = random.Random(f"{seed}/{kind}/{number}")
    texts = rng.sample(paragraphs, chunks)
    needle = _KINDS[kind](_Supply(rng, texts), chunks)
    for fact in (*needle.facts, *needle.distractors):
        texts[fact.chunk] = _insert(texts[fact.chunk], fact, rng)
    return Record(
        id=f"needle-{kind}-{number:02d}",
        question=needle.question,
        answers=(needle.answer,),
        chunks=tuple(RecordChunk("", text) for text in texts),
        gold_chunks=tuple(sorted(fact.chunk for fact in needle.facts)),
        task=f"needle-{kind}",
    )


class _Supply:
    """Names and numbers, each given out once, none of which occurs in the filler."""

    def __init__(self, rng: random.Random, texts: Sequence[str]) -> None:
        self.rng = rng
        self._filler = "\n".join(texts).casefold()
        self._places = self._unused(_PLACES)
        self._people = self._unused(_PEOPLE)
        self._numbers: set[str] = set()

    def fields(self) -> dict[str, str]:
        """A place, a person and a five-digit value that no other fact of this record has."""
        if not self._places or not self._people:
            raise ConfigError("the filler already holds the names that needles are made of; give other text")
        return {"place": self._places.pop(), "person": self._people.pop(), "value": self._number()}

    def _unused(self, names: str) -> list[str]:
        free = [name for name in names.split(", ") if name.casefold() not in self._filler]
        return self.rng.sample(free, len(free))

    def _number(self) -> str:
        while (number := str(self.rng.randrange(10_000, 100_000))) in self._numbers or number in self._filler:
            pass
        self._numbers.add(number)
        return number


def _single(supply: _Supply, chunks: int, distractors: int = 0) -> _Needle:
    form, fields = supply.rng.choice(_SINGLE_FORMS), supply.fields()
    places = supply.rng.sample(range(chunks), min(chunks, distractors + 1))
    fact = _Fact(places[0], form.first.format(**fields))
    others = [_Fact(place, form.first.format(**supply.fields())) for place in places[1:]]
    return _Needle(form.question.format(**fields), fields["value"], [fact], others)


def _multikey(supply: _Supply, chunks: int) -> _Needle:
    return _single(supply, chunks, _MAX_DISTRACTORS)


def _two_hop(supply: _Supply, chunks: int) -> _Needle:
    places = supply.rng.sample(range(chunks), min(chunks, 2 + _MAX_DISTRACTORS) // 2 * 2)
    return _paired(supply, supply.rng.choice(_TWO_HOP_FORMS), list(zip(places[::2], places[1::2], strict=True)))


def _split(supply: _Supply, chunks: int) -> _Needle:
    # The distractor's boundary shares no chunk with that of the needle.
    apart = [(one, two) for one in range(chunks - 1) for two in range(chunks - 1) if abs(one - two) > 1]
    pairs = [(chunk, chunk + 1) for chunk in supply.rng.choice(apart)]
    return _paired(supply, supply.rng.choice(_SPLIT_FORMS), pairs, across=True)


def _paired(supply: _Supply, form: _Form, pairs: list[tuple[int, int]], *, across: bool = False) -> _Needle:
    """Facts of two parts in the given pairs of chunks, the first pair asked for; `across` puts them at the boundary."""
    ends: tuple[_Place, _Place] = ("end", "start") if across else ("inside", "inside")
    drawn = [supply.fields() for _ in pairs]
    parts = [
        _Fact(chunk, text.format(**fields), place)
        for pair, fields in zip(pairs, drawn, strict=True)
        for chunk, text, place in zip(pair, (form.first, form.second), ends, strict=True)
    ]
    return _Needle(form.question.format(**drawn[0]), drawn[0]["value"], parts[:2], parts[2:])


_KINDS: dict[str, Callable[[_Supply, int], _Needle]] = {
    "single": _single,
    "multikey": _multikey,
    "twohop": _two_hop,
    "split": _split,
}


def _insert(text: str, fact: _Fact, rng: random.Random) -> str:
    """The text with the sentence at its start, at its end, or between two sentences (at the end of a single one)."""
    boundaries = [match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+(?=[\"'(]?[A-Z])", text)]
    if fact.place == "inside" and boundaries:
        cut = rng.choice(boundaries)
        return f"{text[:cut]}{fact.sentence} {text[cut:]}"
    if fact.place == "start":
        return f"{fact.sentence} {text}" if text[:1].isupper() else f"{fact.sentence}\n{text}"
    return f"{text} {fact.sentence}" if text[-1:] in ".!?" else f"{text}\n{fact.sentence}"
