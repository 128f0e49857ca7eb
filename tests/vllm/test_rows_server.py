"""vLLM's own server whose model recomputes the rows: no other process; documents, a corpus and pasted text as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from machines import TOKENS, Machines, body, until, whole

from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.prompts import BOOK
from blend.serve.prompts.learned import LearnedTexts
from tests.tiny_model import save_tiny_model

if TYPE_CHECKING:
    from blend.integrations.vllm.prompts import Prompt
    from blend.types import PromptLayout

pytestmark = pytest.mark.inside_vllm
DOCUMENTS = [
    {
        "title": f"The {topic}",
        "text": " ".join(f"Gate {gate} of the {topic} opened in {1800 + 7 * gate + number}." for gate in range(9)),
    }
    for number, topic in enumerate(("harbour", "orchard", "glacier", "library"))
]
QUESTIONS = ("When did gate 3 of the orchard open?", "Which gate of the glacier is the oldest?")
SETTINGS: dict[str, Any] = {"ratio": 0.15}
CORPORA = {"": ("Aarhus", "Bergen", "Cadiz", "Delft"), "north": ("Oulu", "Umea", "Narvik", "Hamina")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("rows-server")
    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2, "tie_word_embeddings": False}
    model = save_tiny_model(folder / "tiny", "\n".join(one["text"] for one in DOCUMENTS), **shape)
    for name, towns in CORPORA.items():
        precompute(folder, model, name, towns)
    found = Machines(folder, folder / "store", model)
    try:
        found.start_server(SETTINGS)
        yield found
    finally:
        found.end()


def precompute(folder: Path, model: Path, name: str, towns: tuple[str, ...]) -> None:
    """A corpus of one document for each town, by kvblend's own decoder."""
    from blend.config import CorpusConfig
    from blend.rag import Rag

    texts = folder / f"texts{name}"
    texts.mkdir()
    for town in towns:
        (texts / f"{town}.txt").write_text(f"{town} has {len(town)} bridges and a mayor who rows. " * 6)
    config = CorpusConfig(name=name, codec="native", surrogate_tokens=64)
    Rag(folder / "store", model=str(model), device="cpu", dtype="float32", corpus=config).precompute(texts)


def ticket_of(prompt: Prompt) -> LayoutTicket:
    return LayoutTicket.read(prompt.ready["ticket"], prompt.ids)


class Own:
    """What kvblend's decoder answers, over caches that it is given by the server's store."""

    def __init__(self, server: Machines) -> None:
        from blend.config import BlendConfig
        from blend.integrations.vllm.prompts import LocalPrompts
        from blend.model.decoder import Decoder
        from blend.prefill.blender import Blender
        from blend.store import open_store

        self.decoder = Decoder.load(str(server.model), device="cpu", dtype="float32")
        store = open_store(str(server.store / "kv"))
        self.blenders = {name: Blender(self.decoder, store, BlendConfig(**SETTINGS), corpus=name) for name in CORPORA}
        self.blender = self.blenders[""]
        self.prompts = LocalPrompts(self.decoder.tokenizer, {"store": str(server.store)})

    def prompt(self, question: str, **more: Any) -> Prompt:
        from blend.integrations.vllm.prompts import part_of

        found = self.prompts.prompt(part_of(body(question, **more)))
        assert found is not None
        return found

    def layout(self, question: str) -> PromptLayout:
        return ticket_of(self.prompt(question, documents=DOCUMENTS)).layout

    def missing(self, layout: PromptLayout) -> int:
        chunks = [place.whole for place in layout.places if place.stored is not None or place.is_brought]
        return len(self.blender.library(layout.kept_behind).missing(chunks))

    def answer(self, layout: PromptLayout, corpus: str = "", **config: Any) -> str:
        from blend.config import BlendConfig
        from blend.model.generate import generate

        blend = self.blenders[corpus].prefill(layout, config=BlendConfig(**{**SETTINGS, **config}))
        return whole(generate(self.decoder, blend, layout.token_ids, max_new_tokens=TOKENS, eos_token_id=None).text)


def test_documents_are_blended_by_vllms_own_model(server: Machines) -> None:
    own = Own(server)
    first = own.layout(QUESTIONS[0])
    assert own.missing(first) >= len(DOCUMENTS)
    full = own.answer(first)  # none of it is stored yet
    text, shown = server.ask(QUESTIONS[0], documents=DOCUMENTS)
    assert (text, shown["figures"]["reason"]) == (full, "cold")

    until(lambda: own.missing(first) == 0)  # the idle engine stores what the prompt brought
    second = own.layout(QUESTIONS[1])
    assert len(LearnedTexts(server.store / BOOK).index()) >= len(DOCUMENTS)
    blended = own.answer(second)
    assert own.blender.prefill(second).rows_share < 0.6
    before = server.metrics()
    text, shown = server.ask(QUESTIONS[1], documents=DOCUMENTS)
    assert text == blended
    check_counts(server, before, shown["figures"])
    # vLLM's prefix cache has the blended first blocks: rows are scored over them, so others may be chosen behind them.
    again = [server.ask(QUESTIONS[1], documents=DOCUMENTS) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0][1]["figures"]["method"] == "rows"


def test_pasted_text_is_found_again_at_any_offset(server: Machines) -> None:
    passages = [f"The lighthouse of bay {number} has {number + 3} lamps and a keeper. " * 8 for number in range(4)]
    first, second = (f"{by.join(some)}\n\nHow many lamps?" for by, some in (("\n\n", passages), (" ", passages[::-1])))
    own, known = Own(server), LearnedTexts(server.store / BOOK)
    before = len(known.index())
    assert server.ask(first)[1]["figures"]["method"] in ("full", "rows")
    until(lambda: len(known.index()) > before)
    until(lambda: own.missing(ticket_of(own.prompt(first)).layout) == 0)
    sources, figures = (server.ask(second)[1][name] for name in ("sources", "figures"))
    assert figures["method"] == "rows"
    assert figures["rows_computed"] < 0.6 * figures["rows"]
    assert {source["kind"] for source in sources} == {"learned"}


def check_counts(server: Machines, before: dict[str, float], figures: dict[str, Any]) -> None:
    """A blended prompt, in its reply and on vLLM's own page of metrics."""
    assert figures["method"] == "rows"
    assert 0 < figures["rows_computed"] < 0.6 * figures["rows"]
    after = until(lambda: found if (found := grown(server, before))["prompts_blended"] >= 1 else None)
    assert after["fallbacks_failed"] == after["fallbacks_refused"] == after["fallbacks_cold"] == 0
    assert after["prompts_uncorrected"] == 0  # the corpus's corrections are theirs too
    assert after["rows_recomputed"] >= figures["rows_computed"]
    assert after["rows_prompt"] >= figures["rows"]
    assert before["vllm:kvblend_fallbacks_cold_total"] >= 1


def grown(server: Machines, before: dict[str, float]) -> dict[str, float]:
    """What kvblend's counters have gained."""
    mark = "vllm:kvblend_"
    return {
        name.removeprefix(mark).removesuffix("_total"): count - before[name]
        for name, count in server.metrics().items()
        if name.startswith(mark)
    }


def test_plain_requests_are_vllms_own(server: Machines) -> None:
    """Also with the very token ids of a blended prompt: its blocks are under a salt."""
    layout = Own(server).layout(QUESTIONS[1])
    plain = {"model": "tiny", "prompt": list(layout.token_ids), "temperature": 0, "max_tokens": TOKENS}

    def answer() -> str:
        return str(server.post(plain, "/v1/completions").json()["choices"][0]["text"])

    before = answer()
    server.ask(QUESTIONS[1], documents=DOCUMENTS)
    assert answer() == before


@pytest.mark.parametrize(
    ("model", "more", "corpus"),
    [("tiny", {"kvblend": {"retrieve": {"top_k": 3}}}, ""), ("tiny+corpus:north", {}, "north")],
)
def test_a_corpus_is_searched_and_blended(server: Machines, model: str, more: dict[str, Any], corpus: str) -> None:
    own, question = Own(server), "How many bridges has Umea?"
    found = own.prompt(question, **{"model": model, **more})
    assert ticket_of(found).corpus == corpus
    layout = ticket_of(found).layout
    assert own.blenders[corpus].prefill(layout).rows_share < 0.6
    text, shown = server.ask(question, **{"model": model, **more})
    assert text == own.answer(layout, corpus)
    assert [one["id"] for one in shown["sources"]] == [one["id"] for one in found.shown["sources"]]
    assert {one["kind"] for one in shown["sources"]} == {"retrieved"}


def test_pasted_text_is_found_and_blended(server: Machines) -> None:
    own, town = Own(server), CORPORA[""][1]
    text = "\n\n".join(f"{town} has {len(town)} bridges and a mayor who rows. " * 6 for town in CORPORA[""])
    question = f"{text}\n\nWho is the mayor of {town}?"
    found = own.prompt(question)
    assert {one["kind"] for one in found.shown["sources"]} == {"pasted"}
    answer, shown = server.ask(question)
    assert (answer, shown["figures"]["method"]) == (own.answer(ticket_of(found).layout), "rows")
    full, shown = server.ask(question, kvblend={"method": "full"})
    assert (full, shown["figures"]) == (
        own.answer(ticket_of(found).layout, ratio=1.0),
        {"method": "full", "reason": ""},
    )
