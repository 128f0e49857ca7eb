"""Chat templates that write today's date into every prompt, as those of Llama 3 and GPT-OSS do."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from cases import make_layout
from dense_reference import assert_close, dense_prefill
from models import CORE, decoder, eager_model
from tiny_model import save_tiny_model
from towns import documents, write_documents

from blend.analyze.study import analyze_prompt
from blend.config import BlendConfig, CorpusConfig
from blend.prefill.blender import Blender
from blend.rag import Rag
from blend.serve.prompts.chat_template import ChatTemplate, question_turns
from blend.serve.request import Message
from blend.store import open_store
from blend.types import Place

MONDAY, TUESDAY = datetime(2026, 11, 23), datetime(2026, 11, 24)
Clock = Callable[[datetime], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the day that chat templates see."""

    def on(day: datetime) -> None:
        class Fixed(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
                return day

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)

    return on


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("dated"), "\n".join(documents().values()))
    template = folder / "chat_template.jinja"
    today = "<|im_start|>system\nToday Date: {{ strftime_now('%d %b %Y') }}<|im_end|>\n"
    template.write_text(today + template.read_text())
    return folder


def test_what_was_precomputed_on_monday_hits_on_tuesday(clock, model, tmp_path):
    write_documents(tmp_path / "docs")

    def asked(day: datetime) -> Rag:
        clock(day)
        return Rag(tmp_path / "store", model=str(model), corpus=CorpusConfig(chunk_tokens=64, surrogate_tokens=96))

    asked(MONDAY).precompute([str(tmp_path / "docs")])
    for day in (MONDAY, TUESDAY):
        rag = asked(day)
        answer = rag.answer("What stands in the harbour?", max_new_tokens=4, compare=True)
        text = rag.decoder.tokenizer.decode(answer.blend.layout.token_ids)
        assert f"Today Date: {day:%d %b %Y}" in text, "the model is told the day it is"
        assert answer.blend.hits
        assert all(answer.blend.hits)
        assert answer.blend.problems == answer.blend.artifact_problems == ()


def test_a_server_and_the_command_line_make_the_same_prompt_of_a_question(clock, model, tmp_path):
    rag = Rag(tmp_path / "store", model=str(model))
    chunks = [rag.template.encode(text)[:40] for text in documents().values()]
    for day in (MONDAY, TUESDAY):
        clock(day)
        mine = rag.template.layout_of_ids("What is it?", [tuple(chunk) for chunk in chunks])
        passages = [Place(tuple(chunk)) for chunk in chunks]
        config = rag.template.config
        asked = config.question.replace("{question}", "What is it?")
        turns = question_turns([Message("system", config.system), Message("user", asked)], passages, config.instruction)
        assert ChatTemplate(rag.decoder.tokenizer, rag.template.prefix).layout(turns) == mine
        assert mine.prefix != mine.kept_behind


def test_a_dated_prompt_is_analyzed_with_the_prefix_that_it_has(clock, model, tmp_path):
    clock(TUESDAY)
    rag = Rag(tmp_path / "store", model=str(model), blend=BlendConfig(ratio=1.0))
    layout = rag.template.layout_of_ids("What is it?", [(*rag.template.encode(t)[:40],) for t in documents().values()])
    seen = analyze_prompt(rag.blender, layout)
    found = seen.after
    assert max(found.keys.relative.max(), found.values.relative.max()) < 1e-4, "all rows were recomputed"


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("alike", [0, 1, 3, 5])
def test_the_kv_of_a_common_beginning_serves_a_prompt_with_another_prefix(name, alike):
    layout = make_layout()
    canonical = (*layout.prefix[:alike], *((token + 1) % 60 for token in layout.prefix[alike:]), 7)
    asked = replace(layout, canonical_prefix=canonical)
    assert asked.shared_prefix_rows == alike
    blender = Blender(decoder(name), open_store("memory:"))
    library = blender.library(canonical)
    library.compute(library.missing(layout.chunks))
    blend = blender.prefill(asked, config=BlendConfig("query_guided", ratio=0.3))
    assert blend.hits == (True,) * len(layout.chunks)
    true = dense_prefill(eager_model(name), layout.token_ids)
    for index, (keys, values) in enumerate(true.layers):
        mine = blend.cache.view(index)
        assert_close(mine[0][:, :, : len(layout.prefix)], keys[:, :, : len(layout.prefix)])
        assert_close(mine[1][:, :, : len(layout.prefix)], values[:, :, : len(layout.prefix)])
    ran = blender.prefill(asked, config=BlendConfig("none")).selection.rows.tolist()
    assert ran == [*range(alike, len(layout.prefix)), *range(layout.rows - len(layout.suffix), layout.rows)]
    everything = blender.prefill(asked, config=BlendConfig("all"))
    assert_close(everything.logits, true.logits[-1:])
