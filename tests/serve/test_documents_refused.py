"""Hostile names, damaged, oversized, slow and long documents: they fail alone, with a reason, or hold up no other."""

import gc
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest
from changing import LAST_S, Engine, WordCounts, add, delete, ids, left, page, states, status_of, until, words

from blend import Rag
from blend.errors import ConfigError, StoreError
from blend.prompt import PromptTemplate
from blend.serve.documents.caches import CorpusUpdater
from blend.serve.documents.documents import Documents
from blend.serve.documents.uploads import DocumentLimits, UploadedFile, UploadsFullError, safe_id
from blend.serve.failures import CORPUS_FAILS, is_transient
from blend.serve.request import GivenDocument
from blend_retrieval import Chunk, Document
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import ReadingLimits

Make = Callable[..., Documents]

NAMES = {
    "../../etc/passwd.md": "etc/passwd.md",
    "..\\..\\boot\\..\\a.md": "boot/a.md",
    "C:\\temp\\b.txt": "temp/b.txt",
    "/abs//./c.md": "abs/c.md",
    "a\nb\x1b[31m\x00\u202e.md": "a b.md",
    "x#y.md": "x_y.md",
    "\udcff.md": "\N{REPLACEMENT CHARACTER}.md",
    "d.md/..\x00": "d.md",
}


def test_hostile_names(rag: Rag, make: Make) -> None:
    long = [safe_id("a" * 10_000_000 + end) for end in ("1.md", "2.md")]
    assert len(set(long)) == 2
    assert all(len(one) <= 200 and one.endswith(".md") for one in long)
    documents = make()
    around = {path for path in rag.root.parent.rglob("*") if rag.root not in path.parents}
    given = documents.add([UploadedFile(name, b"# Harbour\n\nA bell.") for name in NAMES])
    assert [one.id for one in given] == [*NAMES.values()]
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == dict.fromkeys(NAMES.values(), "ready")
    for name, expected in NAMES.items():
        assert status_of(documents, name).id == status_of(documents, expected).id == expected
        assert delete(documents, name)
    assert {path for path in rag.root.parent.rglob("*") if rag.root not in path.parents} <= around | {rag.root}


def test_what_is_no_document_is_refused_at_once_and_no_other_with_it(make: Make) -> None:
    documents = make(limits=DocumentLimits(file_bytes=500))
    bad = [UploadedFile(name, b"text") for name in ("", "..", "a", "a.exe")] + [UploadedFile("long.md", b"x" * 501)]
    for file in bad:
        with pytest.raises((DocumentsError, ConfigError)):
            documents.add([file])
    assert documents.listing() == ()
    given = documents.add([*bad, page("harbour", 1)])
    assert [one.id for one in given] == ["file 1", "file 2", "a", "a.exe", "long.md", "harbour.md"]
    assert documents.wait(LAST_S)
    listed = {one.id: one for one in documents.listing()}
    assert listed["harbour.md"].state == "ready"
    assert {one.state for name, one in listed.items() if name != "harbour.md"} == {"failed"}
    assert "kinds that can be read" in listed["a.exe"].reason
    assert "at most 500" in listed["long.md"].reason
    documents.close()
    again = make()
    assert again.wait(LAST_S)
    assert states(again.listing()) == states(listed.values()), "also after a restart"
    assert all(delete(again, name) for name in listed)
    assert again.listing() == ()


def test_what_was_left_out_of_a_document_is_said_beside_its_state(make: Make) -> None:
    documents = make()
    latin = "Der Müller zahlt 31 Kronen, größere Boote zahlen mehr.".encode("latin-1")
    lines = b'{"text": "%s"}\n' % latin
    files = {"latin.txt": latin, "latin.jsonl": lines, "bad.jsonl": lines + b"{"}
    add(documents, [UploadedFile(name, data) for name, data in files.items()])
    held = {one.id: one for one in documents.listing()}
    assert {name: held[name].state for name in files} == {
        "latin.txt": "ready",
        "latin.jsonl": "ready",
        "bad.jsonl": "failed",
    }
    assert "is read as windows-1252" in held["latin.txt"].reason
    assert "1 left out: bad.jsonl is read as" in held["bad.jsonl"].reason
    assert held["latin.txt"].chunks == 1


def test_damaged_files_fail_with_a_reason_and_harm_no_other(rag: Rag, make: Make) -> None:
    documents = make()
    reasons = {
        UploadedFile("broken.pdf", b"%PDF-1.4\n\x00\xff nothing"): "is not a PDF",
        UploadedFile("empty.md", b"  \n"): "is empty",
        UploadedFile("lines.jsonl", b"nonsense\n"): "lines.jsonl",
        UploadedFile("bytes.txt", bytes(range(128, 256)) * 40): "bytes.txt",
    }
    add(documents, [*reasons, page("harbour")])
    for file, reason in reasons.items():
        held = status_of(documents, file.name)
        assert (held.state, reason in held.reason, "\n" in held.reason) == ("failed", True, False)
        assert delete(documents, file.name)
    assert states(documents.listing()) == {"harbour.md": "ready"}
    assert left(rag) == []


def test_a_failed_new_version_leaves_the_old_one(rag: Rag, make: Make) -> None:
    documents = make()
    add(documents, [UploadedFile("a.jsonl", b'{"id": "x", "text": "The harbour."}')])
    add(documents, [UploadedFile("a.jsonl", b"nonsense")])
    assert ids(rag) == {"a.jsonl#x"}
    add(documents, [UploadedFile("a.jsonl", b'{"id": "x", "text": "The mill."}')])
    assert states(documents.listing()) == {"a.jsonl#x": "ready"}


def test_limits_have_one_clear_line_each(make: Make) -> None:
    engine = Engine()
    documents = make(compute=engine, limits=DocumentLimits(file_bytes=500, request=2, documents=3, waiting_bytes=900))
    empty = GivenDocument("\ud800 \0".strip("\ud800 "), "title")
    for files, texts, line in (
        ([UploadedFile("a.md", b"x" * 501)], [], "at most 500"),
        ([page(topic, 1) for topic in ("a", "b", "c")], [], "3 documents in one request: give 1 to 2"),
        ([], [], "0 documents"),
        ([], [GivenDocument("text"), empty], "document 2 has no text"),
    ):
        with pytest.raises(ConfigError, match=line):
            documents.add(files, texts)
    with pytest.raises(UploadsFullError, match="wait to be read") as caught:
        documents.add([UploadedFile("a.md", b"x" * 480), UploadedFile("b.md", b"x" * 480)])
    assert caught.value.retry_after_s > 0
    documents.add([page("a", 1), page("b", 1)])
    engine.go.set()
    add(documents, [page("c", 1), page("d", 1)])
    assert states(documents.listing()) == {**dict.fromkeys(("a.md", "b.md", "c.md"), "ready"), "d.md": "failed"}
    assert "at most 3" in status_of(documents, "d.md").reason
    add(documents, [UploadedFile("many.jsonl", b'{"text": "One harbour."}\n{"text": "Two mills."}\n')])
    held = status_of(documents, "many.jsonl")
    assert (held.state, "at most 3" in held.reason) == ("failed", True)


def test_texts_get_ids_of_what_they_say(make: Make) -> None:
    documents = make()
    given = [GivenDocument(text, "H") for text in ("The harbour.", "The mill.\ud800", "The harbour.")]
    one, other, same = documents.add(texts=given)
    assert one.id == same.id != other.id
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {one.id: "ready", other.id: "ready"}


def test_what_fails_in_the_background_is_told_without_its_place(
    rag: Rag, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mill.md").write_text(words("mill", 4))
    rag.precompute([tmp_path / "mill.md"], quick=True)
    monkeypatch.setattr(CorpusUpdater, "apply", Mock(side_effect=StoreError("the store /secret/place is full")))
    documents = make()
    until(lambda: "secret" in documents.problem)
    (held,) = documents.listing()
    assert (held.state, held.reason) == ("failed", CORPUS_FAILS)


def test_the_machine_is_at_fault_or_the_document() -> None:
    out_of_memory = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: x")
    machine = (MemoryError(), out_of_memory, OSError(5, "Input/output error"), StoreError("down"))
    assert all(map(is_transient, machine))
    assert not any(map(is_transient, (RuntimeError("a bug"), DocumentsError("damaged"))))


SLOW = UploadedFile("slow.html", b"<p>a <b>word</b></p>\n" * 600_000)


def test_closing_does_not_wait_for_a_file_that_is_read_and_a_slow_one_fails_alone(rag: Rag, make: Make) -> None:
    documents = make()
    documents.add([SLOW, page("harbour", 2), page("mill", 2)])
    until(lambda: states(documents.listing())["slow.html"] == "reading")
    closed(documents)
    assert states(documents.listing())["slow.html"] == "queued"
    again = make(limits=DocumentLimits(reading=ReadingLimits(seconds=1)))
    assert again.wait(LAST_S)
    assert states(again.listing()) == {"harbour.md": "ready", "mill.md": "ready", "slow.html": "failed"}
    assert status_of(again, "slow.html").reason == "slow.html takes more than 1 s to be read: divide it"


def test_closing_waits_for_no_text_that_is_divided(rag: Rag, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, texts, plain = make(), list[str](), PromptTemplate.encode

    def encode(template: PromptTemplate, text: str) -> list[int]:
        texts.append(text)
        return plain(template, text)

    monkeypatch.setattr(PromptTemplate, "encode", encode)
    documents.add(texts=[GivenDocument("The mill of Orr grinds rye on Mondays.\n\n" * 50_000, "Orr", "orr")])
    until(lambda: bool(texts))
    closed(documents)
    assert states(documents.listing()) == {"orr": "queued"}


def closed(documents: Documents) -> None:
    documents.close()
    assert not any(thread.name == "kvblend-documents" for thread in threading.enumerate())


LONG = GivenDocument(" ".join(f"The weir of Orr has {n} gates." for n in range(4_000)), "Weir", "weir")  # one line


class Slow(WordCounts):
    """Embeds one batch of the long document, then waits until more are allowed."""

    def __init__(self) -> None:
        self.batches, self._allowed, self._changed = 0, 1.0, threading.Condition()

    def allow(self, batches: float = inf) -> None:
        with self._changed:
            self._allowed = batches
            self._changed.notify_all()

    def embed(self, texts, progress=None):  # type: ignore[no-untyped-def]
        if "weir" in texts[0]:
            self.batches += 1
            with self._changed:
                assert self._changed.wait_for(lambda: self.batches <= self._allowed, LAST_S)
            time.sleep(0.05)  # as a real model does
        return super().embed(texts, progress)


@pytest.fixture
def slow(rag: Rag) -> Slow:
    rag.embedder = embedder = Slow()
    return embedder


@pytest.fixture
def begun(rag: Rag, slow: Slow, make: Make) -> Documents:
    """The documents of a corpus, while the long one is embedded."""
    documents = make()
    documents.add(texts=[LONG])
    until(lambda: slow.batches > 1)
    return documents


def test_short_documents_that_come_later_are_indexed_first(rag: Rag, slow: Slow, begun: Documents) -> None:
    begun.add([page("harbour", 2), page("mill", 2)])

    def indexed() -> bool:
        if (rag.index_dir / "manifest.json").exists() and "harbour.md" in ids(rag):
            return True
        slow.allow(slow.batches)  # one more
        time.sleep(0.1)
        return False

    until(indexed)
    assert states(begun.listing())["weir"] == "indexing"
    slow.allow()
    until(lambda: states(begun.listing())["weir"] != "indexing")
    whole = sum(chunk.document_id == "weir" for chunk in rag.index.chunks)
    assert slow.batches == -(-whole // 32), "nothing of it is embedded twice"


@pytest.mark.parametrize("left_texts", [[], ["The weir of Orr has been closed."]], ids=["deletion", "new version"])
def test_a_change_ends_the_work_on_the_earlier_version(
    rag: Rag, slow: Slow, begun: Documents, left_texts: list[str]
) -> None:
    if left_texts:
        begun.add(texts=[GivenDocument(left_texts[0], "Weir", "weir")])
    else:
        assert begun.delete("weir")
    slow.allow()
    assert begun.wait(LAST_S)
    chunks = rag.index.chunks if left_texts else ()
    assert [chunk.text for chunk in chunks] == left_texts
    assert len(begun.listing()) == len(left_texts)
    assert slow.batches < 20, "of 62"
    assert left(rag) == []


def test_of_a_deleted_document_nothing_stays_in_memory(slow: Slow, begun: Documents) -> None:
    def texts() -> list[Document | Chunk]:
        gc.collect()
        held = [value for value in gc.get_objects() if type(value) in (Document, Chunk)]
        return [value for value in held if "weir" in (value.document_id if isinstance(value, Chunk) else value.id)]

    assert len(texts()) > 1000
    assert begun.delete("weir")
    slow.allow()
    assert begun.wait(LAST_S)
    until(lambda: not texts())


def test_a_deletion_ends_the_reading(rag: Rag, make: Make) -> None:
    documents = make()
    documents.add([SLOW])
    until(lambda: states(documents.listing()) == {"slow.html": "reading"})
    assert delete(documents, "slow.html")
    assert documents.wait(LAST_S)
    assert documents.listing() == ()
    assert left(rag) == []
