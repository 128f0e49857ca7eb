"""Several corpora of one tenant, and retrieval for follow-up questions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rooms import QUESTION, Answer, ask, serving, settled

from blend.chunks.library import ChunkLibrary
from blend.prompt import render_chunk
from blend.rag import NONE_RETRIEVED, Rag
from blend.serve.service import Service
from blend.serve.types import GivenDocument
from blend_retrieval import Chunk


def observatory(number: int) -> GivenDocument:
    said = [
        f"The observatory of Kell number {number} has {7 * number + n} domes and keeper {n} counts." for n in range(9)
    ]
    return GivenDocument(" ".join(said), f"Observatory {number}", f"kell{number}")


def tower(number: int) -> GivenDocument:
    said = [f"The tower of Umm number {number} has {9 * number + n} bells and mason {n} lays bricks." for n in range(9)]
    return GivenDocument(" ".join(said), f"Tower {number}", f"umm{number}")


@pytest.fixture
def service(filled: tuple[Path, Path], tmp_path: Path) -> Iterator[Service]:
    """With documents in the corpus without a name, and others in one that is called kell."""
    with serving(tmp_path / "store", filled[1]) as made:
        for name, make in (("", tower), ("kell", observatory)):
            documents = made.documents("", name)
            documents.add(texts=[make(n) for n in range(5)])
            assert documents.wait(60)
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
    assert service.documents("", "kell").delete("kell3")
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
    ask(service, "How many domes?", documents=brought)
    settled(service)
    chunks = of(kell, "kell4")
    assert held(unnamed, chunks) > len(chunks), "contextual ones too"
    assert service.documents("", "kell").delete("kell4")
    assert service.documents("", "kell").wait(60)
    assert (held(kell, chunks), held(unnamed, chunks)) == (0, 0)


def documents(told: Answer) -> list[str]:
    return [source.document for source in told.sources]


def test_a_follow_up_is_answered_from_what_the_conversation_is_about(service: Service) -> None:
    first = ask(service, QUESTION, top_k=2)
    assert "harbour.md" in documents(first)
    follow_up = "And how heavy is the bell?"
    assert "harbour.md" in documents(ask(service, QUESTION, "Two.", follow_up, top_k=2))


def test_a_new_topic_is_answered_from_its_own_passages(service: Service) -> None:
    asked = "How many visitors a day does the library count?"
    alone = documents(ask(service, asked, top_k=1))
    assert documents(ask(service, QUESTION, "Two.", asked, top_k=1)) == alone == ["library.md"]


@pytest.mark.parametrize(("min_score", "left"), [(0.0, 4), (0.999, 0)])
def test_passages_below_the_least_score_are_left_out(
    filled: tuple[Path, Path], tmp_path: Path, min_score: float, left: int
) -> None:
    with serving(shutil.copytree(filled[0], tmp_path / "store"), filled[1], min_score=min_score) as service:
        opened = ask(service, QUESTION, top_k=4)
    assert len(opened.sources) == left
    assert (NONE_RETRIEVED in opened.figures.notes) == (left == 0)
