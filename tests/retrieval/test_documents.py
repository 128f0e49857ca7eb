import json
import sys

import pytest

from blend_retrieval.document import SkippedDocument, summarized
from blend_retrieval.errors import DocumentsError
from blend_retrieval.loading import load_bytes, load_documents


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_order_and_ids_do_not_depend_on_the_way_there(tmp_path, monkeypatch):
    for name in ("b/two.md", "a.txt", "b/a/one.rst", "c.HTML"):
        write(tmp_path / "docs" / name, "Some text.")
    absolute = load_documents(tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    relative = load_documents("docs")
    assert [d.id for d in absolute.documents] == ["a.txt", "b/a/one.rst", "b/two.md", "c.HTML"]
    assert [d[:3] for d in relative.documents] == [d[:3] for d in absolute.documents]


def test_colliding_names_get_their_folder_in_front_and_the_same_file_is_read_once(tmp_path):
    for folder in ("x", "y"):
        write(tmp_path / folder / "a.md", f"In {folder}.")
    found = load_documents([tmp_path / "x", tmp_path / "y", tmp_path / "x" / "a.md"])
    assert [(d.id, d.text) for d in found.documents] == [("a.md", "In x."), ("y/a.md", "In y.")]


def test_hidden_files_are_passed_over_and_other_kinds_counted(tmp_path):
    for name in (".git/x.md", ".x.md", ".env", "a.exe", "b.EXE", "c.png", "sub/x.md", "sub/d.exe"):
        write(tmp_path / name, "text")
    (tmp_path / "tool").write_bytes(b"\x7fELF\0\0")
    loaded = load_documents(tmp_path)
    assert [document.id for document in loaded.documents] == ["sub/x.md"]
    counts = "kinds that are not read: 3 .exe, 1 .png, 1 without a suffix"
    assert loaded.skipped == (SkippedDocument(str(tmp_path), counts, (), 5),)


def test_one_reason_is_one_line():
    lines = ["{not json", '{"text": "kept"}', '{"text": ""}', "[]"]
    loaded = load_bytes("r.jsonl", "\n".join(line for line in lines for _ in range(3000)).encode())
    assert [document.text for document in loaded.documents] == ["kept"]
    places = {one.reason: (one.source.rpartition("jsonl ")[2], one.lost) for one in loaded.skipped}
    assert places["is not JSON"] == ("line 1, line 2, line 3 and 2,997 more", 3000)
    assert len(places) == 3


def test_a_reason_that_many_files_share_is_one_line(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b" ")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(bytes(range(256)))
    skipped = load_documents(tmp_path).skipped
    assert len(skipped) == 6
    many, single = summarized(skipped)
    assert str(many).startswith(f"{tmp_path}/0.txt, {tmp_path}/1.txt, {tmp_path}/2.txt and 2 more: is empty")
    assert (many.lost, single.reason) == (5, "is a binary file, not text")


def test_what_cannot_be_read_is_reported_and_the_rest_is_read(tmp_path):
    (tmp_path / "good.md").write_text("Good.")
    bad = {
        "broken.pdf": (b"%PDF-1.4\nnothing of the kind", "PDFium"),
        "latin.txt": ("Müller".encode("latin-1"), "convert it to UTF-8"),
        "nul.html": (b"<p>a\0b</p>", "binary"),
    }
    for name, (data, _) in bad.items():
        (tmp_path / name).write_bytes(data)
    loaded = load_documents(tmp_path)
    assert [document.id for document in loaded.documents] == ["good.md"]
    for skipped, (name, (_, reason)) in zip(loaded.skipped, bad.items(), strict=True):
        assert skipped.source == str(tmp_path / name)
        assert reason in skipped.reason
        assert "\n" not in skipped.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "no such file or folder: .*absent"),
        ("x.exe/below", "no such file or folder"),
        ("loop", "cannot be read"),
        ("x" * 300, "cannot be read"),
        ("empty", r"give files or a folder of \.md"),
        ("x.exe", "x.exe is none of the kinds"),
    ],
)
def test_nothing_to_read_is_one_line_with_the_remedy(tmp_path, name, reason):
    (tmp_path / "x.exe").write_bytes(b"MZ")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DocumentsError, match=reason) as caught:
        load_documents(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_newlines_and_lone_surrogates(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree")
    (tmp_path / "b.jsonl").write_bytes(rb'{"text": "a \ud800 b"}')
    assert [d.text for d in load_documents(tmp_path).documents] == ["one\ntwo\nthree", "a \ufffd b"]


def test_html_that_parsers_trip_over_or_warn_of(tmp_path, capfd):
    (tmp_path / "x.html").write_text('<?xml version="1.0"?><html><p>xhtml</p></html>')
    (tmp_path / "name.html").write_text("readme.txt")
    assert {d.id for d in load_documents(tmp_path).documents} == {"name.html", "x.html"}
    assert capfd.readouterr() == ("", "")


def test_rst_with_sphinx_markup_keeps_its_text(tmp_path, capfd):
    (tmp_path / "a.rst").write_text(
        "The reader\n==========\n\nUse :func:`open` and :unknown-role:`that`.\n\nDetails\n-------\n\n"
        ".. invented:: reader(x)\n   :option: 1\n\n   Inner *text* here.\n\n.. note:: Mind this.\n\n"
        ".. include:: /etc/passwd\n\n::\n\n    code_block()\n"
    )
    (document,), (skipped,) = load_documents(tmp_path)
    assert skipped.source.endswith("a.rst /etc/passwd")
    assert skipped.reason == "is another file, which is not taken in"
    assert document.title == "The reader"
    assert document.text.startswith("# The reader")
    assert "## Details" in document.text
    for words in ("open", "that", "reader(x)", "Inner *text* here.", "Mind this.", "code_block()"):
        assert words in document.text
    assert "root:" not in document.text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("suffix", "package"), [(".pdf", "pypdfium2"), (".html", "selectolax.lexbor"), (".rst", "docutils.core")]
)
def test_missing_parser_names_the_command(tmp_path, monkeypatch, suffix, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"a{suffix}").write_bytes(b"text")
    with pytest.raises(DocumentsError, match=r"pip install .*docs"):
        load_documents(tmp_path)
    (tmp_path / "b.md").write_text("text")
    assert [d.id for d in load_documents(tmp_path).documents] == ["b.md"]


def test_jsonl_records_question_records_and_bad_lines():
    lines = [
        json.dumps({"title": "T", "text": "one"}),
        json.dumps({"id": "x7", "text": "two"}),
        json.dumps({"id": 3, "question": "?", "answers": [], "chunks": [{"title": "C", "text": "c"}] * 2}),
        json.dumps({"id": 4, "question": "?", "answers": [], "chunks": [{"title": "C", "text": "c"}]}),
        "{not json",
        json.dumps({"title": "no text"}),
        json.dumps({"id": "x7", "text": "other"}),
        "",
    ]
    loaded = load_bytes("r.jsonl", "\n".join(lines).encode())
    assert {(d.title, d.text) for d in loaded.documents} == {("T", "one"), ("r x7", "two"), ("C", "c")}
    assert "r.jsonl#x7" in [d.id for d in loaded.documents]
    reasons = [s.reason for s in loaded.skipped]
    assert "is not JSON" in reasons
    assert [s.source.rpartition(" ")[2] for s in loaded.skipped if 'text"' in s.reason] == ["6"]
    assert any("id of another record" in reason for reason in reasons)


def test_ids_of_jsonl_records_survive_edits_of_other_records():
    before, after = (
        {one.text: one.id for one in load_bytes("r.jsonl", b'{"text": "%s"}\n{"text": "b"}\n' % first).documents}
        for first in (b"a", b"new")
    )
    assert before["b"] == after["b"]
