import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rendered import chunk_documents, chunked, render, words_and_signs

from blend_retrieval.document import Document
from blend_retrieval.errors import ChunkingError
from blend_retrieval.headings import markdown_headings
from tests.tiny_model import byte_level

PARAGRAPH = " ".join(f"Sentence number {n} says something about tables." for n in range(8))


def squeeze(text):
    """The text without blanks, and without the control characters that no title has."""
    return re.sub("[\\s\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+", "", text)


def assert_nothing_lost(text, chunks):
    """Chunks follow one another in the text; between two stand only headings that are in the next chunk's title."""
    text, cursor = "".join(text.split()), 0
    for chunk in chunks:
        body = "".join(chunk.text.split())
        start = text.find(body, cursor)
        assert start >= 0
        gap = squeeze(re.sub("[#=-]", "", text[cursor:start]))
        assert squeeze(chunk.title.replace(">", "")).endswith(gap)
        cursor = start + len(body)
    assert text[cursor:] == ""


heading_line = st.builds(
    lambda level, words: f"{'#' * level} {words}", st.integers(1, 4), st.text("ABCDE ", max_size=30).filter(str.strip)
)
setext = st.builds(lambda words, mark: f"{words}\n{mark * 4}", st.text("FGHIJ", min_size=1), st.sampled_from("=-"))
prose = st.text("abc def. gh,ij\n äß🙂", max_size=400)
code = st.builds(lambda body: f"```\n# {body}\n```", st.text("abc \n", max_size=80))
block = st.one_of(heading_line, setext, prose, code, st.text(max_size=60).filter(lambda t: not re.search("[A-Z#]", t)))
markdown = st.lists(block, max_size=12).map("\n\n".join)


@settings(max_examples=150, deadline=None)
@given(markdown, st.integers(16, 90))
@example("## C\n\n\x1b\n\n# A\n\n# A", 18)  # a section of a control character alone
def test_no_chunk_is_too_long_and_no_text_is_lost(text, max_tokens):
    chunks = chunked(text, max_tokens, title="Zz")
    for chunk in chunks:
        assert chunk.text.strip()
        assert chunk.tokens == len(words_and_signs(render(chunk.title, chunk.text))) <= max_tokens
    assert_nothing_lost(text, chunks)
    assert len({chunk.id for chunk in chunks}) == len(chunks)
    assert chunks == chunked(text, max_tokens, title="Zz")


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=300), st.text(max_size=200))
def test_any_title_and_any_text_keep_the_limit(text, title):
    for chunk in chunked(text, 20, title=title):
        assert len(words_and_signs(render(chunk.title, chunk.text))) <= 20


def test_a_trained_byte_pair_tokenizer():
    bpe = byte_level([PARAGRAPH], 400)
    text = "\n\n".join(f"# Part {n}\n\n{PARAGRAPH * (1 + n % 3)}" for n in range(9)) + "\n\n" + "日本語の文。" * 90
    chunks = chunked(text, 64, lambda t: bpe.encode(t).ids)
    assert max(len(bpe.encode(render(c.title, c.text)).ids) for c in chunks) <= 64
    assert_nothing_lost(text, chunks)


def test_titles_are_the_path_of_headings():
    text = f"# Guide\n\nIntro.\n\n## Reading\n\n{PARAGRAPH}\n\n### Options\n\n{PARAGRAPH}\n\n## Writing\n\n{PARAGRAPH}"
    chunks = chunked(text, 140)
    assert chunks[0].title == "Guide"
    assert {"Guide > Reading", "Guide > Reading > Options", "Guide > Writing"} <= {c.title for c in chunks}
    options = next(c for c in chunks if c.title.endswith("Options"))
    assert not options.text.startswith("#")


def test_short_sections_are_put_together_up_to_the_limit():
    chunks = chunked("\n\n".join(f"## Name {n}\n\nThis one does thing {n}." for n in range(30)), 120)
    assert all(chunk.tokens > 80 for chunk in chunks[:-1])
    assert {chunk.title for chunk in chunks} == {"Guide"}


TWO_SECTIONS = f"# A\n\n{PARAGRAPH}\n\n## A1\n\n{PARAGRAPH}\n\n# B\n\n"


def test_a_section_does_not_run_into_the_next_chapter():
    chunks = chunked(TWO_SECTIONS + "Some words on B that are long enough to stand on their own.", 200)
    assert chunks[-1].title == "Guide > B"


def test_a_tiny_tail_joins_its_neighbour():
    chunks = chunked(TWO_SECTIONS + "End.", 200)
    assert len(chunks) == 2
    assert chunks[1].text.endswith("# B\n\nEnd.")


def test_long_sections_are_cut_between_sentences():
    chunks = chunked(PARAGRAPH, 60)
    assert len(chunks) > 2
    assert all(chunk.text.endswith(".") for chunk in chunks)


def test_a_paragraph_over_a_ruler_is_no_heading():
    assert list(markdown_headings("word " * 60 + "\n---\n")) == []
    assert [h.level for h in markdown_headings("Title\r\n=====\r\n\r\nSub\r---\r")] == [1, 2]


def test_ids_stay_when_other_documents_and_passages_change():
    def ids(text, name="g.md"):
        documents = [Document("a.md", "New", "New.", "a.md"), Document(name, "Guide", text, name)]
        return {c.id for c in chunk_documents(documents, 128) if c.document_id == name}

    text = "\n\n".join(f"# Part {n}\n\n{PARAGRAPH}" for n in range(4))
    before = {c.id for c in chunked(text, 128)}
    kept = before & ids(text.replace("# Part 3", "# Last"))
    assert 0.5 * len(before) < len(kept) < len(before)
    assert not before & ids(text, "moved.md")


def test_equal_passages_have_ids_of_their_own():
    chunks = chunked("\n\n".join(["# Same\n\n" + PARAGRAPH] * 3), 140)
    assert len({c.id for c in chunks}) == len(chunks) >= 3


def test_impossible_limits_are_refused():
    with pytest.raises(ChunkingError, match="allow at least 16"):
        chunked("text", 4)
    with pytest.raises(ChunkingError, match="allow more"):
        chunked("x", 16, lambda text: [0] * 50 * len(text))


def test_no_documents_and_blank_documents_make_no_chunks():
    assert chunk_documents([]) == ()
    assert chunked(" \n\n \t") == ()


@pytest.mark.parametrize("edge", ["|", ""])
def test_every_passage_of_a_table_has_its_header(edge):
    header = f"{edge}Pier | Length m{edge}\n{edge}--- | ---{edge}\n"
    rows = [f"{edge}Pier {n} | {100 + n}{edge}" for n in range(80)]
    text = f"# Piers\n\nAll piers.\n\n{header}" + "\n".join(rows) + "\n\nAfter the table.\n"
    chunks = chunked(text, 100, str.split)
    assert len(chunks) > 3
    assert all(header in chunk.text and chunk.tokens <= 100 for chunk in chunks)
    assert [line for chunk in chunks for line in chunk.text.splitlines() if line in rows] == rows
    assert chunks[-1].text.endswith("After the table.")


def test_a_header_that_leaves_no_room_is_not_repeated():
    wide = " | ".join(f"column {n}" for n in range(60))
    chunks = chunked(f"| {wide} |\n|{' --- |' * 60}\n" + f"| {wide} |\n" * 4, 100, str.split)
    assert all(chunk.tokens <= 100 for chunk in chunks)
