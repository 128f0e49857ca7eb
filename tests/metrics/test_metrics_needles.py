import json
import re
from dataclasses import asdict

import pytest

from blend.errors import ConfigError
from blend.eval.dataset import load_dataset
from blend.eval.metrics import exact_match
from blend.eval.needles import make_needles

KINDS = ("single", "multikey", "twohop", "split")
FILLER = [
    f"Paragraph {n} tells of rivers. It goes on for a while! Does it end? Yes, {word} it does."
    for n, word in enumerate(
        ["here", "there", "now", "then", "soon", "late", "far", "near", "up", "down", "left", "right"]
    )
]
CHUNKS = 8


@pytest.fixture(scope="module")
def records():
    return make_needles(FILLER, per_kind=12, chunks=CHUNKS, seed=0)


def of(records, kind):
    return [record for record in records if record.task == f"needle-{kind}"]


def sentences(text):
    return re.split(r"(?<=[.!?]) ", text)


REAL = {sentence for text in FILLER for sentence in sentences(text)}


def added(record):
    """By chunk, the sentences that no filler has."""
    return [" ".join(s for s in sentences(chunk.text) if s not in REAL) for chunk in record.chunks]


def test_kinds_take_turns_and_a_larger_number_only_adds(records):
    assert [record.task.removeprefix("needle-") for record in records] == list(KINDS) * 12
    assert len({record.id for record in records}) == len(records)
    assert make_needles(FILLER, per_kind=2, chunks=CHUNKS, seed=0) == records[:8]
    assert make_needles(FILLER, per_kind=2, chunks=CHUNKS, seed=1) != records[:8]


def test_every_chunk_is_one_paragraph_with_at_most_one_sentence_more(records):
    for record in records:
        rests = [" ".join(s for s in sentences(chunk.text) if s in REAL) for chunk in record.chunks]
        assert set(rests) <= set(FILLER)
        assert len(set(rests)) == CHUNKS
        for fact in filter(None, added(record)):
            assert re.fullmatch(r"[A-Z][^.!?]*\.", fact)


def test_the_answer_is_short_and_stands_in_one_gold_chunk_only(records):
    for record in records:
        (answer,) = record.answers
        assert re.fullmatch(r"[1-9]\d{4}", answer)
        holders = [index for index, chunk in enumerate(record.chunks) if answer in chunk.text]
        assert len(holders) == 1
        assert holders[0] in record.gold_chunks
        assert answer not in record.question


def test_single_has_one_fact(records):
    for record in of(records, "single"):
        assert [index for index, fact in enumerate(added(record)) if fact] == list(record.gold_chunks)
        assert len(record.gold_chunks) == 1


def test_multikey_has_distractors_of_the_same_form_in_other_chunks(records):
    for record in of(records, "multikey"):
        facts = {index: fact for index, fact in enumerate(added(record)) if fact}
        key = re.search(r"of the (.*) (archive|bell|ferry)\?", record.question).group(1)
        assert len(facts) == 5
        assert len({fact.split(" of the ")[0] for fact in facts.values()}) == 1
        assert [index for index, fact in facts.items() if f"the {key} " in fact] == list(record.gold_chunks)
        assert len(set(re.findall(r"\d{5}", " ".join(facts.values())))) == 5


def test_twohop_needs_both_chunks(records):
    for record in of(records, "twohop"):
        person = re.search(r"(?:where|is) ([A-Z]\w+ [A-Z]\w+)(?: works)?\?", record.question).group(1)
        facts = added(record)
        first, second = sorted(record.gold_chunks, key=lambda index: person not in facts[index])
        place = re.search(r"(?:the ship|at the) (.+?)(?: observatory)?\.$", facts[first]).group(1)
        assert place in facts[second]
        assert record.answers[0] in facts[second]
        assert person not in facts[second]
        assert place not in record.question
        assert sum(bool(fact) for fact in facts) == 6
        assert sum(place in fact for fact in facts) == 2


def test_split_lies_on_a_boundary_and_the_second_half_names_nobody(records):
    for record in of(records, "split"):
        first, second = record.gold_chunks
        person = re.search(r"of ([A-Z]\w+ [A-Z]\w+)\?", record.question).group(1)
        assert second == first + 1
        assert re.search(rf"{person}\.$", record.chunks[first].text)
        assert re.match(rf"The [^.]* (of )?this [^.]*{record.answers[0]}\.", record.chunks[second].text)
        assert person not in record.chunks[second].text
        # Another pair of the same form, so that "the only number in sight" is no answer.
        assert len(re.findall(r"\d{5}", " ".join(added(record)))) == 2


def test_names_and_numbers_in_the_filler_are_not_used():
    numbers = ", ".join(str(number) for number in range(10_000, 100_000) if number % 10 != 7)
    filler = [f"{FILLER[0]} Wanda Pryor of Aldmoor had the numbers {numbers}.", *FILLER[1:4]]
    for record in make_needles(filler, per_kind=4, chunks=4, seed=0):
        assert record.answers[0].endswith("7")
        assert "Wanda Pryor" not in record.question
        assert "Aldmoor" not in record.question
        assert sum(record.answers[0] in re.findall(r"\d+", chunk.text) for chunk in record.chunks) == 1


def test_filler_without_sentences_takes_the_fact_on_a_line_of_its_own():
    filler = [f"def f{n}(x)\n    return x" for n in range(4)]
    for record in make_needles(filler, per_kind=2, chunks=4, seed=0):
        text = record.chunks[record.gold_chunks[0]].text
        assert any(
            line.endswith(".") and line.startswith(("The ", "Pa", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
            for line in text.split("\n")
        )
        assert "return x" in text.split("\n")[-1] or "    return x" in text.split("\n")


def test_records_survive_the_question_file(records, tmp_path):
    path = tmp_path / "needles.jsonl"
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8")
    assert load_dataset(path) == records
    assert exact_match(f"{records[0].answers[0]}.", records[0].answers) == 1


@pytest.mark.parametrize(
    ("filler", "settings", "message"),
    [
        (FILLER, {"per_kind": 1, "chunks": 3}, "at least 4 chunks"),
        (FILLER, {"per_kind": 0, "chunks": 4}, "1 question"),
        (FILLER[:3] * 9, {"per_kind": 1, "chunks": 4}, "not 3"),
        (["", " ", "\n", "x"], {"per_kind": 1, "chunks": 4}, "not 1"),
    ],
)
def test_bad_arguments(filler, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_needles(filler, seed=0, **settings)
