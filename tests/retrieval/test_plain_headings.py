"""Headings of plain text where they are unmistakable; comments, tables, lists, logs and mails have none."""

import json

import pytest
from pdfs import minimal_pdf
from rendered import chunk_documents

from blend_retrieval.headings import headings_in
from blend_retrieval.loading import load_bytes

SHELL = """The server is set up with this script; run it as root, and only once on every machine.

#!/bin/sh
# Install what the server needs

set -e
apt-get install -y nginx

# Write the configuration

cat > /etc/nginx/nginx.conf <<EOF
worker_processes 4;
EOF
"""
TABLES = """Results of the three runs on the same machine:

Name | Seconds
--------------
old  | 12

Model  Score
============
a      0.1
"""
PYTHON = '''"""Fees of the harbour.

Fees
====

"""

# Fees
# ----

def fee(days):
    """A fee.

    Returns
    -------

    """
'''
C = """/*
 * Fees
 * ====
 */

#include "fees.h"

/* ------ */

int fee(int days)
"""
YAML = """piers:
------

# 1 North

north: {fee: 31}

---

south: 12
"""
MAKEFILE = """all: fees

.PHONY: all
-----------

fees:
\tcc fees.c

"""
LOG = """2024-05-12 06:00:01 INFO open
-----------------------------
2024-05-12 06:00:02 INFO ship 1

1 ship in 0.2 s

2 ships in 0.3 s

3 ships in 0.4 s

===== 3 passed =====

"""
MAIL = """> 1. Fees

> Fees
> ====

Sincerely yours,
Kim Berg
--------

--
Harbour office
"""
PSQL = """ name | fee
------+-----
 Orm  |  31
(1 row)

 count
-------
    42
(1 row)

"""
SQLITE = """name
----
Orm
Brack

harbour     fee
----------  ---
Orm         31
"""
RST_TABLE = """=======  ===
Harbour  Fee
=======  ===
Orm      31
=======  ===

=======
Harbour
=======
Orm
=======

"""
LIST = """This is how a ship is moored:

1. Throw the rope

2. Tie the knot

3. Pay the fee

4. Sign the book
"""
SENTENCES = """1. Ships that come late pay the double fee.

They may pay later.

2. Captains sign the book.

They need a pen.

3. Boats pay less.

Much less.
"""
GAPS = """1. Fees

Thirty crowns.

3. Boats

Less.

4. Books

All sign.
"""
INSIDE = """The rules are
1. Fees
and

2. Boats
which pay less, and

3. Books

that all sign.
"""
FENCED = """How to write a heading:

```

Fees
====

```
"""
NO_HEADINGS = {
    "shell": SHELL,
    "tables": TABLES,
    "C": C,
    "YAML": YAML,
    "Makefile": MAKEFILE,
    "CSV": "name,fee\n--------\n\nOrm,31\n",
    "log": LOG,
    "mail": MAIL,
    "psql": PSQL,
    "sqlite": SQLITE,
    "Markdown table": "| a | b |\n| --- | --- |\n\na|b\n---\n\n",
    "table of reStructuredText": RST_TABLE,
    "list": LIST,
    "sentences": SENTENCES,
    "numbers that do not rise": GAPS,
    "numbers inside paragraphs": INSIDE,
    "two numbers": "1. Fees\n\nThirty crowns.\n\n2. Boats\n\nLess.\n",
    "small letters": "1 ship\n\nOrm\n\n2 ships\n\nBrack\n\n3 ships\n\nLund\n",
    "fences": FENCED,
    "ruler of another length": "Fees\n========\n\nThirty crowns.\n\nBoats\n---\n\nLess.\n",
    "last line of a paragraph": "All ships pay\nthirty crowns\n-------------\n\nLess.\n",
    "numbers": "12.5\n----\n\n31 + 12\n=======\n\n",
    "a sentence": "All ships pay.\n==============\n\n",
}


def headings(text, name="a.txt"):
    (document,), _ = load_bytes(name, text.encode())
    return [(heading.level, heading.text) for heading in headings_in(document.text, document.markup)]


def titles(name, data):
    return {chunk.title for chunk in chunk_documents(load_bytes(name, data).documents, 40)}


@pytest.mark.parametrize("text", NO_HEADINGS.values(), ids=NO_HEADINGS)
def test_what_only_resembles_a_heading_gives_no_title(text):
    assert headings(text) == []
    assert titles("a.txt", text.encode()) == {"a"}
    assert titles("a.jsonl", json.dumps({"title": "Title", "text": text}).encode()) == {"Title"}


@pytest.mark.parametrize("name", ["a.py", "a.c", "a.yaml", "a.sh", "a.log"])
def test_source_code_and_logs_have_no_headings(name):
    assert headings(PYTHON, name) == []
    assert headings(PYTHON, "a.txt") == [(1, "Fees")]


def test_comments_in_a_pdf_give_no_titles():
    assert titles("a.pdf", minimal_pdf("# Some comment", "x = 1", title="Paper")) == {"Paper"}


UNDERLINED = """Rules of the harbour
====================

All ships pay.

Fees
----

Thirty crowns.

料金
====

三十クローネ。

======
Boats
======

=====
Books
=====

All sign."""


def test_underlined_lines_are_headings():
    expected = [(1, "Rules of the harbour"), (2, "Fees"), (1, "料金"), (1, "Books")]
    assert headings(UNDERLINED) == expected
    assert headings(UNDERLINED.replace("\n", "\r\n")) == expected
    assert headings("Fees\n====") == [(1, "Fees")]


NUMBERED = """Rules of the harbour

1.  Fees

   All ships pay thirty crowns, and this is what the
   clerks write into the book.

1.1.  Late ships

   They pay the double fee.

1.2 Boats

1.2.1 Boats shorter than 12 m

They pay less.

2. Books

All sign:

7. in ink

3 Penalties

None so far."""


def test_lines_after_rising_numbers_are_headings():
    assert headings(NUMBERED) == [
        (1, "1. Fees"),
        (2, "1.1. Late ships"),
        (2, "1.2 Boats"),
        (3, "1.2.1 Boats shorter than 12 m"),
        (1, "2. Books"),
        (1, "3 Penalties"),
    ]


def test_a_chunk_has_the_headings_of_plain_text_in_its_title():
    numbered = NUMBERED.replace("double fee.", "double fee, and sign the book of the harbour for each day. " * 3)
    (document,), _ = load_bytes("a.txt", numbered.encode())
    assert "a > 1. Fees > 1.1. Late ships" in {chunk.title for chunk in chunk_documents([document], 90)}
    (document,), _ = load_bytes("a.txt", UNDERLINED.encode())
    *_, boats, books = chunk_documents([document], 40)
    assert (books.title, books.text) == ("a > Books", "All sign.")
    assert boats.text.endswith("\nBoats\n======")


def test_hostile_text_is_read_in_little_time():
    for piece in ("1.1.1.1.", "=" * 50 + "\n", "1 A\n\n", "```\n", "-" * 49 + " "):
        assert isinstance(headings(piece * (200_000 // len(piece))), list)
