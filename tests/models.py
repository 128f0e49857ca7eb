"""Tiny random decoders of many families, built from configurations: no weights to fetch, a few milliseconds to run.

Weights are larger than a fresh initialisation gives, and biases, norms and sinks are random too, so that every part of a model
shows in its logits. Everything is seeded; two builds of one family are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from blend.model.decoder import Decoder

VOCABULARY = 96
LAYERS = 4
WINDOW = 8
HEAD_DIM = 16

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Family(NamedTuple):
    """Names of the configuration and model classes in transformers, and what differs from `BASE`."""

    config: str
    model: str
    options: Mapping[str, Any]


def _family(name: str, *, config: str | None = None, model: str | None = None, **options: Any) -> Family:
    return Family(config or f"{name}Config", model or f"{name}ForCausalLM", options)


_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"sliding_window": WINDOW, "head_dim": HEAD_DIM, "layer_types": _ALTERNATING}
_SHARED = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    **_LOCAL,
}

CORE = {
    "llama": _family("Llama"),
    "mistral": _family("Mistral", sliding_window=WINDOW),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3", head_dim=HEAD_DIM),
}
WIDE = {
    "qwen3-moe": _family("Qwen3Moe", head_dim=HEAD_DIM, num_experts=4, **_EXPERTS),
    "mixtral": _family("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gemma2": _family(
        "Gemma2", attn_implementation="eager", query_pre_attn_scalar=HEAD_DIM, attn_logit_softcapping=2.0, **_LOCAL
    ),
    "gemma3": _family("Gemma3Text", model="Gemma3ForCausalLM", query_pre_attn_scalar=HEAD_DIM, **_LOCAL),
    "gemma3n": _family(
        "Gemma3nText",
        model="Gemma3nForCausalLM",
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
        **_SHARED,
    ),
    "gemma4": _family("Gemma4Text", model="Gemma4ForCausalLM", global_head_dim=2 * HEAD_DIM, **_SHARED),
    "phi3": _family("Phi3"),
    "phi": _family("Phi", partial_rotary_factor=0.5),
    "granite": _family("Granite", attention_multiplier=0.3, residual_multiplier=0.7),
    "olmo2": _family("Olmo2"),
    "cohere": _family("Cohere", logit_scale=1.0),
    "cohere2": _family("Cohere2", logit_scale=1.0, **_LOCAL),
    "glm4": _family("Glm4", head_dim=HEAD_DIM, partial_rotary_factor=0.5),
    "gpt-neox": _family("GPTNeoX", rotary_pct=0.25),
    "gpt-oss": _family(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **_LOCAL,
    ),
    "smollm3": _family("SmolLM3"),
    "stablelm": _family("StableLm", partial_rotary_factor=0.5),
    "starcoder2": _family("Starcoder2", sliding_window=WINDOW),
    "deepseek-v3": _family(
        "DeepseekV3",
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **_EXPERTS,
    ),
}
FAMILIES = {**CORE, **WIDE}
_WITH_EXPERTS = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3")  # rounding to bfloat16 may choose another expert
IN_BOTH_DTYPES = [
    *(pytest.param(name, torch.float32, id=name) for name in FAMILIES),
    *(pytest.param(name, torch.bfloat16, id=f"{name}-bfloat16") for name in FAMILIES if name not in _WITH_EXPERTS),
]


_MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,  # narrower than keys: a state has more rows than columns
    "head_dim": HEAD_DIM,
    "layer_types": _MIXED,
}
_SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS}
_SPACE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
HYBRIDS = {
    "qwen3.5": _family("Qwen3_5", config="Qwen3_5TextConfig", **_DELTA),
    "qwen3.5-moe": _family("Qwen3_5Moe", config="Qwen3_5MoeTextConfig", **_DELTA, **_SHARED_EXPERT),
    "qwen3-next": _family("Qwen3Next", **_DELTA, **_SHARED_EXPERT),
    "olmo-hybrid": _family("OlmoHybrid", **_DELTA),
    "kimi-linear": _family(
        "KimiLinear",
        layer_types=_MIXED,
        num_key_value_heads=4,
        linear_num_heads=4,
        linear_head_dim=16,
        kv_lora_rank=24,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_experts=4,
        num_expert_group=1,
        topk_group=1,
        num_experts_per_token=2,
        **_EXPERTS,
    ),
    "bamba": _family("Bamba", attn_layer_indices=[1, 3], **_SPACE),
    "granite-hybrid": _family(
        "GraniteMoeHybrid",
        layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        **_SPACE,
    ),
    "nemotron-h": _family(
        "NemotronH",
        layers_block_type=["mamba", "mlp", "attention", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        head_dim=HEAD_DIM,
    ),
    "falcon-h1": _family("FalconH1", mamba_d_ssm=128, head_dim=HEAD_DIM, **_SPACE),
    "lfm2": _family("Lfm2", layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
}


def build(family: Family, *, seed: int = 0, **options: Any) -> Any:
    """A new random model of a family; `options` go over the family's own."""
    config = getattr(transformers, family.config)(**{**BASE, **family.options, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, family.model)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):  # a recurrent state must last longer than a chunk to show
                    parameter.uniform_(-5, -2)
                elif parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif parameter.std() < 0.05:
                    parameter.mul_(4)
    return model.requires_grad_(False)


@cache
def decoder(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """The decoder of a family, shared between tests: leave it as it was."""
    return Decoder(_in_dtype(build({**FAMILIES, **HYBRIDS}[name], **options), dtype), tokenizer(), name)


@cache
def eager_model(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The same weights as `decoder(name)` in another object, with transformers' eager attention: the reference."""
    return _in_dtype(build(FAMILIES[name], attn_implementation="eager", **options), dtype)


def _in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """As transformers loads it: parameters in the dtype, the frequencies of RoPE in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w3, w4, ... for the ids 3, 4, ..."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
