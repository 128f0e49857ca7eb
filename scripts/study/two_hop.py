"""Questions that need two chunks: who holds an office is in one chunk, a number of that person in another."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from blend.errors import DatasetError

KIND = "needle-twohop"
MIN_WORDS = 40  # of a paragraph that serves as a chunk
PAIRS = 3  # offices with their holders in a record; the question asks for one
_OFFICES = ("keeper", "archivist", "surveyor", "gardener", "bell founder", "toll clerk", "pilot", "cartographer")
_PLACES = ("Aldmoor", "Brackwater", "Calderwick", "Dunmarrow", "Farrowgate", "Harrowmere", "Mossbridge", "Thornaby")
_PEOPLE = ("Wanda Pryor", "Yusuf Ivers", "Marta Vogel", "Tobias Quick", "Pavel Novotny", "Amara Diallo", "Priya Raman")

Document = dict[str, object]
"""A record of a set, as its JSON line has it."""


def paragraphs(files: Sequence[Path]) -> list[str]:
    """The different paragraphs of text files that are long enough for a chunk, in their order."""
    texts = [part for file in files for part in file.read_text(encoding="utf-8").split("\n\n")]
    words = [text.split() for text in texts]
    return list(dict.fromkeys(" ".join(text) for text in words if len(text) >= MIN_WORDS))


def two_hop_records(filler: Sequence[str], count: int, chunks: int) -> list[Document]:
    """So many records of `chunks` chunks, each one paragraph of `filler` and at most one sentence of a fact.

    The same filler gives the same records, and a larger `count` only adds to them. Raises `DatasetError` for too little filler.
    """
    if chunks < 2 * PAIRS or len(filler) < chunks:
        raise DatasetError(
            f"{len(filler)} paragraphs and {chunks} chunks: at least {2 * PAIRS} chunks, and as many paragraphs"
        )
    return [_two_hop(number, filler, chunks) for number in range(count)]


def _two_hop(number: int, filler: Sequence[str], chunks: int) -> Document:
    generator = random.Random(number)
    texts = generator.sample(filler, chunks)
    offices = generator.sample(_OFFICES, PAIRS)
    places = generator.sample(_PLACES, PAIRS)
    people = generator.sample(_PEOPLE, PAIRS)
    values = [str(value) for value in generator.sample(range(10_000, 100_000), PAIRS)]
    facts = [
        f"The {office} of {place} is {person}." for office, place, person in zip(offices, places, people, strict=True)
    ]
    facts += [f"The badge number of {person} is {value}." for person, value in zip(people, values, strict=True)]
    for chunk, fact in zip(generator.sample(range(chunks), len(facts)), facts, strict=True):
        texts[chunk] = f"{texts[chunk]} {fact}"
    return {
        "id": f"{KIND}-{number:03d}",
        "question": f"What is the badge number of the {offices[0]} of {places[0]}?",
        "answers": [values[0]],
        "chunks": [{"title": "", "text": text} for text in texts],
        "task": KIND,
    }


def write_set(records: Sequence[Document], out: Path) -> None:
    """Write a set, one JSON object a line."""
    out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
