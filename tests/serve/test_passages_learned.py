"""New passages are cut by their own content, and the book of them keeps its budget."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Thread

import pytest
from blend.serve.passages.segments import LEAST_PASSAGE, MOST_PASSAGE, Segment, segments
from hypothesis import example, given, settings
from hypothesis import strategies as st
from passage_cases import KINDS, WHOLE_ONLY, Given, known, prose, tokenizer
from transformers import AutoTokenizer

from blend.errors import StoreError
from blend.prompt import PromptTemplate
from blend.serve.learned import LearnedCaches
from blend.types import ChunkKey
from blend.weights import resolve_model

CODE = "```python\nimport csv\n\nwith open(name) as file:\n    rows = list(csv.reader(file))\n\nprint(len(rows))\n```"
LIST = "\n".join(f"- the pump of kettle {n} boils water, and the valve of it holds" for n in range(8))
PASSAGES = [
    prose(1),
    f"# Of kettles\n\n{prose(2)}",
    f"Harbour pilots\n{prose(3)}",
    f"Before winter\n\nRain\n\n{prose(4)}\n\n{prose(5)}",
    f"{prose(6, 40)}\n\n{prose(7)}",
    f"{prose(8, 50)}\n{CODE}\n{prose(9, 20)}",
    f"{prose(10, 20)}\n{LIST}",
    f"## Long\n{prose(11, 1500)}",
    f"{prose(12)}\r\n\r\n{prose(13)}",
    f"Title\n=====\n{prose(14)}",
]


def learned(text: str, made: object, *chunks: Given) -> list[Segment]:
    """The passages to be learned of a message, of which nothing is lost."""
    found = segments(text, known(made, *chunks), learned_on=True)
    assert "".join(piece.text for piece in found) == text
    mine = [piece for piece in found if piece.kind == "learned"]
    for piece in mine:
        assert piece.whole[piece.first : piece.first + len(piece.ids)] == piece.ids
    return mine


def wholes(found: Sequence[Segment]) -> list[tuple[int, ...]]:
    return [piece.whole for piece in found]


@pytest.mark.parametrize("kind", [*KINDS, *WHOLE_ONLY])
def test_a_passage_is_kept_as_a_document_without_a_title(kind: str) -> None:
    made = tokenizer(kind)
    found = learned(f"Read.\n\n{prose(1, 60)}\n\n{prose(2, 300)}\n\nWhy?", made)
    assert found[0].text == prose(1, 60) + "\n\n"
    assert found[0].ids == found[0].whole == PromptTemplate(made).chunk_ids(Given("", "", prose(1, 60)))
    assert all(piece.chunk is None for piece in found)


@settings(max_examples=25, deadline=None)
@given(
    st.permutations(range(len(PASSAGES))), st.integers(4, len(PASSAGES)), st.sampled_from(["\n\n", "\n\n\n", "\n---\n"])
)
def test_a_passage_is_cut_alike_wherever_it_is_pasted(order: list[int], count: int, join: str) -> None:
    made = tokenizer("byte-level")
    message = "Read this.\n\n" + join.join(PASSAGES[n] for n in order[:count]) + f"{join}Why?"
    assert wholes(learned(message, made)) == [one for n in order[:count] for one in _alone(made, n)]


@cache
def _alone(made: object, number: int) -> list[tuple[int, ...]]:
    """The passages of one text, with something before it that makes the message long enough."""
    before = "\n\n".join("Why is it so?" for _ in range(200))
    return wholes(learned(f"{before}\n\n{PASSAGES[number]}\n\nWhy?", made))


@pytest.mark.parametrize("label", ["[{}] ", "{}. ", "Document {}:\n", "Source [{}]: ", "- ({}) ", "<doc id='{}'>\n"])
def test_numbers_in_front_belong_to_no_passage(label: str) -> None:
    made = tokenizer("byte-level")
    texts = [prose(n) for n in range(5)]
    there = "\n\n".join(label.format(n + 1) + text for n, text in enumerate(texts))
    back = "\n\n".join(label.format(n + 1) + text for n, text in enumerate(reversed(texts)))
    found = wholes(learned(there + "\n\nWhy?", made))
    assert found == [PromptTemplate(made).chunk_ids(Given("", "", text)) for text in texts]
    assert wholes(learned(back + "\n\nWhy?", made)) == found[::-1]


def test_what_stands_together_stays_together() -> None:
    made = tokenizer("byte-level")
    for passage in (PASSAGES[1], PASSAGES[2], PASSAGES[5], PASSAGES[6], PASSAGES[9]):
        message = "\n\n".join([prose(50), passage, prose(51)])
        assert [piece.text.strip() for piece in learned(message, made)] == [
            prose(50),
            passage,
            prose(51).rstrip("."),
        ] or [piece.text.strip().rstrip(".") for piece in learned(message, made)] == [
            part.rstrip(".") for part in (prose(50), passage, prose(51))
        ]


def test_lengths_keep_their_limits() -> None:
    made = tokenizer("byte-level")
    message = "\n\n".join([*PASSAGES, "x" * 9000, "é你🎉" * 3000, prose(77, 4000)])
    found = learned(message, made)
    assert len(found) > 40
    assert {len(piece.whole) >= LEAST_PASSAGE for piece in found} == {True}
    assert max(len(piece.whole) for piece in found) <= MOST_PASSAGE
    long = prose(77, 4000)
    pieces = [piece.text for piece in learned(long, made)]
    assert sum(map(len, pieces)) > 0.9 * len(long)
    assert all(long[long.index(piece) + len(piece)] == "." for piece in pieces)  # the ends of sentences


def test_talk_is_never_cut() -> None:
    made = tokenizer("byte-level")
    text = prose(1, 60)
    assert len(made.encode(text, add_special_tokens=False)) > LEAST_PASSAGE
    assert learned(text, made) == []
    assert learned("\n\n".join("So it is, I think." for _ in range(200)), made) == []
    assert segments("\n\n".join(PASSAGES), known(made), learned_on=False) == [Segment("\n\n".join(PASSAGES))]


def test_known_chunks_come_first() -> None:
    made = tokenizer("byte-level")
    chunk = Given("a", "", f"{prose(21)}\n\n{prose(22)}")
    found = segments("\n\n".join([prose(20), chunk.text, prose(23), "Why?"]), known(made, chunk), learned_on=True)
    assert [piece.kind for piece in found] == ["learned", "pasted", "learned", "text"]


MARKS = st.sampled_from(
    ["a", "é", "\n", "\n\n", "\r\n", " ", "```\n", "~~~", "# ", "## x\n", "1. ", "---\n", "<a>", "\0"]
)


@settings(max_examples=150, deadline=None)
@example([0, 0, 0, "[\x1f", 0, 0])  # blank for Python, not for the splitter
@given(st.lists(MARKS | st.integers(0, 8) | st.text(st.characters(codec="utf-8")), max_size=30))
def test_nothing_of_any_text_is_lost(parts: list[str | int]) -> None:
    made = tokenizer("byte-level")
    found = learned("".join(prose(part) if isinstance(part, int) else part for part in parts), made)
    assert all(made.decode(piece.ids, clean_up_tokenization_spaces=False) == piece.text for piece in found)


MEGABYTE = {
    "one word": "a" * 1_000_000,
    "blank lines": "a\n" + "\n" * 1_000_000,
    "blanks": "a" + " " * 1_000_000,
    "lines of blanks": (" " * 1000 + "\n") * 1000,
    "openings": "```a\n" * 200_000,
    "fences": "~~~\n```\n" * 120_000,
    "tags": "<a" * 500_000,
    "rulers": "-" * 500_000 + "\n" + "- " * 250_000,
    "headings": "## a\n" * 200_000,
    "short lines": "a b\n\n" * 200_000,
    "null": "\0" * 1_000_000,
    "windows": "abc def\r\n" * 110_000,
}


@pytest.mark.parametrize("case", MEGABYTE)
def test_a_megabyte_made_to_be_slow(case: str) -> None:
    text, texts = MEGABYTE[case], known(tokenizer("byte-level"))
    start = time.process_time()
    found = segments(text, texts, learned_on=True)
    assert time.process_time() - start < 8  # 2 at the most on a machine that does nothing else
    assert "".join(piece.text for piece in found) == text


def test_a_message_out_of_all_proportion_is_left_as_it_is() -> None:
    text, texts = prose(1) * 20_000, known(tokenizer("byte-level"), Given("a", "", prose(1)))
    assert len(text) > 10_000_000
    assert segments(text, texts, learned_on=True) == [Segment(text)]


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_the_catalogs_tokenizers(name: str) -> None:
    made = AutoTokenizer.from_pretrained(resolve_model(name))
    order = list(range(len(PASSAGES)))
    random.Random(3).shuffle(order)
    found = learned("\n\n".join(PASSAGES[n] for n in order) + "\n\nWhy?", made)
    assert wholes(found) == [one for n in order for one in _alone(made, n)]
    assert all(made.decode(piece.ids) == piece.text for piece in found)


def key(number: int) -> ChunkKey:
    return ChunkKey("a" * 32, f"{number:064x}")


def test_the_least_recently_seen_go_when_it_is_too_much(tmp_path: Path) -> None:
    book = LearnedCaches(tmp_path / "book.json", 100)
    assert book.use({key(1): 40, key(2): 40}) == []
    assert book.use({key(1): 40}) == []
    assert book.use({key(3): 30}) == [key(2)]
    assert (key(1) in book, key(2) in book, book.nbytes, len(book)) == (True, False, 70, 2)
    assert book.use({key(3): 90}) == [key(1)]  # it has become larger
    assert book.use({key(4): 101}) == [key(3), key(4)]
    assert book.nbytes == 0


def test_a_restart_knows_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "of a tenant" / "book.json"
    book = LearnedCaches(path, 100)
    book.use({key(1): 40, key(2): 40})
    book.use({key(1): 40})
    book.save()
    written = json.loads(path.read_text())
    assert written == {"version": 1, "caches": [[*key(2), 40], [*key(1), 40]], "decisions": 0}, "no text"
    again = LearnedCaches(path, 100)
    assert again.nbytes == 80
    assert again.use({key(3): 30}) == [key(2)]
    again.save()
    smaller = LearnedCaches(path, 20)
    assert len(smaller) == 2
    assert smaller.use({}) == [key(1), key(3)]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"version": 2, "caches": []}', b'{"version": 1, "caches": 5}',
        b'{"version": 1, "caches": [["aaaaaaaa", "bbbbbbbb", -5]]}', b'{"version": 1, "caches": [["../aaaaa", "bbbbbbbb", 5]]}',
        b'{"version": 1, "caches": [["aaaaaaaa", "bbbbbbbb", true]]}', b'{"version": 1, "caches": [[["a"], "bbbbbbbb", 5]]}',
        b'{"version": 1, "caches": [["aaaaaaaa", "bbbbbbbb", 5], null]}', b'{"version": 1, "caches": [["aaaaaaaa", "bbbb',
    ],
)  # fmt: skip
def test_a_damaged_book_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "book.json"
    path.write_bytes(content)
    book = LearnedCaches(path, 100)
    assert len(book) == 0
    book.use({key(1): 40})
    book.save()
    assert len(LearnedCaches(path, 100)) == 1


def test_a_book_that_cannot_be_written_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = LearnedCaches(tmp_path / "file" / "book.json", 100)
    book.use({key(1): 40})
    with pytest.raises(StoreError, match="learned passages"):
        book.save()
    assert book.use({key(2): 70}) == [key(1)]


def test_many_threads_keep_one_budget(tmp_path: Path) -> None:
    book, gone = LearnedCaches(tmp_path / "book.json", 1000), []

    def work(first: int) -> None:
        for number in range(first, first + 300):
            gone.extend(book.use({key(number): 10}))
            if number % 50 == 0:
                book.save()

    threads = [Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(book), book.nbytes, len(gone), len(set(gone))) == (100, 1000, 1100, 1100)
