"""A tiny decoder that thinks and then gives one answer, whatever it is asked, in a directory, as `--model` takes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_model import write_chains
from tests.serve.tool_templates import QWEN
from tests.tiny_model import save_tiny_model

SPECIAL = ("<|im_start|>", "<|im_end|>")
THOUGHTS = ("\nI was asked,", " so I answer.\n\n\n", "Yes.\n")
CALL = (
    "I look.",
    "\n\n\n\n",
    "<tool_call>",
    '\n{"name": "weather", ',
    '"arguments": {"city": ',
    '"Paris"}}\n',
    "</tool_call>",
)
# As Qwen3's: the model opens its thoughts, and an empty thought in the prompt keeps it from thinking.
THINKING = QWEN.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content",
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content",
) + (
    "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
# As DeepSeek-R1's: the prompt opens the thoughts. The model repeats the marker, as some do.
OPENED = THINKING + "{%- if add_generation_prompt and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"


def save_thinking_model(folder: Path, answer: Sequence[str], template: str = THINKING) -> Path:
    """`folder`, with a model that writes `THOUGHTS` in their marks, a blank line, and `answer`, and ends.

    answer: texts that differ; each becomes one token. Behind a prompt that ends with an empty thought it answers at once.
    """
    shape: dict[str, Any] = {"vocab_size": 704, "intermediate_size": 16, "num_hidden_layers": 2}
    words = " ".join((*THOUGHTS, *answer))
    save_tiny_model(folder, words, template=template, special=SPECIAL, eos_token_id=1, **shape)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    written = ("<think>", *THOUGHTS, "</think>", "\n\n", *answer)
    tokenizer.add_tokens(list(written))
    write_chains(model, [(*tokenizer.encode("\n"), *tokenizer.convert_tokens_to_ids(written), 1)])
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
