"""The work of chunking grows with the length of the text, whatever its shape."""

import pytest
import semantic_text_splitter
from rendered import chunk_documents, chunked

from blend_retrieval import chunking, headings
from blend_retrieval.document import Document
from blend_retrieval.headings import markdown_headings
from blend_retrieval.loading import load_documents

SENTENCE = "The quick brown fox jumps over the lazy dog. "
SHAPES = {
    "one line": lambda n: SENTENCE * (n // len(SENTENCE)),
    "no spaces": lambda n: "abcdefghij" * (n // 10),
    "lines": lambda n: "short line\n" * (n // 11),
    "paragraphs": lambda n: f"{SENTENCE * 5}\n\n" * (n // (5 * len(SENTENCE))),
    "headings": lambda n: "".join(f"## Heading {i}\n\nText.\n\n" for i in range(n // 23)),
    "heading tree": lambda n: "".join(f"{'#' * (i % 6 + 1)} Heading {i}\n\n{SENTENCE}\n\n" for i in range(n // 65)),
    "table": lambda n: "| a | b |\n|---|---|\n" + "| cell one | cell two |\n" * (n // 24),
    "code": lambda n: "```py\n" + "x = foo(bar)\n" * (n // 13) + "```\n",
    "chinese": lambda n: "这是一个没有空格的很长的中文句子" * (n // 16),
    "chinese sentences": lambda n: "这是一个没有空格，很长的中文句子。" * (n // 17),
    "blanks": lambda n: "a" + " " * n + "b",
    "blank lines": lambda n: "a" + "\n" * n + "b",
    "one character": lambda n: "e" + "\u0301" * n,
    "brackets": lambda n: "[" * n,
    "ruled bars": lambda n: ("|-" * 4096 + "x\n") * (n // 8194),
}
SIZE, MAX_TOKENS = 40_000, 64


class Encode:
    """A tokenizer that counts the characters that it is given."""

    characters = 0

    def __call__(self, text):
        self.characters += len(text)
        return range(len(text.encode()) // 4 + 1)


@pytest.fixture
def given(monkeypatch):
    """Lengths of the texts that the splitter is given; for every piece that it cuts it may read all of one."""
    lengths, splitter = [], semantic_text_splitter.MarkdownSplitter

    class Counting:
        @staticmethod
        def from_callback(*args):
            counted = Counting()
            counted.real = splitter.from_callback(*args)
            return counted

        def chunk_indices(self, text):
            lengths.append(len(text))
            return self.real.chunk_indices(text)

    monkeypatch.setattr(semantic_text_splitter, "MarkdownSplitter", Counting)
    return lengths


def work(text, given):
    """Characters to encode, and the characters that the splitter may read, each at its worst."""
    encode = Encode()
    given.clear()
    chunked(text, MAX_TOKENS, encode)
    return encode.characters, sum(length**2 for length in given)


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_the_length(shape, given):
    (encoded, read), (encoded_twice, read_twice) = (work(SHAPES[shape](n), given) for n in (SIZE, 2 * SIZE))
    assert encoded_twice <= 2.5 * encoded + SIZE
    assert encoded_twice <= 60 * 2 * SIZE
    assert read_twice <= 2.5 * read
    assert max(given, default=0) <= 1 << 14


def test_a_title_as_long_as_a_book_is_not_encoded_for_every_chunk():
    encode, title = Encode(), "Once upon a time " * 5000
    chunks = chunked(SENTENCE * 500, MAX_TOKENS, encode, title=title)
    assert all(title.startswith(chunk.title) for chunk in chunks)
    assert encode.characters < 60 * (len(title) + 500 * len(SENTENCE))


@pytest.mark.parametrize("shape", ["one line", "chinese", "paragraphs", "code", "no spaces"])
def test_windows_lose_nothing_and_cut_as_before(shape, monkeypatch):
    text = SHAPES[shape](18_000)
    chunks = chunked(text, MAX_TOKENS, Encode())
    assert "".join("".join(chunk.text for chunk in chunks).split()) == "".join(text.split())
    monkeypatch.setattr(chunking, "LEAST_WINDOW", 1 << 20)
    assert chunked(text, MAX_TOKENS, Encode()) == chunks


BLOCKS = """# A

- one
  - two

    # in the list

```
# code

# code
```

Words
of two lines
---

> # quoted
> more
lazy

    # indented

    # indented

<div>
# html
</div>

## B ##
text\r\n\r
[a]: /x

~~~
# tilde

~~~
1. x

   y
2. z

Last
====

***
"""


@pytest.mark.parametrize("stretch", [1, 30])
def test_headings_do_not_depend_on_how_much_is_parsed_at_a_time(monkeypatch, stretch):
    text = BLOCKS * 3
    whole = list(markdown_headings(text))
    assert [heading.text for heading in whole[:4]] == ["A", "Words of two lines", "B", "Last"]
    monkeypatch.setattr(headings, "STRETCH", stretch)
    assert list(markdown_headings(text)) == whole


def test_the_first_heading_is_found_without_parsing_the_rest(monkeypatch):
    parsed, parse = [], headings.parse_markdown
    monkeypatch.setattr(headings, "parse_markdown", lambda text: parsed.append(len(text)) or parse(text))
    assert next(headings.markdown_headings("# First\n\n" + f"{SENTENCE}\n\n# More\n\n" * 20_000)).text == "First"
    assert sum(parsed) < 2 * headings.STRETCH


@pytest.mark.parametrize("sign", [">", "- ", "1. ", "[", "*a ", "#"])
def test_markdown_nested_tens_of_thousands_deep_is_chunked(tmp_path, sign):
    text = sign * 33_000
    (tmp_path / "a.md").write_text(f"# Title\n\n{text}\n")
    chunks = chunk_documents(load_documents(tmp_path).documents, encode=Encode())
    assert sum(len("".join(chunk.text.split())) for chunk in chunks) >= len("".join(text.split()))


@pytest.mark.parametrize("cell", ["|", "|-", "| a "])
def test_tables_are_looked_for_once_in_each_line(cell):
    """A pattern that goes back from bar to bar would take an hour for these two lines, and hold up all other threads."""
    document = Document("d", "T", f"{cell * 1_000_000}x\n" * 2, "d")
    chunking.PassageComposer(document, [], lambda title, text: 1, MAX_TOKENS)
