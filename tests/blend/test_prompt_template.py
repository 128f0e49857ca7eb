"""Prompts: the model's own chat template around chunks, tokenised segment by segment."""

import re
from datetime import datetime
from functools import cache

import pytest
from blends import Passage
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from blend.config import PromptConfig
from blend.errors import ConfigError, PromptError
from blend.prompt_template import PromptTemplate, apply_chat_template, render_chunk
from tests.tiny_model import byte_level

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LINES = ["Answer the question using the documents below.", "csv parses delimited files\n\n"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ bos_token }}" + CHATML
)
DROPS_SYSTEM = "{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}" + CHATML
THINKING = CHATML + "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}{% endif %}"
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
DATED = "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + CHATML
TEMPLATES = {
    "chatml": CHATML,
    "dated": DATED,
    "no system role": NO_SYSTEM,
    "drops the system message": DROPS_SYSTEM,
    "thinking": THINKING,
    "trimming": TRIMMING,
    "none": None,
}


PASSAGES = [Passage("csv", "The csv module reads files.\n"), Passage("", "  No title here. "), Passage("json", "Text.")]
QUESTION = "How do I parse a file?"
CONFIG = PromptConfig(
    system="Be careful.", instruction="Use the documents.\n\n", question="Question: {question}\nBe brief."
)


@cache
def _tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE that adds <s> on its own when asked to encode with special tokens, as Llama's does."""
    core = byte_level(LINES, 320, SPECIAL)
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def _template(name: str) -> PromptTemplate:
    return PromptTemplate(_tokenizer(TEMPLATES[name]), CONFIG)


def _whole(name: str) -> str:
    """The prompt as text, from the model's template over the whole conversation at once."""
    chunks = "".join(map(render_chunk, PASSAGES))
    user = f"Use the documents.\n\n{chunks}Question: {QUESTION}\nBe brief."
    if name == "none":
        return f"<s>Be careful.\n\n{user}\nAnswer:"
    messages = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": user}]
    if name in ("no system role", "drops the system message"):
        messages = [{"role": "user", "content": f"Be careful.\n\n{user}"}]
    return _tokenizer(TEMPLATES[name]).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def test_a_chunk_is_its_title_its_text_and_a_blank_line():
    assert [*map(render_chunk, PASSAGES[:2])] == ["csv\nThe csv module reads files.\n\n", "No title here.\n\n"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_segments_are_tokenised_one_by_one(name):
    template, tokenizer = _template(name), _tokenizer(TEMPLATES[name])
    layout = template.layout(QUESTION, PASSAGES)
    expected = [tokenizer.encode(render_chunk(p), add_special_tokens=False) for p in PASSAGES]
    assert [list(chunk) for chunk in layout.chunks] == expected
    before, after = _whole(name).split("".join(map(render_chunk, PASSAGES)))
    assert tokenizer.decode(layout.prefix) == before
    assert tokenizer.decode(layout.suffix) == after


@pytest.mark.parametrize("name", TEMPLATES)
def test_prefix_and_chunks_are_the_same_in_every_prompt(name):
    template = _template(name)
    one, other = template.layout(QUESTION, PASSAGES), template.layout("Something else?", PASSAGES[::-1])
    assert one.prefix == other.prefix
    assert one.kept_behind == other.kept_behind == template.prefix
    assert (one.prefix == template.prefix) == (name != "dated"), "two years after the day that caches are kept behind"
    assert one.chunks == other.chunks[::-1]
    assert one.suffix != other.suffix
    assert one.chunks[0] == template.chunk_ids(PASSAGES[0])
    assert template.layout(QUESTION, []).token_ids == (*one.prefix, *one.suffix)
    assert template.layout_of_ids(QUESTION, one.chunks) == one


@pytest.mark.parametrize(
    ("before", "day"),
    [
        ("{% set form = '%d %b %Y' %}", "strftime_now(form)"),
        ("", "strftime_now(format='%d %b %Y')"),
        ("", "strftime_now('%d ' ~ '%b %Y')"),
        ("{% set now = strftime_now %}", "now('%d %b %Y')"),
        ("\n{% macro today() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}\n", "today()"),
        ("{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}", "day"),
    ],
)
def test_caches_are_kept_behind_a_fixed_day_however_a_template_asks_for_today(before, day):
    tokenizer = _tokenizer(DATED.replace("strftime_now('%d %b %Y')", day).replace("{{", f"{before}{{{{", 1))
    template = PromptTemplate(tokenizer)
    layout = template.layout(QUESTION, PASSAGES)
    dates = [re.search(r"Today: (.*)<", tokenizer.decode(ids))[1] for ids in (layout.prefix, template.prefix)]
    assert dates == [f"{datetime.now():%d %b %Y}", "26 Jul 2024"]
    assert tokenizer.decode(layout.prefix).replace(*dates) == tokenizer.decode(template.prefix)


def test_every_part_of_a_day_is_fixed():
    forms = "%A %-d %B %j %H:%M:%S %F %%d"
    tokenizer = _tokenizer(DATED.replace("%d %b %Y", forms))
    prefix = tokenizer.decode(PromptTemplate(tokenizer).prefix)
    assert "Today: Friday 26 July 208 00:00:00 2024-07-26 %d<" in prefix


def test_a_day_behind_the_question_is_today():
    tokenizer = _tokenizer(CHATML + "{{ strftime_now('%d %b %Y') }}")
    template = PromptTemplate(tokenizer)
    layout = template.layout(QUESTION, PASSAGES)
    assert tokenizer.decode(layout.suffix).endswith(f"{datetime.now():%d %b %Y}")
    assert layout.prefix == template.prefix


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_are_single_ids_and_never_doubled(name):
    layout, text = _template(name).layout(QUESTION, PASSAGES), _whole(name)
    for token in SPECIAL:
        number = _tokenizer(TEMPLATES[name]).convert_tokens_to_ids(token)
        assert layout.token_ids.count(number) == text.count(token), token


def test_braces_in_the_question_are_text():
    layout = _template("chatml").layout("What is {question} or {0}?", PASSAGES)
    assert "Question: What is {question} or {0}?\n" in _tokenizer(CHATML).decode(layout.suffix)


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_refused(question):
    with pytest.raises(PromptError, match="the question is empty"):
        _template("chatml").layout(question, PASSAGES)


def test_a_conversation_without_a_template_is_a_transcript():
    roles = ("system", "user", "assistant", "user", "user")
    contents = ("Be careful.", " Hello. ", " Yes?", "Why?", "Well?")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    text = apply_chat_template(_tokenizer(None), messages)
    assert text == "<s>Be careful.\n\nHello.\nAnswer: Yes?\n\nWhy?\n\nWell?\nAnswer:"


def test_a_template_that_drops_the_user_is_refused():
    with pytest.raises(PromptError, match="drops the user's message"):
        PromptTemplate(_tokenizer("{{ '<|im_start|>hello' }}"), CONFIG)


def test_a_prompt_without_a_prefix_is_refused(monkeypatch):
    """With a tokenizer for which blank text has no tokens."""
    silent = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(None).backend_tokenizer)
    monkeypatch.setattr(silent, "encode", lambda text, **options: list(text.strip().encode()))
    with pytest.raises(PromptError, match="give the prompt an instruction or a system message"):
        PromptTemplate(silent, PromptConfig(system="", instruction=""))


def test_a_question_part_without_its_placeholder_is_refused():
    with pytest.raises(ConfigError, match=r"lacks the placeholder \{question\}"):
        PromptConfig(question="Answer:")
