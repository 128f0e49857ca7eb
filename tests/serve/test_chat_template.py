"""A prompt is what transformers makes of the same text or conversation."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from tool_templates import TEMPLATES
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blend.errors import PromptError
from blend.layout import Place
from blend.serve.prompts.chat_template import ChatTemplate, question_turns
from blend.serve.request import Message, ToolCall
from tests.tiny_model import byte_level

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<g>": 3, "hello": 4, "world": 5}
BEGIN = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
OPENINGS = {
    "no special tokens": (None, ()),
    "a template": (BEGIN, (1,)),
    "as Llama 3": (processors.Sequence([processors.ByteLevel(), BEGIN]), (1,)),
    "two tokens": (processors.TemplateProcessing(single="<g> <s> $A", special_tokens=[("<s>", 1), ("<g>", 3)]), (3, 1)),
    "one at each end": (processors.BertProcessing(("</s>", 2), ("<s>", 1)), (1,)),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_text_to_be_continued_begins_as_the_tokenizer_begins_it(tmp_path: Path, name: str) -> None:
    post_processor, opening = OPENINGS[name]
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if post_processor is not None:
        core.post_processor = post_processor
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    ids = ChatTemplate(tokenizer, ()).continued("hello world").token_ids
    assert ids == (*opening, 4, 5)
    assert tokenizer("hello world").input_ids[: len(ids)] == list(ids)


THINKS = "{% set said = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content %}"
"""As the templates of reasoning models leave out earlier thoughts."""
QWEN3 = (
    "{% set last = namespace(at=0) %}{% for m in messages if m.role == 'user' %}{% set last.at = loop.index0 %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thoughts = m.reasoning_content or '' %}{% set said = m.content %}{% if '</think>' in said %}"
    "{% set thoughts = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > last.at and (loop.last or thoughts) %}<think>\n{{ thoughts.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
FAMILIES = {
    "Qwen3": QWEN3,
    "DeepSeek-R1": "{% for m in messages %}" + THINKS + "<|{{ m.role }}|>{{ said }}<|end|>{% endfor %}<|assistant|><think>\n",
    "GLM-4.5": "[gMASK]{% for m in messages %}" + THINKS + "<|{{ m.role }}|>{% if m.role == 'assistant' %}\n<think></think>"
    "{% if said.strip() %}\n{{ said.strip() }}{% endif %}{% else %}\n{{ said }}{% endif %}{% endfor %}<|assistant|>",
    "Nemotron": "{% for m in messages %}" + THINKS + "<|im_start|>{{ m.role }}\n{% if '</think>' in m.content and loop.last %}"
    "{{ m.content }}{% else %}{{ said | trim }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think></think>",
    "LFM2.5": "{% set first = messages[0] %}{% if first.content and first.role == 'system' %}<|im_start|>system\n"
    "{{ first.content }}<|im_end|>\n{% endif %}{% for m in messages if m.role != 'system' %}" + THINKS
    + "<|im_start|>{{ m.role }}\n{{ said | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    "Mistral": "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
    "Llama 2": "{% if messages[0].role == 'system' %}{% set first = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% set said = m.content %}"
    "{% if loop.first and first is defined %}{% set said = first ~ said %}{% endif %}"
    "{% if m.role == 'assistant' %} {{ said.strip() }} </s>"
    "{% else %}<s>[INST] {{ said.strip() }} [/INST]{% endif %}{% endfor %}",
    "Gemma": "<s>{% if messages[0].role == 'system' %}{% set opening = messages[0].content | trim ~ '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{{ (opening if loop.first else '') ~ m.content | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
    "Phi-3.5": "{% for m in messages %}{% if m.role == 'system' and m.content %}<|system|>\n{{ m.content }}<|end|>\n"
    "{% elif m.role != 'system' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}<|assistant|>\n",
    "gpt-oss": "<|start|>system<|message|>Effort: {{ reasoning_effort | default('low') }}<|end|>{% set first = messages[0] %}"
    "{% if first.role == 'system' %}{% if first.content %}<|start|>developer<|message|># Instructions\n\n{{ first.content }}"
    "\n\n<|end|>{% endif %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('write no channels') }}{% endif %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant",
    **TEMPLATES,
}  # fmt: skip
CONTROL = re.compile(r"<\|?/?[a-z_]+\|?>|\[/?[A-Za-z_]+\]|</?s>")

CALL = ToolCall("abcdefghi", "weather", '{"city": "Paris"}')
USER, AND_NOW = Message("user", "Hi."), Message("user", "And now?")
THOUGHTFUL = Message("assistant", "<think>\nThey greet.\n</think>\n\nHello.")
CONVERSATIONS = {
    "one message": (USER,),
    "earlier thoughts": (USER, THOUGHTFUL, AND_NOW),
    "half of the thoughts": (USER, Message("assistant", "They greet.</think>Hello."), AND_NOW),
    "thoughts in a field": (USER, Message("assistant", "Hello.", thoughts="They greet."), AND_NOW),
    "an answer begun": (USER, Message("assistant", "Hello, ")),
    "thoughts in an answer begun": (USER, THOUGHTFUL),
    "blanks": (Message("system", " Be brief. "), Message("user", "  Hi.\n"), Message("assistant", "\n\nHello.  "), AND_NOW),
    "nothing from the system": (Message("system", ""), USER),
    "blanks from the system": (Message("system", " \n"), USER),
    "two from the system": (Message("system", "Be brief."), Message("system", "Be kind."), USER),
    "an empty answer": (USER, Message("assistant", ""), AND_NOW),
    "a name": (Message("user", "Hi.", name="bob"),),
    "half a control token": (Message("user", "a < b and c > d [1] <|im_"), Message("assistant", "end|>"), AND_NOW),
    "private-use characters": (Message("user", "\ue001 \U000f0000\U000f0001"),),
    "a result": (USER, Message("assistant", "", (CALL,)), Message("tool", '{"sky":\n 3} ', (), CALL.id, CALL.name)),
}  # fmt: skip


@cache
def tokenizer_of(template: str, *, control: bool) -> Any:
    """One of bytes. control: what looks like a control token in the template is one."""
    core = byte_level(["user assistant system", "Be brief. Hello, they greet."], 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    if control:
        tokenizer.add_tokens([AddedToken(word, special=True) for word in sorted({*CONTROL.findall(template)})])
    tokenizer.chat_template = template
    return tokenizer


def as_transformers(tokenizer: Any, messages: Sequence[Message], **arguments: Any) -> str | None:
    """The prompt, or None if the template refuses the conversation."""
    given = []
    for message in messages:
        function = {"name": CALL.name, "arguments": json.loads(CALL.arguments)}
        more = {
            "tool_calls": [{"type": "function", "id": CALL.id, "function": function}] * len(message.tool_calls),
            "tool_call_id": message.tool_call_id,
            "name": message.name,
            "reasoning_content": message.thoughts,
        }
        given.append(
            {"role": message.role, "content": message.content, **{n: value for n, value in more.items() if value}}
        )
    try:
        return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **arguments))
    except TemplateError:
        return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("control", [False, True], ids=["plain", "control"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_that_of_transformers(family: str, control: bool, conversation: str) -> None:
    tokenizer, messages = tokenizer_of(FAMILIES[family], control=control), CONVERSATIONS[conversation]
    for thinking in (False, True):
        expected = as_transformers(tokenizer, messages, enable_thinking=thinking)
        turns, arguments = question_turns(messages, (), ""), {"enable_thinking": thinking}
        if expected is None:
            with pytest.raises(PromptError, match="refuses"):
                ChatTemplate(tokenizer, ()).layout(turns, arguments)
            continue
        layout = ChatTemplate(tokenizer, ()).layout(turns, arguments)
        assert tokenizer.decode(layout.token_ids) == expected
        if not (control and any(word in message.content for word in CONTROL.findall(expected) for message in messages)):
            assert list(layout.token_ids) == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_of_a_client_adds_a_control_token(family: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[family], control=True)
    words = "".join(tokenizer.get_added_vocab()).replace("<|channel|>", "")  # that of gpt-oss refuses it
    chat = ChatTemplate(tokenizer, ())

    def control(attack: str) -> list[int]:
        call = ToolCall("abcdefghi", "weather", json.dumps({"city": f"Paris{attack}"}))
        messages = (
            Message("user", f"Hi{attack}."),
            Message("assistant", f"Hello{attack}<|im_<think>x</think>", (call,)),
            Message("tool", f"Sunny{attack}.", (), call.id, call.name),
            Message("assistant", f"Fine{attack}<|im_"),
            Message("user", f"end|>And{attack}?"),
        )
        ids = chat.layout(question_turns(messages, (), "")).token_ids
        return [token for token in ids if token in tokenizer.added_tokens_decoder]

    assert control(words) == control(" ")


@pytest.mark.parametrize("family", FAMILIES)
def test_passages_stand_where_their_text_would(family: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[family], control=True)
    texts = ["The harbour has two gates.\n\n", "The mill has two wheels.\n\n"]
    places = [Place(tuple(tokenizer.encode(text))) for text in texts]
    said = Message("user", " How many? ")
    turns = question_turns((USER, THOUGHTFUL, said), places, "Answer from these:")
    layout = ChatTemplate(tokenizer, ()).layout(turns)
    whole = Message("user", f"Answer from these:\n\n{''.join(texts)}{said.content}")
    assert tokenizer.decode(layout.token_ids) == as_transformers(
        tokenizer, (USER, THOUGHTFUL, whole), enable_thinking=False
    )
    assert layout.places == tuple(places)


def test_a_template_that_leaves_out_passages_is_refused() -> None:
    tokenizer = tokenizer_of(
        "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}Yes?", control=False
    )
    turns = question_turns((USER,), [Place((1, 2, 3))], "")
    with pytest.raises(PromptError, match="leaves out the message with the passages"):
        ChatTemplate(tokenizer, ()).layout(turns)
