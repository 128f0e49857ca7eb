"""A long document holds up no short one, and its end ends the work on it."""

import gc
import threading
import time
from collections.abc import Callable
from math import inf

import pytest
from changing import LAST_S, WordCounts, delete, ids, left, page, states, until

from blend import Rag
from blend.serve.documents.documents import Documents
from blend.serve.request import GivenDocument
from blend_retrieval import Chunk, Document

Make = Callable[..., Documents]
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


def test_a_deletion_ends_the_work(rag: Rag, slow: Slow, begun: Documents) -> None:
    removal = begun.delete("weir")
    assert removal is not None
    slow.allow()
    until(lambda: begun.outcome(removal) == "")
    assert begun.wait(LAST_S)
    assert begun.listing() == ()
    assert slow.batches < 20, "of 62"
    assert left(rag) == []


def test_of_a_deleted_document_nothing_stays_in_memory(slow: Slow, begun: Documents) -> None:
    def texts() -> list[Document | Chunk]:
        gc.collect()
        held = [value for value in gc.get_objects() if type(value) in (Document, Chunk)]
        return [value for value in held if "weir" in (value.document_id if isinstance(value, Chunk) else value.id)]

    assert len(texts()) > 1000
    assert begun.delete("weir") is not None
    slow.allow()
    assert begun.wait(LAST_S)
    until(lambda: not texts())


def test_a_new_version_ends_the_work_on_the_old_one(rag: Rag, slow: Slow, begun: Documents) -> None:
    begun.add(texts=[GivenDocument("The weir of Orr has been closed.", "Weir", "weir")])
    slow.allow()
    assert begun.wait(LAST_S)
    assert [chunk.text for chunk in rag.index.chunks] == ["The weir of Orr has been closed."]
    assert slow.batches < 20, "of 62"


def test_a_deletion_ends_the_reading(rag: Rag, make: Make) -> None:
    documents = make()
    documents.add([page("harbour")._replace(name="slow.html", data=b"<p>a <b>word</b></p>\n" * 600_000)])
    until(lambda: states(documents.listing()) == {"slow.html": "reading"})
    assert delete(documents, "slow.html", wait_s=LAST_S)
    assert documents.wait(LAST_S)
    assert documents.listing() == ()
    assert left(rag) == []
