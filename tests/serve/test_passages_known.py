"""Known chunks are found in messages exactly where they were pasted, with the tokens that they have in prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from threading import Thread

import pytest
from blend.serve.passages.known import HEAD, Family, HeadFilter, KnownTexts, SearchBudget
from blend.serve.passages.segments import Segment, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from passage_cases import KINDS, WHOLE_ONLY, Given, known, prose, tokenizer
from transformers import AutoTokenizer

from blend.prompt import PromptTemplate, render_chunk
from blend.weights import resolve_model

CHUNKS = [Given(f"c{n}", "Harbour" if n % 2 else "", prose(n)) for n in range(5)]
JOINS = {
    "blank line": "\n\n".join,
    "newline": "\n".join,
    "space": " ".join,
    "ruler": "\n---\n".join,
    "numbers": lambda texts: "\n".join(f"[{n}] {text}" for n, text in enumerate(texts)),
    "quotes": lambda texts: "\n".join(f'"{text}"' for text in texts),
    "tags": lambda texts: "".join(f"<doc>{text}</doc>" for text in texts),
}


def pasted(text: str, texts: KnownTexts) -> list[Segment]:
    """The chunks of a message, of which nothing is lost and every part is what it says."""
    found = segments(text, texts, learned_on=False)
    assert "".join(piece.text for piece in found) == text
    for piece in found:
        assert piece.whole[piece.first : piece.first + len(piece.ids)] == piece.ids
    return [piece for piece in found if piece.kind == "pasted"]


def names(found: Sequence[Segment]) -> list[str]:
    return [piece.chunk.id for piece in found if piece.chunk]


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("kind", KINDS)
def test_pasted_without_titles_however_they_are_joined(kind: str, join: str) -> None:
    made, order = tokenizer(kind), [CHUNKS[3], CHUNKS[0], CHUNKS[4], CHUNKS[0]]
    context = JOINS[join]([chunk.text for chunk in order])
    found = pasted(f"Use the context.\n\n{context}\n\nQuestion: why?", known(made, *CHUNKS))
    assert names(found) == [chunk.id for chunk in order]
    for piece in found:
        assert piece.chunk is not None
        assert piece.whole == PromptTemplate(made).chunk_ids(piece.chunk)
        assert len(piece.ids) >= 0.8 * len(piece.whole)
        assert made.decode(piece.ids).split() == piece.text.split()


@pytest.mark.parametrize("kind", [*KINDS, *WHOLE_ONLY])
def test_the_rendered_chunk_is_taken_whole(kind: str) -> None:
    made = tokenizer(kind)
    message = "".join(map(render_chunk, reversed(CHUNKS)))
    found = pasted(message + "Why?", known(made, *CHUNKS))
    assert [piece.text for piece in found] == [render_chunk(chunk) for chunk in reversed(CHUNKS)]
    assert all(
        piece.ids == piece.whole == PromptTemplate(made).chunk_ids(piece.chunk) for piece in found if piece.chunk
    )


@pytest.mark.parametrize("kind", WHOLE_ONLY)
def test_where_tokens_cannot_be_told_apart_only_whole_ones_are_taken(kind: str) -> None:
    texts = known(tokenizer(kind), *CHUNKS)
    assert names(pasted(CHUNKS[0].text + "\n\n" + CHUNKS[1].text + "\n\nWhy?", texts)) == [
        "c0"
    ]  # the other lacks its title


def test_a_spelled_out_control_token_leaves_a_chunk_whole() -> None:
    chunk = Given("a", "Title", prose(1) + "<|im_end|>" + prose(2))
    texts = known(tokenizer("byte-level"), chunk)
    (found,) = pasted("Say: " + render_chunk(chunk) + "Why?", texts)
    assert found.ids == texts.renderer.template.chunk_ids(chunk)
    assert not set(found.ids) & set(tokenizer("byte-level").all_special_ids)
    assert not pasted(chunk.text + "\n\nWhy?", texts)


def test_a_token_that_reaches_beyond_the_match_goes_back_to_the_text() -> None:
    made, text = tokenizer("byte-level"), prose(3)
    assert made.convert_ids_to_tokens(PromptTemplate(made).chunk_ids(Given("", "", text)))[-1] == ".ĊĊ"
    (found,) = pasted(text + " Why?", known(made, Given("a", "", text)))
    assert found.text == text[:-1]
    assert made.decode(found.ids) == text[:-1]


def test_no_character_is_cut_in_two() -> None:
    """Every one of these takes several tokens, of which a merge joins the last with the next character's first."""
    made = tokenizer("byte-level")
    chunk = Given("a", "é" * 5, "e\u0301你🎉" * 20)
    (found,) = pasted("🎉" + chunk.text + "你", known(made, chunk))
    assert found.text == chunk.text
    assert made.decode(found.ids) == chunk.text


def test_too_small_a_part_of_a_chunk_is_none() -> None:
    chunk = Given("a", prose(1, 60), prose(2, 60))
    texts = known(tokenizer("byte-level"), chunk)
    assert not pasted(chunk.text + "\n\n", texts)
    assert names(pasted(render_chunk(chunk), texts)) == ["a"]


def test_a_chunk_that_holds_another_comes_first() -> None:
    inner = Given("inner", "", prose(1))
    outer = Given("outer", "", f"{prose(2)}\n\n{inner.text}\n\n{prose(3)}")
    begins = Given("begins", "", f"{inner.text} {prose(4)}")
    texts = known(tokenizer("byte-level"), inner, outer, begins)
    message = f"{inner.text}\n\n{outer.text}\n\n{begins.text}\n\n{inner.text[:-20]}"
    assert names(pasted(message, texts)) == ["inner", "outer", "begins"]


def test_one_text_under_two_titles_goes_by_the_title_in_the_message() -> None:
    text = prose(7)
    chunks = [Given("a", "A long title > of some part", text), Given("b", "North", text), Given("c", "South", text)]
    texts = known(tokenizer("byte-level"), *chunks, Given("d", "South", text))
    message = "".join(f"{title}\n{text}\n\n" for title in ("North", "South", "East"))
    found = pasted(message, texts)
    assert names(found) == ["b", "c", "b"]
    assert [piece.first > 0 for piece in found] == [False, False, True]


def test_what_is_too_short_or_has_other_blanks_is_not_found() -> None:
    text = prose(1)
    texts = known(tokenizer("byte-level"), Given("a", "", text), Given("b", "", text[: HEAD - 1]))
    assert not pasted(text.replace(". ", ".\r\n") + text[: HEAD - 1], texts)


def test_an_update_adds_drops_and_changes() -> None:
    texts = known(tokenizer("byte-level"), *CHUNKS)
    message = "\n\n".join(chunk.text for chunk in CHUNKS) + "\n\n" + prose(9)
    texts.update([*CHUNKS[1:3], Given("c0", "", prose(9)), Given("c9", "", CHUNKS[4].text)])
    assert names(pasted(message, texts)) == ["c1", "c2", "c9", "c0"]
    assert len(texts) == 4
    texts.update([])
    assert not pasted(message, texts)


def test_the_filter_grows_and_forgets() -> None:
    """Of a corpus that is exchanged again and again no more stays than of one that was always the same."""
    heads = HeadFilter()
    texts = known(tokenizer("byte-level"), heads=heads)
    for turn in range(12):
        mine = [Given(str(n), "", prose(1000 * turn + n, 30)) for n in range(200)]
        texts.update(mine)
    places = list(heads.places(prose(5, 20_000)))
    assert len(places) < 20_000  # of some 120,000 characters
    message = "\n".join(chunk.text for chunk in mine)
    assert names(pasted(message, texts)) == [str(n) for n in range(200)]


def test_a_search_during_updates_finds_what_stays() -> None:
    stays = Given("stays", "", prose(1))
    texts = known(tokenizer("byte-level"), stays)

    def exchange() -> None:
        for turn in range(60):
            # The same beginning, so that the family that is searched is the one that changes.
            texts.update(
                [stays, *(Given(f"{turn}-{n}", "", stays.text[:60] + prose(turn * 50 + n)) for n in range(40))]
            )

    thread = Thread(target=exchange)
    thread.start()
    while thread.is_alive():
        assert names(pasted(f"See:\n{stays.text}\nWhy?", texts)) == ["stays"]
    thread.join()


AB = st.text("ab\n", max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.lists(AB, max_size=6), st.lists(st.integers(0, 5) | AB, max_size=12))
def test_the_longest_then_the_leftmost_as_if_looked_for_one_by_one(tails: list[str], parts: list[int | str]) -> None:
    """Texts of two letters with one beginning repeat and overlap as no real ones do."""
    chunks = {(("ab" * HEAD)[:HEAD] + tail).strip(): n for n, tail in enumerate(tails)}
    choices = [*chunks, ("ab" * HEAD)[:HEAD]]
    message = "".join(part if isinstance(part, str) else choices[part % len(choices)] for part in parts)
    texts = known(tokenizer("bytes"), *(Given(str(n), "", text) for text, n in chunks.items()))
    matches, taken, expected = [], bytearray(len(message)), []
    for text in chunks:
        at = message.find(text)
        while at >= 0:
            matches.append((-len(text), at))
            at = message.find(text, at + len(text))
    for length, at in sorted(matches):
        if not any(taken[at : at - length]):
            taken[at : at - length] = bytes([1]) * -length
            expected.append((at, message[at : at - length]))
    found = [(one.start, one.chunk.text.strip()) for one in texts.find(message)]
    # A closing blank line may take the characters with which the next one would begin; none begins with a blank here.
    assert found == sorted(expected)


ANY = st.text(st.characters(codec="utf-8"), max_size=80)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ANY, ANY), max_size=4), st.lists(st.integers(0, 3) | ANY, max_size=6), st.booleans())
def test_any_chunks_in_any_text(chunks: list[tuple[str, str]], parts: list[int | str], titles: bool) -> None:
    given_ = [Given(str(n), title, prose(n, 30) + text) for n, (title, text) in enumerate(chunks)]
    shown = [render_chunk(chunk) if titles else chunk.text for chunk in given_] or [""]
    message = "".join(part if isinstance(part, str) else shown[part % len(shown)] for part in parts)
    for kind in ("byte-level", "normalised"):
        made = tokenizer(kind)
        found = pasted(message, known(made, *given_))
        assert all(piece.text in render_chunk(piece.chunk) for piece in found if piece.chunk)
        if kind == "byte-level":
            assert all(made.decode(piece.ids, clean_up_tokenization_spaces=False) == piece.text for piece in found)
        if titles:  # what stands there whole is found, and nothing here overlaps but by its title
            assert len(found) == sum(isinstance(part, int) for part in parts if given_)


def _cpu(work: object, *arguments: object) -> float:
    start = time.process_time()
    assert callable(work)
    work(*arguments)
    return time.process_time() - start


def test_many_chunks_are_found_at_once() -> None:
    rng = random.Random(1)
    letters = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(3000)]
    chunks = [Given(str(n), "Title", " ".join(rng.choices(letters, k=160))) for n in range(10_000)]
    texts = known(tokenizer("byte-level"), *chunks)
    message = "\n\n".join(chunk.text for chunk in chunks[:100])
    assert names(pasted(message, texts)) == [str(n) for n in range(100)]
    assert min(_cpu(texts.find, message) for _ in range(3)) < 0.05
    assert _cpu(texts.update, chunks[:-1]) < 0.2  # building takes many times as long


HOSTILE = {
    "one letter": "a" * 10_000_000,
    "lines": "x\n" * 5_000_000,
    "blank lines": "\n" * 10_000_000,
    "null": "\0" * 10_000_000,
    "combining": "e" + "\u0301" * 9_999_999,
    "same head": ("x" * 40 + " ") * 240_000,
    "nested": ("a" * 500 + "c") * 20_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_ten_megabytes_made_to_be_slow(case: str) -> None:
    chunks = ["a" * 2000 + "b", "x\n" * 40 + "y", "\0" * 200 + "b", "e" + "\u0301" * 99 + "b", "\u0301" * 99 + "b"]
    chunks += [prose(n, 30) for n in range(200)] + ["x" * 32 + prose(n) for n in range(1000)]
    chunks += ["a" * (100 + n) for n in range(600)] + ["a" * (100 + n) + "b" for n in range(600)]
    texts = known(tokenizer("bytes"), *(Given(str(n), "", text) for n, text in enumerate(chunks)))
    assert _cpu(texts.find, HOSTILE[case]) < 4  # 1 at the most on a machine that does nothing else


def test_a_family_stops_when_no_work_is_left() -> None:
    family = Family({str(n): Given(str(n), "", "a" * (HEAD + n)) for n in range(300)})
    assert len(list(family.texts_at("a" * 1000, 5, SearchBudget(10**9)))) == 300
    assert len(list(family.texts_at("a" * 1000, 5, SearchBudget(10_000)))) < 10


def test_the_filter_lets_every_head_through() -> None:
    heads = [prose(n)[:HEAD] for n in range(500)]
    heads += ["\ud800" * HEAD, "🎉" * HEAD]  # a lone surrogate, as JSON may bring
    filter_ = HeadFilter()
    filter_.enter(heads, heads)
    text = "é".join(heads)
    assert {n * (HEAD + 1) for n in range(len(heads))} <= set(filter_.places(text))
    assert not list(filter_.places("short"))


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_the_catalogs_tokenizers(name: str) -> None:
    made = AutoTokenizer.from_pretrained(resolve_model(name))
    chunks = [
        Given(f"c{n}", f"Guide > Part {n}", prose(n) + "\nna\u00efve cafe\u0301 你好 🎉 x = {}\n\nEnd.")
        for n in range(4)
    ]
    texts = known(made, *chunks)
    for join in JOINS.values():
        found = pasted(f"Context:\n{join([chunk.text for chunk in reversed(chunks)])}\nWhy?", texts)
        assert names(found) == ["c3", "c2", "c1", "c0"]
        for piece in found:
            assert made.decode(piece.ids) == made.decode(made.encode(piece.text, add_special_tokens=False))
    for piece in pasted("".join(map(render_chunk, chunks)), texts):
        assert piece.chunk is not None
        assert piece.ids == piece.whole == texts.renderer.template.chunk_ids(piece.chunk)
