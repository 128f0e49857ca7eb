"""Hostile names, damaged, oversized, slow and long documents: they fail alone, with a reason, or hold up no other."""

import gc
import threading
import time
from math import inf
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from changing import LAST_S, Make, add, delete, ids, left, page, states, status_of, until, words

from blend import Rag
from blend.errors import ConfigError, StoreError
from blend.prompt_template import PromptTemplate
from blend.serve.documents.caches import CorpusUpdater
from blend.serve.documents.documents import Documents
from blend.serve.documents.uploads import DocumentLimits, UploadedFile, UploadsFullError, safe_id
from blend.serve.failures import CORPUS_FAILS
from blend.serve.request import GivenDocument
from blend_retrieval import Chunk, Document
from blend_retrieval.errors import DocumentsError
from blend_retrieval.isolated import ReadingLimits

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


def test_hostile_names(rag: Rag, documents: Documents) -> None:
    around = {path for path in rag.root.parent.rglob("*") if rag.root not in path.parents}
    given = documents.add([UploadedFile(name, b"# Harbour\n\nA bell.") for name in NAMES])
    assert [one.id for one in given] == [*NAMES.values()]
    assert documents.wait(LAST_S)
    assert states(documents) == dict.fromkeys(NAMES.values(), "ready")
    for name, expected in NAMES.items():
        assert status_of(documents, name).id == status_of(documents, expected).id == expected
        assert delete(documents, name)
    assert {path for path in rag.root.parent.rglob("*") if rag.root not in path.parents} <= around | {rag.root}


def test_long_names_are_cut_and_stay_different() -> None:
    long = [safe_id("a" * 10_000_000 + end) for end in ("1.md", "2.md")]
    assert len(set(long)) == 2
    assert all(len(one) <= 200 and one.endswith(".md") for one in long)


def test_what_is_no_document_is_refused_at_once_and_no_other_with_it(make: Make) -> None:
    documents = make(limits=DocumentLimits(file_bytes=500))
    bad = [UploadedFile(name, b"text") for name in ("", "..", "a.dll", "a.exe")] + [UploadedFile("long.md", b"x" * 501)]
    for file in bad:
        with pytest.raises((DocumentsError, ConfigError)):
            documents.add([file])
    assert documents.listing() == ()
    add(documents, [*bad, page("harbour", 1)])
    failed = dict.fromkeys(("file 1", "file 2", "a.dll", "a.exe", "long.md"), "failed")
    assert states(documents) == {**failed, "harbour.md": "ready"}
    assert "kinds that can be read" in status_of(documents, "a.exe").reason
    assert "at most 500" in status_of(documents, "long.md").reason
    documents.close()
    again = make()
    assert again.wait(LAST_S)
    assert states(again) == {**failed, "harbour.md": "ready"}, "also after a restart"
    assert all(delete(again, name) for name in failed)
    assert states(again) == {"harbour.md": "ready"}


LATIN = "Der Müller zahlt 31 Kronen, größere Boote zahlen mehr.".encode("latin-1")
LINES = b'{"text": "%s"}\n' % LATIN
FILES = {
    "broken.pdf": (b"%PDF-1.4\n\x00\xff nothing", "failed", "is not a PDF"),
    "empty.md": (b"  \n", "failed", "is empty"),
    "lines.jsonl": (b"nonsense\n", "failed", "lines.jsonl"),
    "bytes.txt": (bytes(range(128, 256)) * 40, "failed", "bytes.txt"),
    "latin.txt": (LATIN, "ready", "is read as windows-1252"),
    "latin.jsonl": (LINES, "ready", "is read as windows-1252"),
    "bad.jsonl": (LINES + b"{", "failed", "1 left out: bad.jsonl is read as"),
}


def test_damage_is_told_and_harms_no_other_document(rag: Rag, documents: Documents) -> None:
    add(documents, [*(UploadedFile(name, data) for name, (data, *_) in FILES.items()), page("harbour")])
    for name, (_, state, reason) in FILES.items():
        held = status_of(documents, name)
        assert (held.state, reason in held.reason, "\n" in held.reason) == (state, True, False), held.reason
        assert delete(documents, name)
    assert states(documents) == {"harbour.md": "ready"}
    assert left(rag) == []


def test_a_failed_new_version_leaves_the_old_one(rag: Rag, documents: Documents) -> None:
    for text, found in ((b'"The harbour."}', "harbour"), (b"nonsense", "harbour"), (b'"The mill."}', "mill")):
        add(documents, [UploadedFile("a.jsonl", b'{"id": "x", "text": ' + text)])
        assert [found in chunk.text for chunk in rag.index.chunks] == [True]
    assert states(documents) == {"a.jsonl#x": "ready"}


def test_limits_have_one_clear_line_each(make: Make) -> None:
    documents = make(limits=DocumentLimits(request=2, documents=3, waiting_bytes=900))
    with pytest.raises(ConfigError, match="3 documents in one request: give 1 to 2"):
        documents.add([page(topic, 1) for topic in ("a", "b", "c")])
    with pytest.raises(ConfigError, match="document 2 has no text"):
        documents.add(texts=[GivenDocument("text"), GivenDocument("\0", "title")])
    with pytest.raises(UploadsFullError, match="wait to be read") as caught:
        documents.add([UploadedFile("a.md", b"x" * 480), UploadedFile("b.md", b"x" * 480)])
    assert caught.value.retry_after_s > 0
    add(documents, [page("a", 1), page("b", 1)])
    add(documents, [page("c", 1), page("d", 1)])
    assert states(documents) == {**dict.fromkeys(("a.md", "b.md", "c.md"), "ready"), "d.md": "failed"}
    assert "at most 3" in status_of(documents, "d.md").reason
    add(documents, [UploadedFile("many.jsonl", b'{"text": "One harbour."}\n{"text": "Two mills."}\n')])
    held = status_of(documents, "many.jsonl")
    assert (held.state, "at most 3" in held.reason) == ("failed", True)


def test_texts_get_ids_of_what_they_say(documents: Documents) -> None:
    given = [GivenDocument(text, "H") for text in ("The harbour.", "The mill.\ud800", "The harbour.")]
    one, other, same = documents.add(texts=given)
    assert one.id == same.id != other.id
    assert documents.wait(LAST_S)
    assert states(documents) == {one.id: "ready", other.id: "ready"}


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


def test_a_document_that_a_bug_has_failed_may_be_tried_again(
    documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(CorpusUpdater, "apply", Mock(side_effect=ZeroDivisionError("a bug")))
        documents.add([page("mill", 2)])
        until(lambda: states(documents) == {"mill.md": "failed"})
    documents.retry("mill.md")
    assert documents.wait(LAST_S)
    assert states(documents) == {"mill.md": "ready"}


SLOW = UploadedFile("slow.rst", b"*a* ``b`` c\n\n" * 100_000)


def test_closing_does_not_wait_for_a_file_that_is_read_and_a_slow_one_fails_alone(
    documents: Documents, make: Make
) -> None:
    documents.add([SLOW, page("harbour", 2), page("mill", 2)])
    until(lambda: states(documents)["slow.rst"] == "reading")
    closed(documents)
    assert states(documents)["slow.rst"] == "queued"
    again = make(limits=DocumentLimits(reading=ReadingLimits(seconds=1, seconds_a_megabyte=0)))
    assert again.wait(LAST_S)
    assert states(again) == {"harbour.md": "ready", "mill.md": "ready", "slow.rst": "failed"}
    assert status_of(again, "slow.rst").reason == "slow.rst takes more than 1 s to be read: divide it"


def test_closing_waits_for_no_text_that_is_divided(documents: Documents) -> None:
    text = GivenDocument("The mill of Orr grinds rye on Mondays.\n\n" * 50_000, "Orr", "orr")
    with patch.object(PromptTemplate, "encode", autospec=True, side_effect=PromptTemplate.encode) as encode:
        documents.add(texts=[text])
        until(lambda: encode.called)
        closed(documents)
    assert states(documents) == {"orr": "queued"}


def closed(documents: Documents) -> None:
    documents.close()
    assert not any(thread.name == "kvblend-documents" for thread in threading.enumerate())


LONG = GivenDocument(" ".join(f"The weir of Orr has {n} gates." for n in range(4_000)), "Weir", "weir")  # one line


class Slow:
    """Lets few texts of the long document be embedded, then as many as are allowed."""

    def __init__(self) -> None:
        self.embedded, self._allowed, self._changed = 0, 32.0, threading.Condition()

    def allow(self, texts: float = inf) -> None:
        with self._changed:
            self._allowed = texts
            self._changed.notify_all()

    def __call__(self, text: str) -> None:
        if "weir" in text:
            self.embedded += 1
            with self._changed:
                assert self._changed.wait_for(lambda: self.embedded <= self._allowed, LAST_S)
            time.sleep(0.002)  # as a real model does


@pytest.fixture
def slow(rag: Rag, documents: Documents) -> Slow:
    """The long document is being embedded."""
    rag.embedder.before = made = Slow()
    documents.add(texts=[LONG])
    until(lambda: made.embedded > 32)
    return made


def test_short_documents_that_come_later_are_indexed_first(rag: Rag, documents: Documents, slow: Slow) -> None:
    documents.add([page("harbour", 2), page("mill", 2)])

    def indexed() -> bool:
        slow.allow(slow.embedded + 32)
        time.sleep(0.1)
        return (rag.index_dir / "manifest.json").exists() and "harbour.md" in ids(rag)

    until(indexed)
    assert states(documents)["weir"] == "indexing"
    slow.allow()
    until(lambda: states(documents)["weir"] != "indexing")
    whole = sum(chunk.document_id == "weir" for chunk in rag.index.chunks)
    assert slow.embedded == whole, "nothing of it is embedded twice"


@pytest.mark.parametrize("left_texts", [[], ["The weir of Orr has been closed."]], ids=["deletion", "new version"])
def test_a_change_ends_the_work_on_the_earlier_version(
    rag: Rag, documents: Documents, slow: Slow, left_texts: list[str]
) -> None:
    if left_texts:
        documents.add(texts=[GivenDocument(left_texts[0], "Weir", "weir")])
    else:
        assert documents.delete("weir")
    slow.allow()
    assert documents.wait(LAST_S)
    chunks = rag.index.chunks if left_texts else ()
    assert [chunk.text for chunk in chunks] == left_texts
    assert len(documents.listing()) == len(left_texts)
    assert slow.embedded < 640, "of 1984"
    assert left(rag) == []


def test_of_a_deleted_document_nothing_stays_in_memory(documents: Documents, slow: Slow) -> None:
    def texts() -> list[Document | Chunk]:
        gc.collect()
        held = [value for value in gc.get_objects() if type(value) in (Document, Chunk)]
        return [value for value in held if "weir" in (value.document_id if isinstance(value, Chunk) else value.id)]

    assert len(texts()) > 1000
    assert documents.delete("weir")
    slow.allow()
    assert documents.wait(LAST_S)
    until(lambda: not texts())


def test_a_deletion_ends_the_reading(rag: Rag, documents: Documents) -> None:
    documents.add([SLOW])
    until(lambda: states(documents) == {"slow.rst": "reading"})
    assert delete(documents, "slow.rst")
    assert documents.wait(LAST_S)
    assert documents.listing() == ()
    assert left(rag) == []
