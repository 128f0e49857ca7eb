"""Chat templates that write today's date into every prompt, as those of Llama 3 and GPT-OSS do."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from blends import assert_kv, filled
from cases import cache_of, make_layout
from dense_reference import assert_close, dense_prefill
from models import CORE, decoder, eager_model
from tiny_model import save_tiny_model
from towns import documents, write_documents

from blend.analyze.study import analyze_prompt
from blend.config import BlendConfig, CorpusConfig
from blend.layout import Place
from blend.rag import Rag
from blend.serve.prompts.chat_template import ChatTemplate, question_turns
from blend.serve.request import Message

MONDAY, TUESDAY = datetime(2026, 11, 23), datetime(2026, 11, 24)
Clock = Callable[[datetime], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the day that chat templates see."""
    seen = Mock(wraps=datetime)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", seen)
    return lambda day: setattr(seen.now, "return_value", day)


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
        assert set(answer.blend.hits) == {True}
        assert answer.blend.problems == answer.blend.artifact_problems == ()


def chunks_of(rag: Rag) -> list[tuple[int, ...]]:
    return [tuple(rag.template.encode(text)[:40]) for text in documents().values()]


def test_a_server_and_the_command_line_make_the_same_prompt_of_a_question(clock, model, tmp_path):
    rag = Rag(tmp_path / "store", model=str(model))
    config, chunks = rag.template.config, chunks_of(rag)
    asked = config.question.replace("{question}", "What is it?")
    messages = [Message("system", config.system), Message("user", asked)]
    turns = question_turns(messages, [*map(Place, chunks)], config.instruction)
    for day in (MONDAY, TUESDAY):
        clock(day)
        layout = rag.template.layout_of_ids("What is it?", chunks)
        assert ChatTemplate(rag.decoder.tokenizer, rag.template.prefix).layout(turns) == layout
        assert layout.prefix != layout.kept_behind


def test_a_dated_prompt_is_analyzed_with_the_prefix_that_it_has(clock, model, tmp_path):
    clock(TUESDAY)
    rag = Rag(tmp_path / "store", model=str(model), blend=BlendConfig(ratio=1.0))
    found = analyze_prompt(rag.blender, rag.template.layout_of_ids("What is it?", chunks_of(rag))).after
    assert max(found.keys.relative.max(), found.values.relative.max()) < 1e-4, "all rows were recomputed"


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("alike", [0, 1, 3, 5])
def test_the_kv_of_a_common_beginning_serves_a_prompt_with_another_prefix(name, alike):
    layout = make_layout()
    canonical = (*layout.prefix[:alike], *((token + 1) % 60 for token in layout.prefix[alike:]), 7)
    asked = replace(layout, canonical_prefix=canonical)
    assert asked.shared_prefix_rows == alike
    blender = filled(decoder(name), asked)
    blend = blender.prefill(asked, config=BlendConfig("query_guided", ratio=0.3))
    assert blend.hits == (True,) * len(layout.chunks)
    true = dense_prefill(eager_model(name), layout.token_ids)
    assert_kv(cache_of(blend), true.layers, slice(len(layout.prefix)))
    ran = blender.prefill(asked, config=BlendConfig("none")).selection.rows.tolist()
    assert ran == [*range(alike, len(layout.prefix)), *range(layout.rows - len(layout.suffix), layout.rows)]
    everything = blender.prefill(asked, config=BlendConfig("all"))
    assert_close(everything.logits, true.logits[-1:])
