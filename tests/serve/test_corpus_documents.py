"""Documents are added, replaced and deleted while questions are asked, in several corpora: nothing is lost or left over."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from changing import (
    LAST_S,
    Engine,
    Make,
    add,
    caches,
    delete,
    held_back,
    ids,
    left,
    open_corpus,
    page,
    states,
    status_of,
    until,
    words,
)
from rooms import ask, serving, settled
from served import logged

from blend import Rag
from blend.chunks.library import ChunkLibrary
from blend.errors import PromptError, StoreError
from blend.prompt_template import render_chunk
from blend.serve.documents.documents import Documents
from blend.serve.documents.uploads import DocumentStatus, UploadedFile
from blend.serve.events import EngineFailedError
from blend.serve.failures import STORE_FAILS
from blend.serve.prompt import Cited
from blend.serve.prompts.build import build_prompt
from blend.serve.prompts.tenant import TenantState
from blend.serve.request import GivenDocument, Message, Request
from blend.serve.service import Service
from blend_retrieval import Chunk


def test_it_is_answerable_before_its_caches_are_there(rag: Rag, make: Make) -> None:
    engine = Engine()
    documents = make(compute=engine)
    documents.add([page("harbour")])
    until(lambda: states(documents) == {"harbour.md": "computing"})
    answer = rag.answer("Which bell?", max_new_tokens=2)
    assert {hit.chunk.document_id for hit in answer.chunks} == {"harbour.md"}
    assert not any(answer.blend.hits)
    documents.add([page("mill")])  # what comes meanwhile does not wait for the caches
    until(lambda: set(states(documents)) == {"harbour.md", "mill.md"} == ids(rag))
    engine.go.set()
    assert documents.wait(LAST_S)
    assert set(states(documents).values()) == {"ready"}


def test_progress_only_grows(documents: Documents) -> None:
    seen = list[DocumentStatus]()
    documents.add([page(topic, 10) for topic in ("harbour", "mill", "quarry")])
    ended = False
    while not ended:
        ended = documents.wait(0.001)
        seen.append(status_of(documents, "quarry.md"))  # at no moment is it lost from sight
    order = ("queued", "reading", "indexing", "computing", "ready")
    places, done = [order.index(one.state) for one in seen], [one.tokens_done for one in seen]
    assert (places, done) == (sorted(places), sorted(done))
    assert len(set(done)) > 3
    assert seen[-1].state == "ready"
    assert all(one.tokens_done <= one.tokens_total for one in seen)


def test_the_corpus_changes_under_four_who_ask(rag: Rag, documents: Documents) -> None:
    """Every answer is what full prefill gives, from chunks that are or were in the corpus as a whole."""
    done, removed = threading.Event(), threading.Event()
    add(documents, [page("harbour"), page("mill")])
    rag.warm_up(compare=True)

    def ask(number: int) -> int:
        asked = 0
        while not done.is_set():
            late = removed.is_set()
            question = f"Which bell hangs in mill number {number + asked % 3}?"
            answer = rag.answer(question, compare=True, max_new_tokens=3)
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
            documents.add([page("quarry", 6)], [GivenDocument(words("orchard", 4), "Orchard", "orchard")])
            add(documents, [page("mill", 10)])
            assert delete(documents, "harbour.md")
            removed.set()
            add(documents, [page("quarry", 4)])
        finally:
            done.set()
        assert all(one.result() for one in asking)
    assert ids(rag) == {"mill.md", "quarry.md", "orchard"}
    answer = rag.answer("quarry", top_k=40, max_new_tokens=1)
    assert all(answer.blend.hits)
    assert not any("number 4" in hit.chunk.text for hit in answer.chunks if hit.chunk.document_id == "quarry.md")


def test_what_goes_takes_its_caches_along_but_none_of_other_corpora(rag: Rag, small_model: Path, make: Make) -> None:
    documents, other = make(), make(rag=open_corpus(rag.root, small_model, corpus="other"))
    add(documents, [page("harbour", 4), page("mill", 4)])
    add(other, [page("mill", 4)])
    before = caches(rag)
    assert delete(documents, "harbour.md")
    assert not delete(documents, "harbour.md")
    assert documents.get("harbour.md") is None
    between = caches(rag)
    assert between < before
    assert delete(documents, "mill.md")
    assert (documents.listing(), caches(rag)) == ((), between)
    assert delete(other, "mill.md")
    assert caches(rag) == 0
    assert left(rag) == []


def test_a_document_that_goes_while_it_is_computed_leaves_nothing(rag: Rag, make: Make) -> None:
    engine = Engine()
    documents = make(compute=engine)
    documents.add([page("harbour", 6)])
    until(lambda: bool(engine.threads))
    assert delete(documents, "harbour.md")
    engine.go.set()
    for thread in engine.threads:
        thread.join()
    until(lambda: caches(rag) == 0 and not left(rag))
    assert documents.listing() == ()


def test_where_the_engine_has_failed_the_document_does_too(make: Make) -> None:
    documents = make(compute=Mock(side_effect=EngineFailedError()))
    add(documents, [page("harbour", 6)])
    assert states(documents) == {"harbour.md": "failed"}


def test_a_cache_that_cannot_be_stored_fails_its_document_alone(
    rag: Rag, documents: Documents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client is not told where the store lies; the log is, once for all of its caches."""
    add(documents, [page("harbour", 4)])
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(type(rag.store), "put", Mock(side_effect=StoreError("the store /secret/place is down")))
        add(documents, [page("mill", 4)])
    assert states(documents) == {"harbour.md": "ready", "mill.md": "failed"}
    assert status_of(documents, "mill.md").reason == STORE_FAILS
    told = [logged(record) for record in caplog.records if record.getMessage() == "documents_failed"]
    assert [(one["error"], one["why"]) for one in told] == [("StoreError", "the store /secret/place is down")]
    assert "mill.md" in ids(rag)  # it can be asked for all the same
    add(documents, [page("quarry", 4)])
    assert set(states(documents).values()) == {"ready"}


def test_corrections_are_measured_when_everything_is_computed(make: Make) -> None:
    """A measurement that waits until nobody asks gives way to documents, and comes again."""
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
    assert delete(documents, "mill.md")
    assert set(states(documents)) == {"harbour.md"}
    until(lambda: len(measured) > 1)
    busy.clear()
    assert documents.wait(LAST_S)
    assert [anew for _, anew in measured] == [True, True]
    assert measured[0][0] > measured[1][0]
    add(documents, [UploadedFile("mill.md", b"One more.")])
    assert measured[-1] == (measured[1][0] + 1, False)


def test_a_measurement_that_fails_holds_up_no_document_and_is_not_repeated_at_once(make: Make) -> None:
    calibrate = Mock(side_effect=StoreError("no room"))
    documents = make(calibrate=calibrate)
    documents.add([page("harbour", 2)])
    until(lambda: documents.problem == "no room")
    documents.add([page("mill", 2)])
    until(lambda: calibrate.call_count == 2)
    until(lambda: documents.problem == "no room")
    assert states(documents) == {"harbour.md": "ready", "mill.md": "ready"}
    first, second = (len(call.args[0]) for call in calibrate.call_args_list)
    assert first < second


def cited(room: TenantState, text: str, top_k: int | None = None) -> tuple[Cited, ...]:
    """The passages of a question's prompt."""
    return build_prompt(room, Request((Message("user", text),), top_k=top_k)).cited


def named(room: TenantState, document: str) -> tuple[Cited, ...]:
    """The passages of the prompt of a question that names a document."""
    question = Message("user", "What is it?")
    return build_prompt(room, Request((question,), documents=(GivenDocument(id=document),))).cited


def test_a_removed_document_in_the_index_answers_nothing(
    rag: Rag, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = TenantState(rag, 0)
    room.hide("", lambda: documents.leaving)
    add(documents, [page("harbour"), page("mill", 4)])
    question = "Which mill opened in 1801?"

    def sources() -> set[str]:
        return {passage.title for passage in (*cited(room, question, 3), *cited(room, words("mill", 4)))}

    assert "The mill" in sources()
    with held_back(monkeypatch):
        assert documents.delete("mill.md")
        assert "mill.md" in ids(rag)
        assert sources() == {"The harbour"}
        assert len(cited(room, question, 3)) == 3
        with pytest.raises(PromptError, match="no document of the corpus has the id"):
            named(room, "mill.md")
    assert documents.wait(LAST_S)
    assert sources() == {"The harbour"}
    assert delete(documents, "harbour.md")
    with pytest.raises(PromptError, match="no chunks"):
        cited(room, question, 3)


def test_what_another_process_precomputed_is_taken_up(rag: Rag, tmp_path: Path, documents: Documents) -> None:
    add(documents, [page("harbour", 4)])
    (tmp_path / "mill.md").write_text(words("mill", 4))
    rag.precompute([tmp_path / "mill.md"], quick=True)
    assert set(states(documents)) == {"mill.md"}
    until(lambda: states(documents) == {"mill.md": "ready"})
    add(documents, [page("harbour", 4)])
    assert ids(rag) == {"mill.md", "harbour.md"}


GUIDE, INSTALL = "https://example.com/guide", "https://example.com/guide#install"


def texts(*names: str) -> list[GivenDocument]:
    return [GivenDocument(words(f"harbour{n}", 2), f"Title {n}", name) for n, name in enumerate(names)]


def test_texts_with_fragments_in_their_ids_are_documents_and_no_records_of_a_file(documents: Documents) -> None:
    lines = b'{"id": "a", "text": "The harbour."}\n{"id": "c", "text": "The mill."}\nnonsense\n'
    add(documents, [UploadedFile("set.jsonl", lines)], texts(GUIDE, INSTALL, "set.jsonl#b"))
    assert status_of(documents, INSTALL).title == "Title 1"
    assert delete(documents, GUIDE)
    assert documents.get(GUIDE) is None
    whole = status_of(documents, "set.jsonl")
    assert (whole.chunks, "1 left out" in whole.reason) == (2, True)
    assert delete(documents, "set.jsonl#a")
    assert status_of(documents, "set.jsonl#c").state == "ready"
    assert delete(documents, "set.jsonl")
    assert [one.title for one in documents.listing()] == ["Title 1", "Title 2"]
    assert status_of(documents, "set.jsonl#b").id == "set.jsonl_b"


def test_a_question_names_a_document_as_it_was_called_or_as_it_is(rag: Rag, documents: Documents) -> None:
    room, names = TenantState(rag, 0), (GUIDE, INSTALL, "a//b", "two  blanks", "C:\\c.txt")
    lines = b'{"id": "a", "text": "The mill."}\n{"text": "The quarry."}'
    add(documents, [UploadedFile("set.jsonl", lines)], texts(*names))
    for number, name in enumerate(names):
        for spelling in (name, status_of(documents, name).id):
            assert {one.title for one in named(room, spelling)} == {f"Title {number}"}
    assert [passage.text for passage in named(room, "set.jsonl#a")] == ["The mill."]
    assert len(named(room, "set.jsonl")) == 2, "all records of the file"
    for name in ("set", "a", "https://example.com"):
        with pytest.raises(PromptError, match="no document of the corpus has the id"):
            named(room, name)


def about(kind: str, number: int) -> GivenDocument:
    said = [
        f"The {kind} of Kell number {number} has {7 * number + n} domes and keeper {n} counts bricks." for n in range(9)
    ]
    return GivenDocument(" ".join(said), f"{kind} {number}", f"{kind}{number}")


@pytest.fixture(scope="module")
def service(filled: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With documents in the corpus without a name, and others in one that is called kell; each test changes its own."""
    with serving(tmp_path_factory.mktemp("corpora") / "store", filled[1]) as made:
        for name, kind in (("", "tower"), ("kell", "observatory")):
            add(made.documents("", name), texts=[about(kind, n) for n in range(5)])
        surrogates = [library(made.tenant("").rag(name)).surrogate for name in ("", "kell")]
        assert all(surrogates)
        assert surrogates[0] != surrogates[1]
        yield made


def of(rag: Rag, document: str) -> list[Chunk]:
    return [chunk for chunk in rag.index.chunks if chunk.document_id == document]


def library(rag: Rag) -> ChunkLibrary:
    return rag.blender.library(rag.template.prefix)


def held(rag: Rag, chunks: Sequence[Chunk]) -> int:
    """How many caches the store has of these chunks in the corpus's name."""
    return len(rag.store.held(library(rag).keys([rag.template.chunk_ids(chunk) for chunk in chunks])))


def pasted(*chunks: Chunk) -> str:
    return "".join(["Read this.\n\n", *map(render_chunk, chunks), "How many domes are there?"])


@pytest.mark.parametrize("kind", ["pasted", "document"])
def test_text_of_a_corpus_is_blended_with_it_and_goes_with_its_document(service: Service, kind: str) -> None:
    """Where it is pasted, and where a question to another corpus brings it."""
    kell, unnamed = service.tenant("").rag("kell"), service.tenant("").rag()
    number = 3 if kind == "pasted" else 4
    chunks = of(kell, f"observatory{number}")
    before = held(unnamed, chunks)
    if kind == "pasted":
        told = ask(service, pasted(*chunks))
    else:
        told = ask(service, "How many domes?", documents=(about("observatory", number)._replace(id=""),))
    assert [(source.kind, source.hit) for source in told.sources] == [(kind, True)] * len(chunks)
    assert told.figures.missing == 0
    settled(service)
    assert held(unnamed, chunks) == before, "that corpus has its caches"
    assert delete(service.documents("", "kell"), f"observatory{number}")
    assert service.documents("", "kell").wait(60)
    assert (held(kell, chunks), held(unnamed, chunks)) == (0, 0)


def test_a_prompt_has_the_corpus_of_which_it_holds_most(service: Service) -> None:
    """What it holds of the others is ordinary text, and is not learned either."""
    kell, unnamed = service.tenant("").rag("kell"), service.tenant("").rag()
    mine, others = of(kell, "observatory1") + of(kell, "observatory2"), of(unnamed, "tower1")
    before = {one.id for one in mine}
    entries = unnamed.store.stats().entries
    for messages in ((pasted(*mine, *others),), (pasted(*others), "Many.", pasted(*mine))):
        told = ask(service, *messages)
        assert {(source.kind, source.id) for source in told.sources} == {("pasted", name) for name in before}
    settled(service)
    assert unnamed.store.stats().entries == entries
    told = ask(service, pasted(*others))
    assert [source.id for source in told.sources] == [chunk.id for chunk in others]
