"""A tiny random decoder with a small trained tokenizer in a directory, as `--model` takes it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|im_start|>", "<|im_end|>")
BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1],  # none in the middle layers
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
"""Options of the family Bamba, with recurrent layers."""


def save_tiny_model(
    folder: Path,
    text: str,
    *,
    seed: int = 0,
    family: str = "Qwen2",
    template: str = _TEMPLATE,
    special: Sequence[str] = _SPECIAL,
    vocabulary: int = 600,
    **options: Any,
) -> Path:
    """`folder`, with weights that depend on `seed`. Nothing ends its answers: they are as long as they may be."""
    core = byte_level(text.splitlines(), vocabulary, special)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1])
    tokenizer.chat_template = template
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{family}Config")(**{**shape, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        model = getattr(transformers, name)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_level(lines: Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> Tokenizer:
    """A BPE of bytes trained on these lines, as GPT-2, Llama 3 and Qwen have it."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    about: dict[str, Any] = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    core.train_from_iterator(lines, BpeTrainer(vocab_size=vocabulary, **about))
    return core
