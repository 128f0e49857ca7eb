"""vLLM's own server whose model recomputes the rows: no other process; documents, a corpus and pasted text as ever."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from machines import RATIO, SHAPE, TOKENS, Server, about, precompute, serving, until, whole

from blend.config import BlendConfig
from blend.integrations.vllm.contract import BOOK, Options
from blend.integrations.vllm.prompts import LocalPrompts
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.prefill.blender import Blender
from blend.serve.prompts.learned_list import LearnedTexts
from blend.store import open_store
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.inside_vllm
DOCUMENTS = [
    {
        "title": f"The {topic}",
        "text": " ".join(f"Gate {gate} of the {topic} opened in {1800 + 7 * gate + number}." for gate in range(9)),
    }
    for number, topic in enumerate(("harbour", "orchard", "glacier", "library"))
]
QUESTIONS = ("When did gate 3 of the orchard open?", "Which gate of the glacier is the oldest?")
CORPORA = {"": ("Aarhus", "Bergen", "Cadiz", "Delft"), "north": ("Oulu", "Umea", "Narvik", "Hamina")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("rows-server")
    model = save_tiny_model(folder / "tiny", "\n".join(one["text"] for one in DOCUMENTS), **SHAPE)
    for name, towns in CORPORA.items():
        precompute(folder / "store", model, folder / f"texts{name}", towns, name=name, surrogate_tokens=64)
    with serving(folder / "store", model, folder / "server.log") as server:
        yield server


class Own:
    """What kvblend's decoder answers, over caches that it is given by the server's store."""

    def __init__(self, server: Server) -> None:
        self.decoder = Decoder.load(str(server.model), device="cpu", dtype="float32")
        store = open_store(str(server.store / "kv"))
        config = BlendConfig(ratio=RATIO)
        self.blenders = {name: Blender(self.decoder, store, config, corpus=name) for name in CORPORA}
        transfer = SimpleNamespace(kv_connector_extra_config={"store": str(server.store)})
        options = Options.of(SimpleNamespace(kv_transfer_config=transfer))
        self.prompts = LocalPrompts(self.decoder.tokenizer, options, {})

    def prompt(self, question: str, **more: Any) -> Any:
        return self.prompts.prompt({"model": "tiny", "messages": [{"role": "user", "content": question}], **more})

    def layout(self, question: str, **more: Any) -> PromptLayout:
        return self.prompt(question, **more).ticket.layout

    def missing(self, layout: PromptLayout) -> int:
        chunks = [place.whole for place in layout.places if place.stored is not None or place.is_brought]
        return len(self.blenders[""].library(layout.kept_behind).missing(chunks))

    def answer(self, layout: PromptLayout, corpus: str = "", ratio: float = RATIO) -> str:
        blend = self.blenders[corpus].prefill(layout, config=BlendConfig(ratio=ratio))
        return whole(generate(self.decoder, blend, layout.token_ids, max_new_tokens=TOKENS, eos_token_id=None).text)


@pytest.fixture
def own(server: Server) -> Own:
    return Own(server)


def test_documents_are_blended_by_vllms_own_model(server: Server, own: Own) -> None:
    first = own.layout(QUESTIONS[0], documents=DOCUMENTS)
    assert own.missing(first) >= len(DOCUMENTS)
    full = own.answer(first)  # none of it is stored yet
    text, shown = server.ask(QUESTIONS[0], documents=DOCUMENTS)
    assert (text, shown["figures"]["reason"]) == (full, "cold")

    until(lambda: own.missing(first) == 0)  # the idle engine stores what the prompt brought
    second = own.layout(QUESTIONS[1], documents=DOCUMENTS)
    assert len(LearnedTexts(server.store / BOOK).index()) >= len(DOCUMENTS)
    assert own.blenders[""].prefill(second).rows_share < 0.6
    before = server.counts()
    text, shown = server.ask(QUESTIONS[1], documents=DOCUMENTS)
    assert text == own.answer(second)
    figures = shown["figures"]
    assert figures["method"] == "rows"
    assert 0 < figures["rows_computed"] < 0.6 * figures["rows"]
    # On vLLM's own page of metrics; no uncorrected prompt: the corpus's corrections are theirs too.
    until(lambda: server.counts()["prompts_blended"] > before["prompts_blended"])
    gained = {name: count - before[name] for name, count in server.counts().items() if count > before[name]}
    assert gained == {"prompts_blended": 1, "rows_recomputed": figures["rows_computed"], "rows_prompt": figures["rows"]}
    assert before["fallbacks_cold"] >= 1
    # vLLM's prefix cache has the blended first blocks: rows are scored over them, so others may be chosen behind them.
    again = [server.ask(QUESTIONS[1], documents=DOCUMENTS) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0][1]["figures"]["method"] == "rows"


def test_learned_text_is_found_again_at_any_offset(server: Server, own: Own) -> None:
    passages = [f"The lighthouse of bay {number} has {number + 3} lamps and a keeper. " * 8 for number in range(4)]
    first, second = (f"{by.join(some)}\n\nHow many lamps?" for by, some in (("\n\n", passages), (" ", passages[::-1])))
    known = LearnedTexts(server.store / BOOK)
    before = len(known.index())
    server.ask(first)
    until(lambda: len(known.index()) > before)
    until(lambda: own.missing(own.layout(first)) == 0)
    shown = server.ask(second)[1]
    assert shown["figures"]["method"] == "rows"
    assert shown["figures"]["rows_computed"] < 0.6 * shown["figures"]["rows"]
    assert {source["kind"] for source in shown["sources"]} == {"learned"}


UMEA = "How many bridges has Umea?"
PASTED = "\n\n".join(map(about, CORPORA[""])) + "\n\nWho is the mayor of Bergen?"


@pytest.mark.parametrize(
    ("question", "more", "corpus", "kind"),
    [
        (UMEA, {"kvblend": {"retrieve": {"top_k": 3}}}, "", "retrieved"),
        (UMEA, {"model": "tiny+corpus:north"}, "north", "retrieved"),
        (PASTED, {}, "", "pasted"),
    ],
    ids=["the corpus", "a named corpus", "pasted text"],
)
def test_texts_of_a_corpus_are_found_and_blended(
    server: Server, own: Own, question: str, more: dict[str, Any], corpus: str, kind: str
) -> None:
    prompt = own.prompt(question, **more)
    assert prompt.ticket.corpus == corpus
    assert own.blenders[corpus].prefill(prompt.ticket.layout).rows_share < 0.6
    text, shown = server.ask(question, **more)
    assert text == own.answer(prompt.ticket.layout, corpus)
    assert [one["id"] for one in shown["sources"]] == [one["id"] for one in prompt.shown["sources"]]
    assert {one["kind"] for one in shown["sources"]} == {kind}


def test_full_prefill_on_demand(server: Server, own: Own) -> None:
    full, shown = server.ask(PASTED, kvblend={"method": "full"})
    assert (full, shown["figures"]) == (own.answer(own.layout(PASTED), ratio=1.0), {"method": "full", "reason": ""})
