"""Tiny models of transformers written as GGUF files, as llama.cpp's own converter does it, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NORMAL, _CONTROL = 1, 3  # kinds of tokens


def save_gguf(file: Path, model: Any, tokenizer: Any = None) -> Path:
    """`file`, with a model's weights and, if it is given, a byte-level tokenizer of transformers."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(file, _ARCHITECTURES[config.model_type])
    _write_shape(writer, config)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(config.vocab_size)
    else:
        _write_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(_name(name, config), _numbers(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_shape(writer: Any, config: Any) -> None:
    head_dim = _head_dim(config)
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer: Any, tokenizer: Any) -> None:
    import json

    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens) | {str(token) for token in tokenizer.added_tokens_decoder.values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([_CONTROL if word in special else _NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in core["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _name(name: str, config: Any) -> str:
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in outside:
        return f"{outside[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    is_gemma = config.model_type == "gemma3_text"
    known = {**_NAMES, "post_attention_layernorm": "post_attention_norm"} if is_gemma else _NAMES
    return f"blk.{layer}.{known[part]}.{kind}"


def _numbers(name: str, tensor: Tensor, config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = neighbours(tensor, tensor.shape[0] // _head_dim(config))
    if config.model_type == "gemma3_text" and "norm" in name:
        tensor = tensor + 1
    return np.ascontiguousarray(tensor.float().numpy())


def neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows `[heads x head_dim, ...]` so ordered that the two numbers that RoPE turns together are neighbours."""
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
