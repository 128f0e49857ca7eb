"""What is there and could not be read is not gone: which ids that are."""

import os

import pytest

from blend_retrieval import load_documents
from blend_retrieval.readers.html import html


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "documents"
    for name in ("a.md", "notes/b.md", "notes/deep/c.md", "other/d.md", "page.html"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# About {name}\n\nA text on {name}.")
    return folder


IDS = ("a.md", "notes/b.md", "notes/deep/c.md", "other/d.md", "page.html", "notes.md", "noted/x.md")


def unread(loaded):
    says = loaded.unread()
    return [name for name in IDS if says(name)]


def test_a_file(folder, tmp_path):
    (folder / "a.md").write_bytes(bytes(range(256)))
    assert unread(load_documents(folder)) == ["a.md"]
    assert unread(load_documents([folder / "a.md", folder / "other"])) == ["a.md"]


def test_a_parser_that_is_not_installed(folder, monkeypatch):
    def lacks(data, title):
        raise ImportError(name="selectolax")

    monkeypatch.setattr(html, "read_html", lacks)
    assert unread(load_documents(folder)) == ["page.html"]


def test_what_is_empty_or_gone_was_read(folder):
    (folder / "a.md").write_text(" \n")
    (folder / "notes" / "b.md").unlink()
    (folder / "notes" / "b.md").symlink_to(folder / "nowhere")
    (folder / "other" / "d.md").unlink()
    assert unread(load_documents(folder)) == []


def test_records_of_a_file(folder):
    (folder / "many.jsonl").write_text('{"id": "1", "text": "one"}\n{"id": "2", "te\n')
    loaded = load_documents(folder)
    says = loaded.unread()
    assert "many.jsonl#1" in {document.id for document in loaded.documents}
    assert says("many.jsonl#2")
    assert not says("many.json#2")


@pytest.mark.parametrize(
    ("closed", "ids"), [("notes", ["notes/b.md", "notes/deep/c.md"]), ("notes/deep", ["notes/deep/c.md"]), (".", IDS)]
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_folder(folder, tmp_path, monkeypatch, closed, ids, gone):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "e.md").write_text("A text.")
    scandir, error = os.scandir, FileNotFoundError if gone else PermissionError

    def refused(path):
        if path == folder / closed:
            raise error(1, "not permitted")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    loaded = load_documents([folder, tmp_path / "more"])
    assert unread(loaded) == ([] if gone else list(ids))
    assert loaded.unread()(f"documents/{closed}/x.md") != gone
    assert loaded.unread()(f"{folder}/{closed}/x.md") != gone
