"""Questions about invented facts that are hidden in real text.

needle-single     one fact in one chunk
needle-multikey   the same, with facts of the same form about others in other chunks
needle-twohop     two facts in two chunks, both needed, with other pairs as distractors
needle-split      one statement across a chunk boundary: the end of a chunk names a person, the start of the next says
what is asked about "this ...". Reuse without attention between chunks should fail here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from blend.errors import ConfigError
from blend.eval.dataset import Record, RecordChunk

MIN_CHUNKS = 4
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


def make_needles(
    filler: Sequence[str],
    *,
    per_kind: int,
    chunks: int,
    seed: int,
) -> list[Record]:
    """`per_kind` records of each kind, kinds in turn; every record has `chunks` chunks, each one paragraph of `filler`.

    The same arguments give the same records, and a larger `per_kind` only adds to them. No name or number of a fact
    occurs in the filler around it. Raises `ConfigError` for less than 4 chunks or too little filler.
    """
    texts = [text.strip() for text in filler]
    paragraphs = list(dict.fromkeys(filter(None, texts)))
    if chunks < MIN_CHUNKS or per_kind < 1:
        raise ConfigError(
            f"needles need at least {MIN_CHUNKS} chunks and 1 question a kind, not {chunks} and {per_kind}"
        )
    if len(paragraphs) < chunks:
        raise ConfigError(
            f"needles over {chunks} chunks need as many different paragraphs of filler, not {len(paragraphs)}"
        )
    return [_needle_record(kind, number, paragraphs, chunks, seed) for number in range(per_kind) for kind in _KINDS]


def _needle_record(
    kind: str,
    number: int,
    paragraphs: list[str],
    chunks: int,
    seed: int,
) -> Record:
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
        return {
            "place": self._places.pop(),
            "person": self._people.pop(),
            "value": self._number(),
        }

    def _unused(self, names: str) -> list[str]:
        free = [name for name in names.split(", ") if name.casefold() not in self._filler]
        return self.rng.sample(free, len(free))

    def _number(self) -> str:
        while True:
            number = str(self.rng.randrange(10_000, 100_000))
            if number not in self._numbers and number not in self._filler:
                self._numbers.add(number)
                return number


def _single(supply: _Supply, chunks: int, distractors: int = 0) -> _Needle:
    form, fields = supply.rng.choice(_SINGLE_FORMS), supply.fields()
    places = supply.rng.sample(range(chunks), min(chunks, distractors + 1))
    fact = _Fact(places[0], form.first.format(**fields))
    lookalikes = [_Fact(place, form.first.format(**supply.fields())) for place in places[1:]]
    return _Needle(form.question.format(**fields), fields["value"], [fact], lookalikes)


def _multikey(supply: _Supply, chunks: int) -> _Needle:
    return _single(supply, chunks, _MAX_DISTRACTORS)


def _two_hop(supply: _Supply, chunks: int) -> _Needle:
    places = supply.rng.sample(range(chunks), min(chunks, 2 + _MAX_DISTRACTORS) // 2 * 2)
    pairs = list(zip(places[::2], places[1::2], strict=True))
    return _paired(supply, supply.rng.choice(_TWO_HOP_FORMS), pairs)


def _split(supply: _Supply, chunks: int) -> _Needle:
    # The distractor's boundary shares no chunk with that of the needle.
    firsts = range(chunks - 1)
    apart = [(needle, distractor) for needle in firsts for distractor in firsts if abs(needle - distractor) > 1]
    pairs = [(chunk, chunk + 1) for chunk in supply.rng.choice(apart)]
    return _paired(supply, supply.rng.choice(_SPLIT_FORMS), pairs, across=True)


def _paired(
    supply: _Supply,
    form: _Form,
    pairs: list[tuple[int, int]],
    *,
    across: bool = False,
) -> _Needle:
    """Facts of two parts in the given pairs of chunks, the first pair asked for; `across` puts them at the boundary."""
    ends: tuple[_Place, _Place] = ("end", "start") if across else ("inside", "inside")
    drawn = [supply.fields() for _ in pairs]
    parts = [
        _Fact(chunk, text.format(**fields), place)
        for pair, fields in zip(pairs, drawn, strict=True)
        for chunk, text, place in zip(pair, (form.first, form.second), ends, strict=True)
    ]
    needle = drawn[0]
    return _Needle(
        form.question.format(**needle),
        needle["value"],
        parts[:2],
        parts[2:],
    )


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
