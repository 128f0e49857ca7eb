"""Documents come, change and go while they are asked about: no error, no wrong cache, nothing lost, nothing left over."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from changing import Engine, page, room, states, until, words

from blend import Rag
from blend.errors import ConfigError, PromptError, StoreError
from blend.serve.ask import GivenDocument
from blend.serve.corpus_keeper import CorpusKeeper
from blend.serve.documents import DocumentLimits, Documents, DocumentStatus, UploadedFile
from blend.serve.room import Room
from blend.serve.uploads import UploadsFullError, safe_id
from retrieval.errors import DocumentsError
from tests.tiny_model import save_tiny_model

TEXT = "The harbour mill quarry orchard number opened in. Its bell weighs kilograms."
LAST_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TEXT)


@pytest.fixture
def rag(tmp_path: Path, model: Path) -> Rag:
    return room(tmp_path / "store", model, ratio=1.0)


@pytest.fixture
def make(rag: Rag) -> Iterator[Callable[..., Documents]]:
    made: list[Documents] = []

    def new(**options: object) -> Documents:
        made.append(Documents(options.pop("rag", rag), **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for one in made:
        one.close()


def _left(rag: Rag) -> list[str]:
    """What still waits on disk."""
    folder = rag.index_dir.parent / "incoming"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _caches(rag: Rag) -> int:
    return rag.store.stats().entries


def test_a_document_is_taken_read_indexed_and_computed(rag: Rag, make: Callable[..., Documents]) -> None:
    documents = make()
    assert documents.listing() == ()
    (given,) = documents.add([page("harbour")])
    assert (given.id, given.state) == ("harbour.md", "queued")
    assert documents.wait(LAST_S)
    held = documents.get("harbour.md")
    assert held is not None
    assert (held.title, held.state, held.reason) == ("The harbour", "ready", "")
    assert held.chunks == len(rag.index.chunks) > 1
    assert held.tokens_done == held.tokens_total > 0
    answer = rag.answer("Which bell hangs in harbour number 3?", max_new_tokens=2)
    assert all(answer.blend.hits)
    assert {hit.chunk.document_id for hit in answer.chunks} == {"harbour.md"}
    assert _left(rag) == []


def test_it_is_answerable_before_its_caches_are_there(rag: Rag, make: Callable[..., Documents]) -> None:
    engine = Engine()
    documents = make(compute=engine)
    documents.add([page("harbour")])
    until(lambda: states(documents.listing()) == {"harbour.md": "computing"})
    answer = rag.answer("Which bell?", max_new_tokens=2)
    assert {hit.chunk.document_id for hit in answer.chunks} == {"harbour.md"}
    assert not any(answer.blend.hits)
    documents.add([page("mill")])  # what comes meanwhile does not wait for the caches
    until(lambda: set(states(documents.listing())) == {"harbour.md", "mill.md"} == _ids(rag))
    engine.go.set()
    assert documents.wait(LAST_S)
    assert set(states(documents.listing()).values()) == {"ready"}


def _ids(rag: Rag) -> set[str]:
    return {chunk.document_id for chunk in rag.index.chunks}


def test_progress_only_grows(make: Callable[..., Documents]) -> None:
    documents, seen = make(), list[DocumentStatus]()
    documents.add([page(topic, 20) for topic in ("harbour", "mill", "quarry")])
    ended = False
    while not ended:
        ended, told = documents.wait(0.001), documents.get("quarry.md")
        assert told is not None  # at no moment is it lost from sight
        seen.append(told)
    order = ("queued", "reading", "indexing", "computing", "ready")
    places = [order.index(one.state) for one in seen]
    assert places == sorted(places)
    done = [one.tokens_done for one in seen]
    assert done == sorted(done)
    assert len(set(done)) > 3
    assert seen[-1].state == "ready"
    assert all(one.tokens_done <= one.tokens_total for one in seen)


def test_the_corpus_changes_under_four_who_ask(rag: Rag, make: Callable[..., Documents]) -> None:
    """Every answer is what full prefill gives, from chunks that are or were in the corpus as a whole."""
    documents, done = make(), threading.Event()
    documents.add([page("harbour"), page("mill")])
    assert documents.wait(LAST_S)
    rag.warm_up(compare=True)
    removed = threading.Event()

    def ask(number: int) -> int:
        asked = 0
        while not done.is_set():
            late = removed.is_set()
            answer = rag.answer(
                f"Which bell hangs in mill number {number + asked % 3}?", compare=True, max_new_tokens=3
            )
            assert answer.full is not None
            assert answer.text == answer.full.text
            assert not answer.problems
            sources = {hit.chunk.document_id for hit in answer.chunks}
            assert sources <= {"harbour.md", "mill.md", "quarry.md", "orchard"}
            assert not (late and "harbour.md" in sources)
            asked += 1
        return asked

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            documents.add([page("quarry", 12)], [GivenDocument(words("orchard"), "Orchard", "orchard")])
            documents.add([page("mill", 14)])
            assert documents.wait(LAST_S)
            assert documents.delete("harbour.md")
            removed.set()
            documents.add([page("quarry", 4)])
            assert documents.wait(LAST_S)
        finally:
            done.set()
        assert all(one.result() for one in asking)
    assert _ids(rag) == {"mill.md", "quarry.md", "orchard"}
    answer = rag.answer("quarry", top_k=40, max_new_tokens=1)
    assert all(answer.blend.hits)
    assert sum("number 4" in hit.chunk.text for hit in answer.chunks if hit.chunk.document_id == "quarry.md") == 0


def test_what_goes_takes_its_caches_along_but_not_those_of_other_corpora(
    rag: Rag, model: Path, make: Callable[..., Documents]
) -> None:
    documents = make()
    other = make(rag=room(rag.root, model, corpus="other"))
    documents.add([page("harbour", 4), page("mill", 4)])
    other.add([page("mill", 4)])
    assert documents.wait(LAST_S)
    assert other.wait(LAST_S)
    before = _caches(rag)
    assert documents.delete("harbour.md")
    assert not documents.delete("harbour.md")
    assert documents.get("harbour.md") is None
    between = _caches(rag)
    assert between < before
    assert documents.delete("mill.md")
    assert (documents.listing(), _caches(rag)) == ((), between)
    assert other.delete("mill.md")
    assert _caches(rag) == 0
    assert _left(rag) == []


def test_a_document_that_goes_while_it_is_computed_leaves_nothing(rag: Rag, make: Callable[..., Documents]) -> None:
    engine = Engine()
    documents = make(compute=engine)
    documents.add([page("harbour", 6)])
    until(lambda: bool(engine.handed))
    assert documents.delete("harbour.md")
    assert engine.cancelled.is_set()
    engine.go.set()  # this one goes on all the same
    for thread in engine.threads:
        thread.join()
    until(lambda: _caches(rag) == 0 and not _left(rag))
    assert documents.listing() == ()


def test_a_new_version_takes_the_place_of_the_old(rag: Rag, make: Callable[..., Documents]) -> None:
    documents = make()
    documents.add([page("harbour", 12)])
    assert documents.wait(LAST_S)
    before = _caches(rag)
    documents.add([page("harbour", 4)])
    assert documents.wait(LAST_S)
    held = documents.get("harbour.md")
    assert held is not None
    assert held.chunks == len(rag.index.chunks) == _caches(rag) < before
    again = documents.add([page("harbour", 4)])
    assert again[0].state == "queued"
    assert documents.wait(LAST_S)
    assert _caches(rag) == held.chunks


def test_a_file_of_many_documents_is_asked_for_and_deleted_as_one(make: Callable[..., Documents]) -> None:
    documents = make()
    lines = '{"id": "a", "title": "A", "text": "The harbour."}\n{"id": "b", "text": "The mill."}\nnonsense\n'
    documents.add([UploadedFile("set.jsonl", lines.encode())])
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {"set.jsonl": "failed", "set.jsonl#a": "ready", "set.jsonl#b": "ready"}
    whole = documents.get("set.jsonl")
    assert whole is not None
    assert "1 left out" in whole.reason
    assert whole.chunks == 2
    assert documents.delete("set.jsonl#a")
    assert documents.delete("set.jsonl")
    assert documents.listing() == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../../etc/passwd.md", "etc/passwd.md"),
        ("..\\..\\boot\\..\\a.md", "boot/a.md"),
        ("C:\\temp\\b.txt", "temp/b.txt"),
        ("/abs//./c.md", "abs/c.md"),
        ("a\nb\x1b[31m\x00\u202e.md", "a b.md"),
        ("x#y.md", "x_y.md"),
        ("\udcff.md", "\N{REPLACEMENT CHARACTER}.md"),
    ],
)
def test_hostile_names(rag: Rag, make: Callable[..., Documents], name: str, expected: str) -> None:
    documents = make()
    around = {path for path in rag.root.parent.rglob("*") if rag.root not in path.parents}
    (given,) = documents.add([UploadedFile(name, b"# Harbour\n\nA bell.")])
    assert given.id == expected
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {expected: "ready"}
    for one in (name, expected):
        held = documents.get(one)
        assert held is not None
        assert held.id == expected
    assert documents.delete(name)
    assert {path for path in rag.root.parent.rglob("*") if rag.root not in path.parents} <= around | {rag.root}


def test_ten_megabytes_of_name() -> None:
    long = [safe_id("a" * 10_000_000 + end) for end in ("1.md", "2.md")]
    assert len(set(long)) == 2
    assert all(len(one) <= 200 and one.endswith(".md") for one in long)


@pytest.mark.parametrize("name", ["", "..", "../..", "a", "a.exe", "a.md/..\x00"])
def test_what_is_no_document_is_refused_at_once(rag: Rag, make: Callable[..., Documents], name: str) -> None:
    documents = make()
    if name.startswith("a.md"):
        assert documents.add([UploadedFile(name, b"text")])[0].id == "a.md"
        return
    with pytest.raises(DocumentsError, match="kinds that can be read"):
        documents.add([page("harbour"), UploadedFile(name, b"text")])
    assert documents.listing() == ()
    assert _left(rag) == []


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (UploadedFile("broken.pdf", b"%PDF-1.4\n\x00\xff nothing"), "is not a PDF"),
        (UploadedFile("empty.md", b"  \n"), "is empty"),
        (UploadedFile("lines.jsonl", b"nonsense\n"), "lines.jsonl"),
        (UploadedFile("bytes.txt", bytes(range(128, 256)) * 40), ""),
    ],
)
def test_a_damaged_file_fails_with_a_reason_and_harms_no_other(
    rag: Rag, make: Callable[..., Documents], file: UploadedFile, reason: str
) -> None:
    documents = make()
    documents.add([file, page("harbour")])
    assert documents.wait(LAST_S)
    held = documents.get(file.name)
    assert held is not None
    if reason:
        assert held.state == "failed"
        assert reason in held.reason
        assert "\n" not in held.reason
    assert states(documents.listing())["harbour.md"] == "ready"
    assert documents.delete(file.name)
    assert states(documents.listing()) == {"harbour.md": "ready"}
    assert _left(rag) == []


def test_a_failed_new_version_leaves_the_old_one(rag: Rag, make: Callable[..., Documents]) -> None:
    documents = make()
    documents.add([UploadedFile("a.jsonl", b'{"id": "x", "text": "The harbour."}')])
    assert documents.wait(LAST_S)
    documents.add([UploadedFile("a.jsonl", b"nonsense")])
    assert documents.wait(LAST_S)
    assert _ids(rag) == {"a.jsonl#x"}
    documents.add([UploadedFile("a.jsonl", b'{"id": "x", "text": "The mill."}')])
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {"a.jsonl#x": "ready"}


def test_limits_have_one_clear_line_each(make: Callable[..., Documents]) -> None:
    engine = Engine()
    documents = make(compute=engine, limits=DocumentLimits(file_bytes=500, request=2, documents=3, waiting_bytes=900))
    with pytest.raises(ConfigError, match="at most 500"):
        documents.add([UploadedFile("a.md", b"x" * 501)])
    with pytest.raises(ConfigError, match="3 documents in one request: give 1 to 2"):
        documents.add([page(topic, 1) for topic in ("a", "b", "c")])
    with pytest.raises(ConfigError, match="0 documents"):
        documents.add()
    with pytest.raises(ConfigError, match="document 2 has no text"):
        documents.add(texts=[GivenDocument("text"), GivenDocument("\ud800 \0".strip("\ud800 "), "title")])
    with pytest.raises(UploadsFullError, match="wait to be read") as caught:
        documents.add([UploadedFile("a.md", b"x" * 480), UploadedFile("b.md", b"x" * 480)])
    assert caught.value.retry_after_s > 0
    documents.add([page("a", 1), page("b", 1)])
    with pytest.raises(ConfigError, match="at most 3"):
        documents.add([page("c", 1), page("d", 1)])
    engine.go.set()
    assert documents.wait(LAST_S)
    many = b'{"text": "One harbour."}\n{"text": "Two mills."}\n'
    documents.add([UploadedFile("many.jsonl", many)])
    assert documents.wait(LAST_S)
    held = documents.get("many.jsonl")
    assert held is not None
    assert (held.state, "at most 3" in held.reason) == ("failed", True)


def test_texts_get_ids_of_what_they_say(make: Callable[..., Documents]) -> None:
    documents = make()
    given = [
        GivenDocument("The harbour.", "H"),
        GivenDocument("The mill.\ud800", "H"),
        GivenDocument("The harbour.", "H"),
    ]
    one, other, same = documents.add(texts=given)
    assert one.id == same.id != other.id
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {one.id: "ready", other.id: "ready"}


def test_two_rooms_do_not_see_each_other(tmp_path: Path, model: Path, make: Callable[..., Documents]) -> None:
    rags = [room(tmp_path / "store" / "tenants" / name, model) for name in ("one", "two")]
    one, two = (make(rag=rag) for rag in rags)
    one.add([page("harbour")])
    two.add([page("mill")])
    assert one.wait(LAST_S)
    assert two.wait(LAST_S)
    assert states(one.listing()) == {"harbour.md": "ready"}
    assert states(two.listing()) == {"mill.md": "ready"}
    assert two.get("harbour.md") is None
    assert not two.delete("harbour.md")
    assert _ids(rags[0]) == {"harbour.md"}
    before = _caches(rags[1])
    assert one.delete("harbour.md")
    assert _caches(rags[1]) == before > _caches(rags[0]) == 0


def test_a_cache_that_cannot_be_stored_fails_its_document_alone(
    rag: Rag, make: Callable[..., Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make()
    documents.add([page("harbour", 4)])
    assert documents.wait(LAST_S)
    put = type(rag.store).put

    def down(*arguments: object) -> None:
        raise StoreError("the store is down")

    monkeypatch.setattr(type(rag.store), "put", down)
    documents.add([page("mill", 4)])
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == {"harbour.md": "ready", "mill.md": "failed"}
    held = documents.get("mill.md")
    assert held is not None
    assert held.reason == "the store is down"
    assert "mill.md" in _ids(rag)  # it can be asked for all the same
    monkeypatch.setattr(type(rag.store), "put", put)
    documents.add([page("quarry", 4)])
    assert documents.wait(LAST_S)
    assert set(states(documents.listing()).values()) == {"ready"}


def test_corrections_are_measured_when_everything_is_computed(make: Callable[..., Documents]) -> None:
    measured: list[tuple[int, bool]] = []

    def calibrate(chunks: Sequence[tuple[int, ...]], anew: bool, give_up: Callable[[], bool]) -> bool:
        measured.append((len(chunks), anew))
        return True

    documents = make(calibrate=calibrate)
    documents.add([page("harbour")])
    assert documents.wait(LAST_S)
    documents.add([UploadedFile("mill.md", b"One more.")])
    assert documents.wait(LAST_S)
    assert [anew for _, anew in measured][:2] == [True, False]
    assert measured[0][0] < measured[-1][0]


def test_a_measurement_that_waits_gives_way_to_documents_and_comes_again(make: Callable[..., Documents]) -> None:
    """It waits until nobody asks, and on a busy server that is never."""
    measured: list[tuple[int, bool]] = []
    busy = threading.Event()
    busy.set()

    def calibrate(chunks: Sequence[tuple[int, ...]], anew: bool, give_up: Callable[[], bool]) -> bool:
        measured.append((len(chunks), anew))
        while busy.is_set():
            if give_up():
                return False
            time.sleep(0.01)
        return True

    documents = make(calibrate=calibrate)
    documents.add([page("harbour"), page("mill", 4)])
    until(lambda: bool(measured))
    assert documents.delete("mill.md", wait_s=LAST_S)
    assert set(states(documents.listing())) == {"harbour.md"}
    until(lambda: len(measured) > 1)
    busy.clear()
    assert documents.wait(LAST_S)
    assert [anew for _, anew in measured] == [True, True]
    assert measured[0][0] > measured[1][0]


def test_a_removed_document_answers_nothing_though_the_index_still_has_it(
    rag: Rag, make: Callable[..., Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, room, apply, go_on = make(), Room(rag, 0), CorpusKeeper.apply, threading.Event()
    room.hide("", lambda: documents.leaving)
    documents.add([page("harbour"), page("mill", 4)])
    assert documents.wait(LAST_S)
    question, pasted = "Which mill opened in 1801?", words("mill", 4)

    def sources() -> set[str]:
        retrieved, (_, found) = room.retrieved("", question, 3), room.written("", pasted)
        return {one.title for one in (*retrieved, *found)}

    assert "The mill" in sources()

    def later(*given: Any) -> Any:
        assert go_on.wait(LAST_S)
        return apply(*given)

    monkeypatch.setattr(CorpusKeeper, "apply", later)
    assert documents.delete("mill.md", wait_s=0.05)
    assert "mill.md" in {chunk.document_id for chunk in rag.index.chunks}
    assert sources() == {"The harbour"}
    assert len(room.retrieved("", question, 3)) == 3
    with pytest.raises(PromptError, match="no document has the id"):
        room.given("", [GivenDocument(id="mill.md")])
    go_on.set()
    assert documents.wait(LAST_S)
    assert sources() == {"The harbour"}


def test_what_another_process_precomputed_is_taken_up(rag: Rag, tmp_path: Path, make: Callable[..., Documents]) -> None:
    documents = make()
    documents.add([page("harbour", 4)])
    assert documents.wait(LAST_S)
    (tmp_path / "mill.md").write_text(words("mill", 4))
    rag.precompute([tmp_path / "mill.md"], quick=True)
    assert set(states(documents.listing())) == {"mill.md"}
    until(lambda: states(documents.listing()) == {"mill.md": "ready"})
    documents.add([page("harbour", 4)])
    assert documents.wait(LAST_S)
    assert _ids(rag) == {"mill.md", "harbour.md"}


_PROGRAM = """
import sys, time
from pathlib import Path
from changing import room, page
from blend.serve.caching import compute_here
from blend.serve.documents import Documents

count = 0

def slowly(library, wanted, on_done):
    global count
    for one in wanted:
        compute_here(library, [one], on_done)
        count += 1
        time.sleep(0.05)
    return compute_here(library, [], on_done)

documents = Documents(room(Path(sys.argv[1]), Path(sys.argv[2])), slowly)
documents.add([page(topic, 24) for topic in ("harbour", "mill")])
while count < 5:
    time.sleep(0.01)
documents.add([page("quarry", 24)])
print("taken", flush=True)
documents.wait(120)
"""


def test_a_killed_process_goes_on_where_it_was(rag: Rag, model: Path, make: Callable[..., Documents]) -> None:
    """Two documents are in the index and some of their caches are there, a third one waits."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}:{root / 'tests' / 'serve'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, str(rag.root), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert _ids(rag) == {"harbour.md", "mill.md"}
    stored, engine = _caches(rag), Engine()
    assert stored >= 5
    engine.go.set()
    documents = make(compute=engine)
    assert documents.wait(LAST_S)
    assert states(documents.listing()) == dict.fromkeys(("harbour.md", "mill.md", "quarry.md"), "ready")
    handed = sum(map(len, engine.handed))
    assert handed == _caches(rag) - stored > 0  # those that were there are not computed again
    assert _left(rag) == []


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
    assert (_left(rag), seen) == ([], {0o700})


def test_caches_of_what_went_go_even_if_the_process_ends_before(
    rag: Rag, make: Callable[..., Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make()
    documents.add([page("harbour", 4), page("mill", 4)])
    assert documents.wait(LAST_S)
    before = _caches(rag)

    def down(*arguments: object) -> None:
        raise StoreError("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(rag.store), "delete", down)
        assert documents.delete("harbour.md")
        assert (_ids(rag), documents.problem) == ({"mill.md"}, "the store is down")
        documents.close()
    assert _caches(rag) == before
    assert make().wait(LAST_S)
    assert _caches(rag) == before // 2
    assert _left(rag) == []


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
    assert _left(rag) == []


def test_a_closed_room_has_no_thread_left(make: Callable[..., Documents]) -> None:
    before = set(threading.enumerate())
    documents = make()
    documents.add([page("harbour", 60)])
    documents.close()
    assert set(threading.enumerate()) <= before
    again = make()
    assert again.wait(LAST_S)
    assert states(again.listing()) == {"harbour.md": "ready"}
