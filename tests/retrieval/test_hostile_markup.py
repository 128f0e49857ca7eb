"""Markup that attacks its reader ends within bounds, with its text and one clear line where it is not read as markup."""

import itertools
import time

import pytest

from blend_retrieval.loading import load_bytes

_MARKS = "has a paragraph with too many marks that do not end"
_UNREAD = "cannot be read by docutils, and is taken as it stands"


def grid(columns):
    return "+--" * columns + "+\n" + "|ab" * columns + "|\n" + "+--" * columns + "+\n"


def tangled(columns):
    """A table all of whose signs are corners, without the last cell."""
    lines = "++" * columns + "+\n"
    return "+-" * columns + "+\n" + lines * columns + "| " + "+" * (2 * columns - 1) + "\n" + "+-" * columns + "+\n"


def doubled(start, definition, count):
    """Texts of which each names the one before twice."""
    return start + "".join(definition(number) for number in range(count))


RST = {
    "interpreted texts": (lambda: "`a <" * 8000, "`a <" * 8000, _MARKS),
    "literals": (lambda: "``a " * 8000, "``a " * 7999 + "``a", _MARKS),
    "emphasis": (lambda: "*a " * 8000, "*a " * 7999 + "*a", _MARKS),
    "substitutions without an end": (lambda: "+--+\n|a |\n" * 8000, "+--+\n|a |\n+--+", _MARKS),
    "a wide table": (lambda: grid(4000), "|ab|ab|ab", _UNREAD),
    "a tangled table": (lambda: tangled(200), "++++++++", _UNREAD),
    "substitutions that name each other": (
        lambda: (
            doubled(
                ".. |a0| replace:: ha\n", lambda number: f".. |a{number + 1}| replace:: |a{number}| |a{number}|\n", 30
            )
            + "\n|a30|\n"
        ),
        ".. |a30| replace::",
        "is read as plain text: its substitutions repeat themselves too often",
    ),
    "references to nothing": (lambda: "a_ " * 8000, "a_ a_", "a paragraph has too many references to nothing"),
    "mistakes": (lambda: ".. [1] a\n" * 6000, ".. [1] a", "docutils finds too many mistakes in it"),
}


@pytest.mark.parametrize("name", RST)
def test_hostile_restructuredtext_keeps_its_text_and_gives_a_note(name):
    make, words, reason = RST[name]
    start = time.process_time()
    documents, skipped = load_bytes("a.rst", b"start\n\n" + make().encode() + b"\n\nhello\n")
    assert time.process_time() - start < 4
    assert words in documents[0].text
    assert documents[0].text.startswith("start")
    assert documents[0].text.endswith("hello")
    assert any(reason in fault.reason for fault in skipped)


def test_a_long_table_and_many_links_are_read_as_they_are():
    table = "+--+--+\n|a |b |\n" * 800 + "+--+--+\n"
    links = "`a <b>`_ " * 800
    documents, skipped = load_bytes("a.rst", f"{table}\n{links}\n".encode())
    assert documents[0].text.count("| a | b |") == 800
    assert documents[0].text.count("a a") == 400
    assert not skipped


MARKUP = {
    "attributes that name each other": (
        "a.adoc",
        lambda: doubled(":a0: haha\n", lambda number: f":a{number + 1}: {{a{number}}}{{a{number}}}\n", 40) + "{a40}",
        "{a",
        "repeats its attributes too often",
    ),
    "open macros": ("a.adoc", lambda: "image:a[" * 8000, "image:a[" * 8000, "too many brackets that do not end"),
    "open footnotes": ("a.adoc", lambda: "footnote:[" * 8000, "footnote:[" * 8000, "too many brackets"),
    "open references": ("a.adoc", lambda: "<<a" * 8000, "<<a" * 8000, ""),
    "addresses": ("a.adoc", lambda: "link:" * 8000, "link:" * 8000, ""),
    "a cell over a million rows and columns": ("a.adoc", lambda: "|===\n999999999.999999999+|abc\n|===", "abc", ""),
    "a row of many cells": ("a.adoc", lambda: "|===\n" + "|a " * 9000 + "\n|===", "| a | a |", ""),
    "blocks of all names": (
        "a.org",
        lambda: "".join(f"#+begin_a{number}\n" for number in range(8000)),
        "#+begin_a7998\n#+begin_a7999",
        "",
    ),
    "macros of a long text": (
        "a.org",
        lambda: "#+macro: a " + "x" * 4000 + "\n" + "{{{a}}}" * 4000,
        "{{{a}}}{{{a}}}",
        "repeats its macros too often",
    ),
    "open blocks": ("a.org", lambda: "#+begin_src\n" * 8000, "#+begin_src\n#+begin_src", ""),
}


@pytest.mark.parametrize("name", MARKUP)
def test_hostile_markup_keeps_its_text(name):
    path, make, words, reason = MARKUP[name]
    start = time.process_time()
    documents, skipped = load_bytes(path, b"start\n\n" + make().encode() + b"\n\nhello\n")
    assert time.process_time() - start < 2
    assert words in documents[0].text
    assert documents[0].text.startswith("start")
    assert documents[0].text.rstrip().endswith("hello")
    assert len(documents[0].text) < 4_000_000
    assert not reason or any(reason in fault.reason for fault in skipped)


def laughing():
    """Macros of which each names the one before ten times."""
    names = "abcdefghij"
    macros = [f"\\def\\{name}{{{f'{chr(92)}{before}' * 10}}}" for before, name in itertools.pairwise(names)]
    return "\\def\\a{xxxxxxxxxx}" + "".join(macros) + "\\j"


OPEN = "too many of its arguments, environments or formulas do not end"
TEX = {
    "macros that name each other": (laughing, "\\", ""),
    "a macro that names itself": (lambda: "\\newcommand{\\a}[1]{\\a{#1#1}}\\a{xyz}", "xyz", ""),
    "a macro of a long text": (lambda: "\\newcommand{\\a}{" + "x" * 8000 + "}" + "\\a " * 8000, "\\a \\a", ""),
    "a macro of many arguments": (
        lambda: "\\newcommand{\\a}[1]{" + "#1" * 8000 + "}\\a{" + "x" * 8000 + "}",
        "\\a{xxx",
        "",
    ),
    "open arguments": (lambda: "\\textbf{" * 8000, "\\textbf{" * 8000, OPEN),
    "open options": (lambda: "\\a[" * 8000, "\\a[" * 8000, OPEN),
    "open lists": (lambda: "\\begin{itemize}\n\\item a\n" * 8000, "\\begin{itemize}\n\\item a\n" * 7999, OPEN),
    "open code": (lambda: "\\begin{verbatim}" * 8000, "\\begin{verbatim}" * 8000, OPEN),
    "open formulas": (lambda: "\\(" * 20_000, "\\(" * 20_000, OPEN),
    "a cell over all columns": (
        lambda: "\\begin{tabular}{ll}\n\\multicolumn{999999999}{l}{abc} & b\\\\ \\end{tabular}",
        "abc",
        "",
    ),
}


@pytest.mark.parametrize("name", TEX)
def test_hostile_latex_keeps_its_text(name):
    make, words, reason = TEX[name]
    start = time.process_time()
    documents, skipped = load_bytes("a.tex", b"start\n\n" + make().encode() + b"\n\nhello\n")
    assert time.process_time() - start < 2
    assert words in documents[0].text
    assert documents[0].text.startswith("start")
    assert documents[0].text.rstrip().endswith("hello")
    assert len(documents[0].text) < 10_000_000
    assert not reason or any(reason in fault.reason for fault in skipped)
