import re

import pytest

from blend.eval.needles import make_needles

FILLER = [f"Paragraph {n} tells of rivers. It goes on, {n} times! Does it end? Yes, soon." for n in range(12)]
CHUNKS = 8


@pytest.fixture(scope="module")
def records():
    return make_needles(FILLER, 24, CHUNKS)


def sentences(text):
    return re.split(r"(?<=[.!?]) ", text)


def added(record):
    """By chunk, the sentences that no filler has."""
    filler = {sentence for text in FILLER for sentence in sentences(text)}
    chunks = [sentences(chunk.text) for chunk in record.chunks]
    assert all(" ".join(s for s in chunk if s in filler) in FILLER for chunk in chunks)
    return [" ".join(s for s in chunk if s not in filler) for chunk in chunks]


def test_kinds_take_turns_and_a_larger_number_only_adds(records):
    assert [record.task for record in records] == ["needle-single", "needle-split"] * 12
    assert len({record.id for record in records}) == len(records)
    assert make_needles(FILLER, 8, CHUNKS) == records[:8]


def test_the_answer_stands_in_one_chunk_only(records):
    for record in records:
        (answer,) = record.answers
        assert re.fullmatch(r"[1-9]\d{4}", answer)
        assert sum(answer in chunk.text for chunk in record.chunks) == 1
        assert answer not in record.question


def test_single_has_a_distractor_of_the_same_form_in_another_chunk(records):
    for record in records[::2]:
        facts = [fact for fact in added(record) if fact]
        key = re.search(r"of the (.*) (archive|ferry)\?", record.question).group(1)
        assert len(facts) == 2
        assert len({fact.split(" of the ")[0] for fact in facts}) == 1
        (asked,) = (fact for fact in facts if f"the {key} " in fact)
        assert record.answers[0] in asked


def test_split_lies_on_a_boundary_and_the_second_half_names_nobody(records):
    for record in records[1::2]:
        person = re.search(r"of ([A-Z]\w+ [A-Z]\w+)\?", record.question).group(1)
        (first,) = (index for index, chunk in enumerate(record.chunks) if re.search(rf"{person}\.$", chunk.text))
        second = record.chunks[first + 1].text
        assert re.match(rf"The [^.]* (of )?this [^.]*{record.answers[0]}\.", second)
        assert person not in second
        # Another pair of the same form, so that "the only number in sight" is no answer.
        assert len(re.findall(r"\d{5}", " ".join(added(record)))) == 2


def test_numbers_in_the_filler_are_not_used():
    numbers = ", ".join(str(number) for number in range(10_000, 100_000) if number % 10 != 7)
    filler = [f"{FILLER[0]} The numbers are {numbers}.", *FILLER[1:4]]
    assert all(record.answers[0].endswith("7") for record in make_needles(filler, 8, 4))
