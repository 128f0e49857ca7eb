"""Plain text is full of comments, ruled tables and logs, so only Markdown has headings that get into titles."""

import json

import pytest
from pdfs import minimal_pdf
from rendered import chunk_documents

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


def titles(name, data):
    return {chunk.title for chunk in chunk_documents(load_bytes(name, data).documents, 40)}


@pytest.mark.parametrize("text", [SHELL, TABLES], ids=["shell", "tables"])
def test_code_comments_and_tables_give_no_titles(text):
    assert titles("a.txt", text.encode()) == {"a"}
    assert titles("a.jsonl", json.dumps({"title": "Title", "text": text}).encode()) == {"Title"}
    assert titles("a.pdf", minimal_pdf("# Some comment", "x = 1", title="Paper")) == {"Paper"}
