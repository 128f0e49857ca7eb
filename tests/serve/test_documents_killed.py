"""Processes that end while documents are on their way: nothing is lost, and nothing is left over."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from changing import Engine, page, states, until
from documents_made import LAST_S, add, caches, ids, left, make, model, rag
from places import PYTHONPATH

from blend import Rag
from blend.errors import StoreError
from blend.serve.documents import Documents

__all__ = ["make", "model", "rag"]  # fixtures


_PROGRAM = """
import sys, time
from pathlib import Path
from changing import open_corpus, page
from blend.serve.corpus_caches import compute_here
from blend.serve.documents import Documents

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


def started(program: str, rag: Rag, model: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{PYTHONPATH}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(rag.root), str(model)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def test_a_killed_process_goes_on_where_it_was(rag: Rag, model: Path, make: Callable[..., Documents]) -> None:
    """Two documents are in the index and some of their caches are there, a third one waits."""
    with started(_PROGRAM, rag, model) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert ids(rag) == {"harbour.md", "mill.md"}
    stored, engine = caches(rag), Engine()
    assert stored >= 5
    engine.go.set()
    documents = make(compute=engine)
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == dict.fromkeys(("harbour.md", "mill.md", "quarry.md"), "ready")
    handed = sum(map(len, engine.handed))
    assert handed == caches(rag) - stored > 0  # those that were there are not computed again
    assert left(rag) == []


def test_what_waits_is_for_its_owner_alone_and_half_of_it_is_nothing(rag: Rag, make: Callable[..., Documents]) -> None:
    incoming = rag.index_dir.parent / "incoming"
    documents = make()
    seen: set[int] = set()
    documents.add([page("harbour")])
    seen.add(stat.S_IMODE(incoming.stat().st_mode))
    assert documents.wait(LAST_S)
    documents.close()
    draft = incoming / f".00000000-{2**22 + 1}-abc.tmp"
    draft.write_bytes(b"half of a document")
    os.utime(draft, (0, 0))
    again = make()
    assert again.wait(LAST_S)
    assert states(again.listing()) == {"harbour.md": "ready"}
    assert (left(rag), seen) == ([], {0o700})


def test_caches_of_what_went_go_even_if_the_process_ends_before(
    rag: Rag, make: Callable[..., Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make()
    add(documents, [page("harbour", 4), page("mill", 4)])
    before = caches(rag)

    def down(*arguments: object) -> None:
        raise StoreError("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(rag.store), "delete", down)
        assert documents.delete("harbour.md", wait_s=0.01)
        until(lambda: documents.problem == "the store is down" and ids(rag) == {"mill.md"})
        documents.close()
    assert caches(rag) == before
    assert make().wait(LAST_S)
    assert caches(rag) == before // 2
    assert left(rag) == []


def test_what_ends_the_process_again_and_again_is_given_up(rag: Rag, make: Callable[..., Documents]) -> None:
    incoming = rag.index_dir.parent / "incoming"
    incoming.mkdir(parents=True)
    head = b'{"kind": "text", "id": "%s", "title": "T"}\nThe harbour.'
    (incoming / "000000000007-5.upload").write_bytes(head % b"deadly")
    (incoming / "000000000008-4.upload").write_bytes(head % b"unlucky")
    (incoming / "000000000009-0.upload").write_bytes(b"damaged")
    documents = make()
    assert documents.wait(LAST_S)
    found = {one.id: (one.state, one.reason) for one in documents.listing()}
    assert found["unlucky"] == ("ready", "")
    assert found["deadly"][0] == found["000000000009-0.upload"][0] == "failed"
    assert "given up" in found["deadly"][1]
    assert "hand it in again" in found["000000000009-0.upload"][1]
    assert left(rag) == ["000000000007.failed", "000000000009.failed"]
    kept = (incoming / "000000000007.failed").read_text()
    assert "given up" in kept
    assert kept.endswith("The harbour.")
    assert documents.delete("deadly")
    assert left(rag) == ["000000000009.failed"]


_SERVER = """
import sys, time
from pathlib import Path
from changing import WordCounts, open_corpus
from served import listening
from blend.serve.scheduler import EmbeddedEngine
from blend.serve.service import Service

class Deadly(WordCounts):
    def embed(self, texts, progress=None):
        if any("deadly" in text for text in texts):
            print("at it\\n", end="", flush=True)  # one write: another thread prints too
            time.sleep(600)
        return super().embed(texts, progress)

rag = open_corpus(Path(sys.argv[1]), Path(sys.argv[2]))
rag.embedder = Deadly()
service = Service(rag, EmbeddedEngine(rag.blender), learn_budget=0)
service.warm_up()
with listening(service) as found:
    print(f"{found.url}\\n", end="", flush=True)
    time.sleep(600)
"""


@contextmanager
def server(rag: Rag, model: Path) -> Iterator[tuple[Callable[[], None], httpx.Client]]:
    """A server's process, which stays at documents that hold the word deadly; it is killed at the end.

    The first of what it gives waits until it is at one.
    """
    with started(_SERVER, rag, model) as process:
        output, url, stuck = process.stdout, "", False
        assert output is not None

        def read() -> None:
            nonlocal url, stuck
            line = output.readline().strip()
            if line == "at it":
                stuck = True
            else:
                assert line.startswith("http"), line
                url = line

        def until_stuck() -> None:
            while not stuck:
                read()

        try:
            while not url:
                read()
            with httpx.Client(base_url=url, timeout=60) as http:
                yield until_stuck, http
        finally:
            process.send_signal(signal.SIGKILL)


def listed(http: httpx.Client, corpus: str) -> dict[str, tuple[str, str | None]]:
    found = http.get("/v1/documents", params={"corpus": corpus}).json()["data"]
    return {one["id"]: (one["status"], one["reason"]) for one in found}


def test_what_kills_the_server_again_and_again_takes_no_innocent_document_along(rag: Rag, model: Path) -> None:
    """Accepted documents are listed, asked for and deleted over HTTP after each restart, also before there is an index."""
    names, corpus = ("harbour", "deadly", "mill", "quarry"), "tales"
    place = {"corpus": corpus}
    texts = [{"id": name, "text": f"The {name} opened in 1801. Its bell weighs 7 kilograms."} for name in names]
    for kill in range(5):
        with server(rag, model) as (until_stuck, http):
            if kill == 0:
                assert http.post("/v1/documents", params=place, json={"documents": texts}).status_code == 202
            assert set(names) <= listed(http, corpus).keys() | ({"quarry"} if kill > 1 else set())
            assert http.get("/v1/documents/deadly", params=place).json()["status"] in ("queued", "reading", "indexing")
            if kill == 1:
                assert http.delete("/v1/documents/quarry", params=place, timeout=60).status_code == 200
                assert http.get("/v1/documents/quarry", params=place).status_code == 404
            until_stuck()
    for _ in range(2):
        with server(rag, model) as (_, http):
            until(lambda: all(one[0] in ("ready", "failed") for one in listed(http, corpus).values()))
            found = listed(http, corpus)
            states = {name: state for name, (state, _) in found.items()}
            assert states == {"harbour": "ready", "mill": "ready", "deadly": "failed"}
            assert "given up" in str(found["deadly"][1])
            assert http.delete("/v1/documents/none", params=place).status_code == 404
    with server(rag, model) as (_, http):
        assert http.delete("/v1/documents/deadly", params=place).status_code == 200
        assert set(listed(http, corpus)) == {"harbour", "mill"}
