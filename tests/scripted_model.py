"""A tiny decoder that writes what a script says, in a directory, as `--model` takes it.

The template writes tools behind the instructions, as most do, and begins an answer with a control token for the number of
results of tools so far, and for the script: a conversation whose first words hold a script's name follows that one. The weights
map each token of an answer to the next: neither attention nor the MLPs change a hidden state, but keys and values are computed.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import save_tiny_model

_END = "<|im_end|>"
_TEMPLATE = r"""
{%- set asked = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first %}
{%- set script = namespace(name='', last=SCRIPTS['']) %}
{%- for name, last in SCRIPTS.items() if name and name in asked %}
    {%- set script.name = name %}
    {%- set script.last = last %}
{%- endfor %}
{%- macro begin(before) %}
    {%- set results = before | selectattr('role', 'equalto', 'tool') | list | length %}
    {{- '<|im_start|>assistant\n<|' ~ script.name ~ ' results ' ~ [results, script.last] | min ~ '|>' }}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- begin(messages[:loop.index0]) + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- endif %}
    {%- if loop.first %}
        {%- for tool in tools or [] %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- begin(messages) }}{%- endif %}
"""
_SCRIPTED = 48  # most tokens of all chains; each has a dimension of the hidden states
_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 96,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 65_536,
}


def call(name: str, arguments: str) -> str:
    """A call as the template writes it behind a text. arguments: JSON, as Python's `json.dumps` writes it."""
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def save_scripted_model(
    folder: Path,
    text: str,
    answers: Sequence[str],
    calls: Sequence[str] = (),
    *,
    others: Mapping[str, Sequence[str]] | None = None,
    **shape: int,
) -> Path:
    """`folder`, with a model that writes `answers[n]` behind n results of tools, and then ends.

    Args:
        folder: Where to save it.
        text: What the tokenizer is trained on, besides the answers.
        answers: No token may occur twice in them. Behind more results the model writes the last one.
        calls: Parts of the answers that become one token each; see `call`.
        others: Answers in conversations whose first message of the user holds this word.
        shape: What differs from the usual one, which computes fast.

    """
    scripts = {"": answers, **(others or {})}
    said = {f"<|{name} results {n}|>": words for name, script in scripts.items() for n, words in enumerate(script)}
    special = ("<|im_start|>", *said, _END)
    template = _TEMPLATE.replace("SCRIPTS", repr({name: len(script) - 1 for name, script in scripts.items()}))
    words = "\n".join([text, *list(said.values()) * 100])  # so often that their words become tokens
    save_tiny_model(folder, words, template=template, special=special, vocabulary=4000, **{**_SHAPE, **shape})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(calls))
    chains = [tokenizer.encode(start + answer + _END) for start, answer in said.items()]
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    write_chains(model, chains)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def write_chains(model: Any, chains: Collection[Sequence[int]]) -> None:
    """Let every token of a chain decide the next one. No token but the last ones may occur twice."""
    tokens = Counter(token for chain in chains for token in chain[:-1])
    assert max(tokens.values()) == 1, f"these tokens occur several times: {tokens.most_common(5)}"
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    inputs = model.get_input_embeddings().weight
    outputs = model.get_output_embeddings().weight
    inputs[:, :_SCRIPTED] = 0.0
    outputs.zero_()
    dimensions = iter(range(_SCRIPTED))
    for chain in chains:
        for token, following in pairwise(chain):
            dimension = next(dimensions)
            inputs[token] = torch.nn.functional.one_hot(torch.tensor(dimension), inputs.shape[1])
            outputs[following, dimension] = 10.0  # greedy at any usual temperature
