"""Questions about invented facts that are hidden in real text.

needle-single    one fact in one chunk, with one of the same form about another place in another chunk
needle-split     one statement across a chunk boundary: the end of a chunk names a person, the start of the next says
what is asked about "this ...". Reuse without attention between chunks should fail here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from blend.eval.dataset import Record, RecordChunk

MIN_CHUNKS = 4
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
# Task, question, the end of a chunk, and the start of the next one.
_FORMS = (
    (
        "needle-single",
        "What is the access code of the {place} archive?",
        "The access code of the {place} archive is {value}.",
        "",
    ),
    (
        "needle-split",
        "What was the badge number of {person}?",
        "The next keeper of the {place} lighthouse was {person}.",
        "The badge number of this keeper was {value}.",
    ),
    (
        "needle-single",
        "What is the radio call number of the {place} ferry?",
        "The radio call number of the {place} ferry is {value}.",
        "",
    ),
    (
        "needle-split",
        "What is the number of the locker of {person}?",
        "The head gardener of {place} Park is {person}.",
        "The locker of this gardener has the number {value}.",
    ),
)


def make_needles(filler: Sequence[str], count: int, chunks: int) -> list[Record]:
    """So many records, kinds in turn; every record has `chunks` chunks, each one paragraph of `filler`.

    The same filler gives the same records, and a larger `count` only adds to them. No number of a fact occurs in the filler
    around it.

    Args:
        filler: Different paragraphs, at least `chunks`.
        count: Records.
        chunks: At least `MIN_CHUNKS`.

    """
    return [_needle(number, filler, chunks) for number in range(count)]


def _needle(number: int, filler: Sequence[str], chunks: int) -> Record:
    rng = random.Random(number)
    task, question, end, start = _FORMS[number % len(_FORMS)]
    texts = rng.sample(filler, chunks)
    # The second fact is a distractor, and shares no chunk with the first.
    places = rng.sample(range(0, chunks - 1, 2), 2)
    fields = _fields(rng, "\n".join(texts), len(places))
    for place, names in zip(places, fields, strict=True):
        texts[place] = f"{texts[place]} {end.format(**names)}"
        texts[place + 1] = f"{start.format(**names)} {texts[place + 1]}".strip()
    return Record(
        id=f"{task}-{number:02d}",
        question=question.format(**fields[0]),
        answers=(fields[0]["value"],),
        chunks=tuple(RecordChunk("", text) for text in texts),
        task=task,
    )


def _fields(rng: random.Random, filler: str, count: int) -> list[dict[str, str]]:
    """Places, persons and five-digit values, none of which occurs twice; no value occurs in the filler."""
    places = rng.sample(_PLACES.split(", "), count)
    people = rng.sample(_PEOPLE.split(", "), count)
    values: list[str] = []
    while len(values) < count:
        value = str(rng.randrange(10_000, 100_000))
        if value not in filler and value not in values:
            values.append(value)
    drawn = zip(places, people, values, strict=True)
    return [{"place": place, "person": person, "value": value} for place, person, value in drawn]
