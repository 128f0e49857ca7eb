"""Processes that end while documents are on their way: nothing is lost, and nothing is left over."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from changing import LAST_S, Make, add, caches, compute_here, delete, ids, left, page, states, status_of, until
from places import PYTHONPATH

from blend import Rag
from blend.errors import ConfigError, StoreError
from blend.serve.documents.documents import Documents
from blend.serve.documents.queue import UploadQueue
from blend.serve.documents.uploads import Upload
from blend.serve.request import GivenDocument

_PROGRAM = """
import sys, time
from pathlib import Path
from changing import compute_here, open_corpus, page
from blend.serve.documents.documents import Documents

count = 0

def slowly(library, variants, on_done):
    global count
    for one in variants:
        compute_here(library, [one], on_done)
        count += 1
        time.sleep(0.05)

documents = Documents(open_corpus(Path(sys.argv[1]), Path(sys.argv[2])), slowly)
documents.add([page(topic, 24) for topic in ("harbour", "mill")])
while count < 5:
    time.sleep(0.01)
documents.add([page("quarry", 24)])
print("taken", flush=True)
documents.wait(120)
"""


def test_a_killed_process_goes_on_where_it_was(rag: Rag, small_model: Path, make: Make) -> None:
    """Two documents are in the index and some of their caches are there, a third one waits."""
    env = {**os.environ, "PYTHONPATH": f"{PYTHONPATH}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, str(rag.root), str(small_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert ids(rag) == {"harbour.md", "mill.md"}
    stored, compute = caches(rag), Mock(side_effect=compute_here)
    assert stored >= 5
    documents = make(compute=compute)
    assert documents.wait(LAST_S)
    assert states(documents) == dict.fromkeys(("harbour.md", "mill.md", "quarry.md"), "ready")
    computed = sum(len(call.args[1]) for call in compute.call_args_list)
    assert computed == caches(rag) - stored > 0  # those that were there are not computed again
    assert left(rag) == []


def test_what_waits_is_for_its_owner_alone_and_half_of_it_is_nothing(
    rag: Rag, documents: Documents, make: Make
) -> None:
    incoming = rag.index_dir.parent / "incoming"
    add(documents, [page("harbour")])
    assert stat.S_IMODE(incoming.stat().st_mode) == 0o700
    documents.close()
    draft = incoming / f".00000000-{2**22 + 1}-abc.tmp"
    draft.write_bytes(b"half of a document")
    os.utime(draft, (0, 0))
    assert make().wait(LAST_S)
    assert left(rag) == []


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_caches_of_what_went_go_even_if_the_process_ends_before(
    rag: Rag, make: Make, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    documents = make()
    add(documents, [page("harbour", 4), page("mill", 4)])
    before = caches(rag)
    with monkeypatch.context() as patch:
        patch.setattr(type(rag.store), "delete", Mock(side_effect=StoreError("the store is down")))
        if change == "delete":
            assert delete(documents, "harbour.md")
        else:
            add(documents, texts=[GivenDocument("The harbour.", "Harbour", "harbour.md")])
        until(lambda: documents.problem == "the store is down")
        assert ("harbour.md" in ids(rag)) == (change == "replace")
        add(documents, texts=[GivenDocument("The quarry.", "Quarry", "quarry.md")])  # and holds up no other document
        assert {one.state for one in documents.listing()} == {"ready"}
        documents.close()
    assert caches(rag) == before + 1 + (change == "replace")
    assert make().wait(LAST_S)
    assert caches(rag) == before // 2 + 1 + (change == "replace")
    assert left(rag) == []


def test_a_document_whose_bytes_are_lost_fails(rag: Rag, make: Make) -> None:
    incoming = rag.index_dir.parent / "incoming"
    UploadQueue(incoming).put([Upload("text", "lost", "T", b"The harbour.")])
    (bytes_,) = left(rag)
    (incoming / bytes_).unlink()
    documents = make()
    assert documents.wait(LAST_S)
    assert states(documents) == {"lost": "failed"}
    assert "hand it in again" in status_of(documents, "lost").reason
    with pytest.raises(ConfigError, match="hand it in again"):
        documents.retry("lost")
    assert delete(documents, "lost")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_kills_the_server_again_and_again_takes_no_innocent_document_along(rag: Rag, make: Make) -> None:
    """Accepted documents are listed, asked for and deleted after each restart, also before there is an index."""

    def die(text: str) -> None:
        """As a kill of the process would: nothing is cleaned up."""
        if "deadly" in text:
            raise SystemExit

    rag.embedder.before = die
    names = ("harbour", "deadly", "mill", "quarry")
    texts = [GivenDocument(f"The {name} opened in 1801. Its bell weighs 7 kilograms.", name, name) for name in names]
    documents = make()
    documents.add(texts=texts)
    for kill in range(5):
        until(lambda: all(thread.name != "kvblend-documents" for thread in threading.enumerate()))
        assert states(documents).keys() >= {*names} - ({"quarry"} if kill > 1 else set())
        assert states(documents)["deadly"] in ("queued", "reading", "indexing")
        if kill == 1:
            assert documents.delete("quarry")
            assert documents.get("quarry") is None
        documents = make()
    for _ in range(2):
        assert documents.wait(LAST_S)
        assert states(documents) == {"harbour": "ready", "mill": "ready", "deadly": "failed"}
        assert "given up" in status_of(documents, "deadly").reason
        documents.close()
        documents = make()
    assert len(left(rag)) == 1  # it can be tried again
    rag.embedder.before = lambda text: None
    assert documents.retry("deadly").state in ("queued", "reading", "indexing", "ready")
    assert documents.wait(LAST_S)
    assert states(documents) == {"harbour": "ready", "mill": "ready", "deadly": "ready"}
    assert left(rag) == []
