"""A tiny random model whose answers depend on every row."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 512


def save_model(folder: Path, **changes: Any) -> Path:
    """Weights so large that a wrong row of KV changes the next token. changes: of the configuration."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = Qwen2Config(**{**shape, **changes})
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float().eval()
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias, std=0.2)
    model.save_pretrained(folder)
    return folder
