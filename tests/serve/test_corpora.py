"""Several corpora of one tenant."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from changing import add, delete
from rooms import ask, serving, settled

from blend.chunks.library import ChunkLibrary
from blend.prompt import render_chunk
from blend.rag import Rag
from blend.serve.request import GivenDocument
from blend.serve.service import Service
from blend_retrieval import Chunk


def observatory(number: int) -> GivenDocument:
    said = [
        f"The observatory of Kell number {number} has {7 * number + n} domes and keeper {n} counts." for n in range(9)
    ]
    return GivenDocument(" ".join(said), f"Observatory {number}", f"kell{number}")


def tower(number: int) -> GivenDocument:
    said = [f"The tower of Umm number {number} has {9 * number + n} bells and mason {n} lays bricks." for n in range(9)]
    return GivenDocument(" ".join(said), f"Tower {number}", f"umm{number}")


@pytest.fixture(scope="module")
def service(filled: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With documents in the corpus without a name, and others in one that is called kell; each test changes its own."""
    with serving(tmp_path_factory.mktemp("corpora") / "store", filled[1]) as made:
        for name, make in (("", tower), ("kell", observatory)):
            add(made.documents("", name), texts=[make(n) for n in range(5)])
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


def test_a_chunk_pasted_without_its_corpus_is_blended_with_that_corpus(service: Service) -> None:
    kell, unnamed = service.tenant("").rag("kell"), service.tenant("").rag()
    chunks = of(kell, "kell3")
    before = held(unnamed, chunks)
    told = ask(service, pasted(*chunks))
    assert {source.id for source in told.sources if source.kind == "pasted"} == {chunk.id for chunk in chunks}
    assert all(source.hit for source in told.sources)
    assert told.figures.missing == 0
    settled(service)
    assert held(unnamed, chunks) == before
    assert delete(service.documents("", "kell"), "kell3")
    assert service.documents("", "kell").wait(60)
    assert (held(kell, chunks), held(unnamed, chunks)) == (0, 0)


def test_a_prompt_has_the_corpus_of_which_it_holds_most(service: Service) -> None:
    """What it holds of the others is ordinary text, and is not learned either."""
    kell, unnamed = service.tenant("").rag("kell"), service.tenant("").rag()
    mine, others = of(kell, "kell1") + of(kell, "kell2"), of(unnamed, "umm1")
    before = {one.id for one in mine}
    entries = unnamed.store.stats().entries
    for messages in ((pasted(*mine, *others),), (pasted(*others), "Many.", pasted(*mine))):
        told = ask(service, *messages)
        assert {(source.kind, source.id) for source in told.sources} == {("pasted", name) for name in before}
    settled(service)
    assert unnamed.store.stats().entries == entries
    told = ask(service, pasted(*others))
    assert [source.id for source in told.sources] == [chunk.id for chunk in others]


def test_what_a_question_brought_to_another_corpus_goes_with_the_document(service: Service) -> None:
    kell, unnamed = service.tenant("").rag("kell"), service.tenant("").rag()
    brought = (observatory(4)._replace(id=""),)
    chunks = of(kell, "kell4")
    before = held(unnamed, chunks)
    told = ask(service, "How many domes?", documents=brought)
    assert {(source.kind, source.hit) for source in told.sources} == {("document", True)}
    settled(service)
    assert held(unnamed, chunks) == before, "that corpus has its caches"
    assert delete(service.documents("", "kell"), "kell4")
    assert service.documents("", "kell").wait(60)
    assert (held(kell, chunks), held(unnamed, chunks)) == (0, 0)
