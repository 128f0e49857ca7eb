"""PDF documents: pages, titles, encryption, and those that unpack to too much."""

import importlib.util
import zlib

import pytest
from pdfs import minimal_pdf

from blend_retrieval.loading import load_documents


def test_pdf_pages_and_title(tmp_path):
    (tmp_path / "a.pdf").write_bytes(minimal_pdf("Hello from page one", "", "And from page three", title="My paper"))
    (tmp_path / "scan.pdf").write_bytes(minimal_pdf(""))
    loaded = load_documents(tmp_path)
    assert loaded.documents[0].title == "My paper"
    assert loaded.documents[0].text == "Hello from page one\n\nAnd from page three"
    assert "OCR" in loaded.skipped[0].reason


CIPHERS = ["RC4-128", *(("AES-128", "AES-256-R5", "AES-256") if importlib.util.find_spec("cryptography") else ())]


@pytest.mark.parametrize("cipher", CIPHERS)
def test_encrypted_pdf_is_read_if_it_needs_no_password(tmp_path, cipher):
    from pypdf import PdfReader, PdfWriter

    (tmp_path / "plain.pdf").write_bytes(minimal_pdf("Some words"))
    for name, password in (("open.pdf", ""), ("closed.pdf", "secret")):
        writer = PdfWriter(clone_from=PdfReader(tmp_path / "plain.pdf"))
        writer.encrypt(password, algorithm=cipher)
        writer.write(tmp_path / name)
    loaded = load_documents(tmp_path)
    assert [(d.id, d.text) for d in loaded.documents] == [("open.pdf", "Some words"), ("plain.pdf", "Some words")]
    assert [s.reason for s in loaded.skipped] == ["is protected by a password; save it without one"]


def encrypted_pdf(number, method, **entries):
    """A PDF whose encryption dictionary says AES; its keys open with no password, and its text is not encrypted."""
    plain = minimal_pdf("Some words")
    fields = " ".join(f"/{name} {value}" for name, value in entries.items())
    dictionary = (
        f"/Encrypt << /Filter /Standard /V {number} /StmF /StdCF /StrF /StdCF /P -4 {fields} "
        f"/CF << /StdCF << /AuthEvent /DocOpen /CFM /{method} >> >> >> /ID [<00> <00>] "
    )
    return plain.replace(b"trailer << ", b"trailer << " + dictionary.encode())


def test_pdf_encrypted_with_aes_says_what_it_takes(tmp_path):
    key, seal = f"<{'41' * 48}>", f"<{'41' * 32}>"
    aes_256 = encrypted_pdf(5, "AESV3", R=6, Length=256, O=key, U=key, OE=seal, UE=seal, Perms=f"<{'41' * 16}>")
    (tmp_path / "a.pdf").write_bytes(aes_256)
    (tmp_path / "b.md").write_text("Good.")
    loaded = load_documents(tmp_path)
    assert [d.id for d in loaded.documents] == ["b.md"]
    (reason,) = [skipped.reason for skipped in loaded.skipped]
    if importlib.util.find_spec("cryptography"):
        assert reason == "is protected by a password; save it without one"
    else:
        assert "run: pip install cryptography" in reason


def test_pdf_whose_pages_unpack_to_too_much_is_skipped(tmp_path):
    plain = minimal_pdf("Some words")
    packed = zlib.compress(b" " * 100_000_000, 9)
    start, stop = plain.index(b"<< /Length"), plain.index(b"endstream")
    bomb = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\n" % (len(packed), packed)
    (tmp_path / "bomb.pdf").write_bytes(plain[:start] + bomb + plain[stop:])
    (tmp_path / "b.md").write_text("Good.")
    loaded = load_documents(tmp_path)
    assert [d.id for d in loaded.documents] == ["b.md"]
    assert "is not a PDF that pypdf can read" in loaded.skipped[0].reason
