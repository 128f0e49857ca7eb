"""The same answer as `blend answer`, whichever way the context came."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from rooms import FEW, QUESTION, ask, put, settled

from blend.model.generate import generate
from blend.prompt import TextChunk, render_chunk
from blend.rag import Rag
from blend.serve.request import GivenDocument, Message, Request
from blend.serve.service import Service


class Paragraph(NamedTuple):
    """A chunk without a title, as what is learned is kept."""

    text: str
    title: str = ""


PARAGRAPHS = [
    Paragraph(
        f"The archive of {name} keeps {n} maps of the old canals, drawn by hand and coloured with care by the clerks of the "
        f"water board, who counted {n * 3} locks and {n * 7} bridges before the flood of 18{n} took them away."
    )
    for n, name in enumerate(("Alma", "Berg", "Cork", "Dorn"), 40)
]


class Way(NamedTuple):
    """kind: of its sources. chunks: that the answer is to be given from."""

    kind: str
    request: Request
    chunks: Sequence[TextChunk]


def ways(rag: Rag, question: str) -> dict[str, Way]:
    """A question with its context in every way in which that can come."""
    found = [hit.chunk for hit in rag.retriever.search(question, 3)]
    named = [chunk for chunk in rag.index.chunks if chunk.document_id == "market.md"]
    asked = (Message("system", rag.prompt_config.system), Message("user", question))
    given = tuple(GivenDocument(chunk.text, chunk.title) for chunk in found)
    return {
        "retrieved": Way("retrieved", Request(asked, top_k=3, sampling=FEW), found),
        "documents": Way("document", Request(asked, documents=given, sampling=FEW), found),
        "ids": Way("document", Request(asked, documents=(GivenDocument(id="market.md"),), sampling=FEW), named),
        "pasted": Way("pasted", Request(_pasted(rag, question, found), sampling=FEW), found),
        "learned": Way("learned", Request(_pasted(rag, question, PARAGRAPHS), sampling=FEW), PARAGRAPHS),
    }


def _pasted(rag: Rag, question: str, chunks: Sequence[TextChunk]) -> tuple[Message, ...]:
    """As somebody pastes them who puts a question as `blend answer` does."""
    config = rag.prompt_config
    text = config.instruction + "".join(map(render_chunk, chunks)) + config.question.replace("{question}", question)
    return Message("system", config.system), Message("user", text)


def answer(rag: Rag, question: str, chunks: Sequence[TextChunk]) -> str:
    """What `blend answer` does with what it has retrieved."""
    layout = rag.template.layout(question, chunks)
    blend = rag.blender.prefill(layout)
    assert all(blend.hits)
    return generate(rag.decoder, blend, layout.token_ids, max_new_tokens=FEW.max_tokens).text


@pytest.fixture
def learned(service: Service) -> Service:
    """One that has heard of the paragraphs, in other orders and with another question."""
    texts = [one.text for one in PARAGRAPHS]
    first = ask(service, "\n\n".join([*reversed(texts), "Which archive has most maps?"]))
    assert {(source.kind, source.hit) for source in first.sources} == {("learned", False)}
    settled(service)
    ask(service, "\n\n".join([*texts[1:], texts[0], "Which archive has most maps?"]))
    settled(service)
    rag = service.tenant("").rag()
    library = rag.blender.library(
        rag.template.prefix
    )  # learning chose a surrogate context, so the corpus lacks caches now
    library.compute(library.missing([rag.template.chunk_ids(chunk) for chunk in rag.index.chunks]))
    return service


def test_the_same_question_in_every_way_is_the_same_answer(learned: Service) -> None:
    rag = learned.tenant("").rag()
    expected = rag.answer(QUESTION, top_k=3, max_new_tokens=FEW.max_tokens)
    for name, way in ways(rag, QUESTION).items():
        told = put(learned, way.request)
        sources, figures = told.sources, told.figures
        assert {(source.kind, source.hit) for source in sources} == {(way.kind, True)}, name
        assert figures.method == "blend", figures.reason
        assert figures.rows_computed < figures.rows
        assert figures.rows == rag.template.layout(QUESTION, way.chunks).rows
        if name == "learned":
            tokens = sum(len(rag.template.chunk_ids(one)) for one in PARAGRAPHS)
            assert sum(source.tokens for source in sources) > 0.9 * tokens
            continue
        assert [source.text.strip() for source in sources] == [one.text.strip() for one in way.chunks], name
        assert told.text.strip() == answer(rag, QUESTION, way.chunks), name
        if name in ("retrieved", "documents", "pasted"):
            assert told.text.strip() == expected.text
            assert [hit.chunk for hit in expected.chunks] == way.chunks
            assert figures.rows_computed == expected.blend.rows_recomputed
        if name in ("retrieved", "pasted"):
            assert [source.id for source in sources] == [hit.chunk.id for hit in expected.chunks]
