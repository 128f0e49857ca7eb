import json
import os
import sys

import pytest

from blend_retrieval.document import SkippedDocument, summarized
from blend_retrieval.errors import DocumentsError
from blend_retrieval.loading import load_documents


def only(path):
    loaded = load_documents(path)
    assert not loaded.skipped
    (document,) = loaded.documents
    return document


def test_markdown_is_named_by_its_first_heading_or_front_matter_or_file(tmp_path):
    (tmp_path / "a.md").write_text("# Parsing *tables*\n\nText.\n")
    (tmp_path / "b.md").write_text("---\ntitle: 'A title'\ntags: x\n---\n\nText.\n")
    (tmp_path / "c.md").write_text("Text first.\n\n# Late heading\n")
    found = load_documents(tmp_path).documents
    assert [(d.id, d.title) for d in found] == [("a.md", "Parsing *tables*"), ("b.md", "A title"), ("c.md", "c")]
    assert found[1].text == "Text."


def test_order_and_ids_do_not_depend_on_the_way_there(tmp_path, monkeypatch):
    for name in ("b/two.md", "a.txt", "b/a/one.rst", "c.HTML"):
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Some text.")
    absolute = load_documents(tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    relative = load_documents("docs")
    assert [d.id for d in absolute.documents] == ["a.txt", "b/a/one.rst", "b/two.md", "c.HTML"]
    assert [d[:3] for d in relative.documents] == [d[:3] for d in absolute.documents]


def test_colliding_names_get_their_folder_in_front_and_the_same_file_is_read_once(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.md").write_text(f"In {folder}.")
    found = load_documents([tmp_path / "x", tmp_path / "y", tmp_path / "x" / "a.md"])
    assert [(d.id, d.text) for d in found.documents] == [("a.md", "In x."), ("y/a.md", "In y.")]


def test_hidden_files_and_link_loops_are_passed_over_and_other_kinds_counted(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.md").write_text("hidden")
    (tmp_path / ".x.md").write_text("hidden")
    for name in ("a.exe", "b.EXE", "c.png", "LICENSE"):
        (tmp_path / name).write_text("other")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.md").write_text("seen")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "sub" / "d.exe").write_text("other")
    loaded = load_documents(tmp_path)
    assert [document.id for document in loaded.documents] == ["sub/x.md"]
    counts = "kinds that are not read: 3 .exe, 1 without a suffix, 1 .png"
    assert loaded.skipped == (SkippedDocument(str(tmp_path), counts, (), 5),)


def test_one_reason_is_one_line(tmp_path):
    lines = ["{not json", '{"text": "kept"}', '{"text": ""}', "[]"]
    (tmp_path / "r.jsonl").write_text("\n".join(line for line in lines for _ in range(3000)))
    loaded = load_documents(tmp_path / "r.jsonl")
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
    (tmp_path / "latin.txt").write_bytes("Müller".encode("latin-1"))
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01\x02abc" * 50)
    (tmp_path / "control.txt").write_bytes(bytes(range(1, 32)) * 20)
    (tmp_path / "empty.md").write_text(" \n\n")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing of the kind")
    (tmp_path / "nul.html").write_bytes(b"<p>a\0b</p>")
    os.mkfifo(tmp_path / "pipe.txt")
    loaded = load_documents(tmp_path)
    assert [d.id for d in loaded.documents] == ["good.md"]
    reasons = {os.path.basename(s.source): s.reason for s in loaded.skipped}  # noqa: PTH119 - a string, not a file
    assert set(reasons) == {"latin.txt", "binary.txt", "control.txt", "empty.md", "broken.pdf", "nul.html", "pipe.txt"}
    assert "convert it to UTF-8" in reasons["latin.txt"]
    assert reasons["empty.md"] == "is empty"
    assert "binary" in reasons["binary.txt"]
    assert "binary" in reasons["control.txt"]
    assert "PDFium" in reasons["broken.pdf"]
    assert all("\n" not in reason for reason in reasons.values())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_reported(tmp_path):
    (tmp_path / "good.md").write_text("Good.")
    (tmp_path / "secret.md").write_text("x")
    (tmp_path / "secret.md").chmod(0)
    assert "cannot be read" in load_documents(tmp_path).skipped[0].reason


def test_nothing_to_read_is_one_line_with_the_remedy(tmp_path):
    with pytest.raises(DocumentsError, match=r"no such file or folder: .*absent"):
        load_documents(tmp_path / "absent")
    with pytest.raises(DocumentsError, match=r"give files or a folder of \.md"):
        load_documents(tmp_path)
    (tmp_path / "x.exe").write_bytes(b"MZ")
    with pytest.raises(DocumentsError, match=r"x.exe is none of the kinds") as caught:
        load_documents(tmp_path / "x.exe")
    assert "\n" not in str(caught.value)


def test_byte_order_marks_newlines_and_lone_surrogates(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffgrün\r\nzwei\rdrei".encode())
    (tmp_path / "b.txt").write_bytes("grün".encode("utf-16"))
    (tmp_path / "c.jsonl").write_bytes(rb'{"text": "a \ud800 b"}')
    assert [d.text for d in load_documents(tmp_path).documents] == ["grün\nzwei\ndrei", "grün", "a \ufffd b"]


def test_html_keeps_headings_lists_tables_and_code_and_drops_the_rest(tmp_path):
    page = """<html><head><title>The  page</title><style>p{}</style></head><body>
    <nav>Menu</nav><main><h1>Top</h1><p>First <b>bold</b> &amp; <a href="x">link</a> a_b.</p><ul><li>one</li><li>two</li></ul>
    <pre>x = 1
    y = 2</pre><table><tr><th>k</th><th>v</th></tr><tr><td>a</td><td>1</td></tr></table><script>bad()</script></main>
    <footer>Foot</footer></body></html>"""
    (tmp_path / "a.html").write_text(page)
    document = only(tmp_path)
    assert document.title == "The page"
    assert "# Top" in document.text
    assert "First **bold** & link a_b." in document.text
    assert "- one\n- two" in document.text
    assert "x = 1\n    y = 2" in document.text
    assert "| a | 1 |" in document.text
    assert not any(word in document.text for word in ("Menu", "bad()", "Foot", "p{}"))


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
    document = only(tmp_path)
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
    with pytest.raises(DocumentsError, match=r"pip install 'kvblend\[docs\]'"):
        load_documents(tmp_path)
    (tmp_path / "b.md").write_text("text")
    assert [d.id for d in load_documents(tmp_path).documents] == ["b.md"]


def test_jsonl_records_question_records_and_bad_lines(tmp_path):
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
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    loaded = load_documents(tmp_path)
    assert {(d.title, d.text) for d in loaded.documents} == {("T", "one"), ("r x7", "two"), ("C", "c")}
    assert "r.jsonl#x7" in [d.id for d in loaded.documents]
    reasons = [s.reason for s in loaded.skipped]
    assert "is not JSON" in reasons
    assert [s.source.rpartition(" ")[2] for s in loaded.skipped if 'text"' in s.reason] == ["6"]
    assert any("id of another record" in reason for reason in reasons)


def test_ids_of_jsonl_records_survive_edits_of_other_records(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    before = {d.text: d.id for d in load_documents(path).documents}
    path.write_text('{"text": "new"}\n{"text": "b"}\n')
    assert {d.text: d.id for d in load_documents(path).documents}["b"] == before["b"]
