"""Files without a suffix that are text."""

import pytest

from blend_retrieval.loading import load_bytes, load_documents

TEXTS = {
    "Makefile": "# All of it\n# ---------\nall:\n\tbuild",
    "Dockerfile.dev": "FROM base\nRUN build",
    "LICENSE-2.0": "Anyone may use it.",
    "README": "Harbour\n=======\n\nThe fee is 31.",
    "hosts": "127.0.0.1 pier",
    "run": "#!/bin/sh\n# Start\necho 31",
    ".env.example": "FEE=31",
    "config.yaml.sample": "fee: 31",
}


def test_text_is_read_and_binary_files_are_counted(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "utf16").write_text("Fee: 31 crowns", encoding="utf-16")
    (tmp_path / "long").write_text("ü" * 40_000 + "\n31")
    for name in ("tool", "data"):
        (tmp_path / name).write_bytes(b"\x7fELF\0\0\0" + bytes(100))
    (tmp_path / ".env").write_text("SECRET=1")
    (tmp_path / "a.tool").write_text("text")
    loaded = load_documents(tmp_path)
    texts = {document.id: document.text for document in loaded.documents}
    assert texts == {**TEXTS, "utf16": "Fee: 31 crowns", "long": "ü" * 40_000 + "\n31"}
    assert {document.title for document in loaded.documents} == set(texts)
    (skipped,) = loaded.skipped
    assert skipped.reason == "kinds that are not read: 2 without a suffix, 1 .tool"


@pytest.mark.parametrize(
    ("name", "markup"), [("Makefile", "code"), ("run", "code"), ("README", "plain"), (".env.example", "code")]
)
def test_comments_are_no_headings(name, markup):
    (document,), _ = load_bytes(name, TEXTS[name].encode())
    assert (document.title, document.markup) == (name, markup)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("tool", b"\x7fELF\0\0\0", "is a binary file, not text"),
        ("Makefile", b" \n", "is empty"),
        ("LICENSE", b"caf\xe9", "is not UTF-8"),
        ("a.exe", b"text", "is none of the kinds that can be read"),
    ],
)
def test_why_a_file_is_not_read(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    (tmp_path / "a.md").write_text("Good.")
    for loaded in (load_bytes(name, data), load_documents([tmp_path / name, tmp_path / "a.md"])):
        (skipped,) = loaded.skipped
        assert skipped.reason.startswith(reason)


@pytest.mark.parametrize("name", ["", ".."])
def test_text_without_a_name_is_no_file(name):
    documents, (skipped,) = load_bytes(name, b"text")
    assert not documents
    assert skipped.reason.startswith("is none of the kinds that can be read")
