"""Plain text is full of comments, ruled tables and logs; only what is well marked is a heading and gets into titles."""

import json

import pytest
from rendered import chunk_documents

from blend_retrieval.document import Document
from blend_retrieval.headings import find_headings
from blend_retrieval.loading import load_documents

TUTORIAL = """NumPy 入门教程

NumPy 是 Python 科学计算的基础库，它提供了多维数组对象。下面先介绍如何创建数组。

import numpy as np
# 创建一个 2x4 的全零数组
a = np.zeros((2, 4))
print(a)

array([[ 0., 0., 0., 0.],
       [ 0., 0., 0., 0.]])
--------------------------

# 使用示例

x = np.arange(12).reshape(3, 4)

# 打印结果

>>> x
array([[ 0,  1,  2,  3],
       [ 4,  5,  6,  7]])
[ 0., 0., 0., 0.]])
===================

def normalize(v):
    # 计算范数

    # 返回结果
    return v / np.linalg.norm(v)

# 小结

以上就是数组的基本用法，更多内容请参考官方文档。
"""
SHELL = """The server is set up with this script; run it as root, and only once on every machine.

#!/bin/sh
# Install what the server needs

set -e
apt-get install -y nginx

# Write the configuration

cat > /etc/nginx/nginx.conf <<EOF
worker_processes 4;
EOF

# Start it

systemctl start nginx
"""
YAML = """# Settings of the server

server:
  port: 8080
---
# Logging

log:
  # how much
  level: info

key words
---
other: 1
"""
TABLES = """Results of the three runs on the same machine:

Name | Seconds
--------------
old  | 12

Name      Seconds
-----------------
old       12
new       3

Model  Score
============
a      0.1

-----------------
 Name   Value
-----------------
 x      1
-----------------

+------+
| cell |
+------+

12.5 14.1
---------
26.6
"""
DIFF = """diff --git a/setup.py b/setup.py
index 83db48f..bf2d2f1 100644
--- a/setup.py
+++ b/setup.py
@@ -1,4 +1,4 @@

# Version

-version = "1.0"
+version = "1.1"

# Name

 name = "tool"
"""
MAIL = """Hello all,

please find the minutes below. Thanks for coming.

Best regards
Ann
--
Ann Example
Example Ltd

On Monday Ben wrote:
--------------------
> # not a heading
> Thanks!
"""
SESSION = """>>> from fractions import Fraction

>>> print_banner()

My Banner
---------
>>> Fraction(1, 3)
Fraction(1, 3)
=============

In [3]: x

Result of x
===========
Out[3]: 4

# a comment typed into the prompt
$ ls -l
total 0
-------
"""
SQL = """-- all users
-------------
SELECT * FROM users;

 id | name
----+------
  1 | ann

# counts

SELECT count(*) FROM users;

# removal

DELETE FROM users;
"""
README = """=============
 Table Reader
=============

Table Reader reads tables out of text files, whatever their separator is.

Installation
============

Get it with pip:

    pip install table-reader
    # no root needed

Usage notes
-----------
Open a file and read its rows one by one. Rows are lists of strings.

使用说明
--------

打开文件，然后逐行读取。

FAQ
---

It is fast enough for most files.
"""
MARKDOWN_IN_TEXT = """# Table Reader

Table Reader reads tables out of text files.

## Installing it

Get it from the package index:

```sh
# as a user, not as root
pip install table-reader
```

## Reading files

- Open a file.
- Read its rows.
"""


def titles(folder, name, text, encode):
    (folder / name).write_text(text, encoding="utf-8")
    loaded = load_documents(folder / name)
    return {chunk.title for chunk in chunk_documents(loaded.documents, encode, 40)}


@pytest.mark.parametrize(
    "text", [TUTORIAL, SHELL, YAML, TABLES, DIFF, MAIL, SESSION, SQL], ids=lambda text: text[:12].strip()
)
def test_code_comments_tables_and_logs_give_no_titles(tmp_path, encode, text):
    assert titles(tmp_path, "a.txt", text, encode) == {"a"}
    assert titles(tmp_path, "b.text", text, encode) == {"b"}


def test_a_comment_in_a_record_or_a_pdf_gives_no_title(tmp_path, encode):
    from pdfs import minimal_pdf

    line = json.dumps({"id": "1", "title": "Title", "text": TUTORIAL})
    assert titles(tmp_path, "a.jsonl", line, encode) == {"Title"}
    (tmp_path / "a.pdf").write_bytes(minimal_pdf("# Some comment", "x = 1", title="Paper"))
    loaded = load_documents(tmp_path / "a.pdf")
    assert {chunk.title for chunk in chunk_documents(loaded.documents, encode, 40)} == {"Paper"}


def test_underlined_headings_of_a_readme_are_found(tmp_path):
    (tmp_path / "README.txt").write_text(README, encoding="utf-8")
    (document,) = load_documents(tmp_path).documents
    found = tuple(find_headings(document.text, document.markup))
    assert [(heading.level, heading.text) for heading in found] == [
        (1, "Table Reader"),
        (1, "Installation"),
        (2, "Usage notes"),
        (2, "使用说明"),
        (2, "FAQ"),
    ]
    assert [document.text[heading.start : heading.stop] for heading in found[:2]] == [
        "=============\n Table Reader\n=============\n",
        "Installation\n============\n",
    ]


def test_titles_of_a_readme_are_its_headings(tmp_path, encode):
    found = titles(tmp_path, "README.txt", README, encode)
    sections = ("Installation > Usage notes", "Installation > 使用说明", "Installation > FAQ")
    assert found == {f"README > {path}" for path in ("Table Reader", "Installation", *sections)}


def test_markdown_in_a_text_file_keeps_its_headings(tmp_path):
    (tmp_path / "a.txt").write_text(MARKDOWN_IN_TEXT)
    (document,) = load_documents(tmp_path).documents
    headings = tuple(find_headings(document.text, document.markup))
    assert [heading.text for heading in headings] == ["Table Reader", "Installing it", "Reading files"]


def test_a_fence_left_open_makes_no_headings_of_comments(tmp_path):
    text = MARKDOWN_IN_TEXT.replace("```\n", "")
    assert [*find_headings(text, "plain")] == []


def test_in_markdown_code_is_fenced_or_indented(tmp_path, encode):
    text = f"# Real\n\nWords.\n\n```py\n{TUTORIAL}```\n\nMore words.\n\n" + "".join(
        f"    {line}\n" for line in SHELL.splitlines()
    )
    found = titles(tmp_path, "a.md", text, encode)
    assert {title.removeprefix("Real") for title in found} == {""}


def test_a_document_made_by_hand_is_markdown_unless_it_says_otherwise(encode):
    text = "# One\n\n" + "word " * 30 + "\n\n# Two\nword " + "word " * 30
    by_hand = chunk_documents([Document("d", "T", text, "d")], encode, 40)
    assert {chunk.title for chunk in by_hand} == {"T > One", "T > Two"}
    plain = chunk_documents([Document("d", "T", text, "d", "plain")], encode, 40)
    assert {chunk.title for chunk in plain} == {"T"}
