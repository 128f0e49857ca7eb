"""Families of decoders in transformers, as tiny random models, and what admission and a few passes say of each."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Any

from _paths import ROOT
from _results import say
from blend.weights.catalog import FamilyResult

sys.path.append(str(ROOT / "tests"))
from models import CORE, HEAD_DIM, HYBRIDS, LAYERS, VOCABULARY, WIDE, WINDOW, Family, build  # type: ignore[import-not-found]

if TYPE_CHECKING:
    import torch

    from blend.model.decoder import Decoder

ROWS, SCATTERED = 40, (0, 1, 2, 7, 8, 15, 22, 23, 24, 36, 39)  # longer than the window


def _of(name: str, model: str | None = None, **options: Any) -> Family:
    return Family(f"{name}Config", model or f"{name}ForCausalLM", options)


_HALVES = LAYERS // 2
_LOCAL: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * _HALVES}
_HEADS: dict[str, Any] = {"head_dim": HEAD_DIM}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS}
_RANKS: dict[str, Any] = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24}
_LATENT: dict[str, Any] = {**_RANKS, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_FOUR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {"num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS}
_FOUR_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_DELTA: dict[str, Any] = {**_LINEAR, "layer_types": ["linear_attention", "full_attention"] * _HALVES, **_HEADS}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * _HALVES}
_GEMMA4: dict[str, Any] = {"global_head_dim": 32, "attention_k_eq_v": True, **_LOCAL, **_HEADS}
_GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_NEMOTRON: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
_GRANITE: dict[str, Any] = {"layer_types": ["mamba", "attention"] * _HALVES, "shared_intermediate_size": 32}

TITLES = {
    "llama": "Llama 2 and 3",
    "mistral": "Mistral",
    "qwen2": "Qwen2 and 2.5",
    "qwen3": "Qwen3",
    "qwen3-moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma3n": "Gemma 3n",
    "gemma4": "Gemma 4 with shared KV",
    "phi3": "Phi-3 and 4",
    "phi": "Phi",
    "granite": "Granite",
    "olmo2": "OLMo 2",
    "cohere": "Cohere",
    "cohere2": "Cohere 2",
    "glm4": "GLM-4",
    "gpt-neox": "GPT-NeoX",
    "gpt-oss": "GPT-OSS",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM",
    "starcoder2": "Starcoder2",
    "deepseek-v3": "DeepSeek-V3 and R1",
}
"""The names of the families that every test of an invariant runs on."""

ALSO = {
    "Apertus": _of("Apertus"),
    "Arcee": _of("Arcee"),
    "Bamba": _of("Bamba", attn_layer_indices=[1, 3], **_MAMBA),
    "BLOOM": _of("Bloom"),
    "Cohere 2 MoE": _of("Cohere2Moe", **_FOUR, **_LOCAL, **_HEADS),
    "CWM": _of("Cwm", **_LOCAL, **_HEADS),
    "DeepSeek-V2": _of("DeepseekV2", **_ROUTED, **_LATENT),
    "DeepSeek-V3.2": _of("DeepseekV32", **_ROUTED, **_LATENT),
    "DeepSeek-V4": _of("DeepseekV4", n_routed_experts=4),
    "ERNIE 4.5": _of("Ernie4_5", **_HEADS),
    "ERNIE 4.5 MoE": _of("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    "EXAONE 4": _of("Exaone4", **_LOCAL, **_HEADS),
    "EXAONE MoE": _of("ExaoneMoe", num_experts=4, first_k_dense_replace=1, **_EXPERTS, **_LOCAL, **_HEADS),
    "Falcon": _of("Falcon"),
    "Falcon-H1": _of("FalconH1", mamba_d_ssm=128, **_MAMBA, **_HEADS),
    "Gemma": _of("Gemma", **_HEADS),
    "Gemma 4 without shared KV": _of("Gemma4Text", "Gemma4ForCausalLM", **_GEMMA4),
    "Gemma 4 MoE": _of("Gemma4Text", "Gemma4ForCausalLM", hidden_size_per_layer_input=0, **_GEMMA4, **_GEMMA4_MOE),
    "GLM": _of("Glm", partial_rotary_factor=0.5, **_HEADS),
    "GLM-4.5 MoE": _of("Glm4Moe", **_ROUTED, **_HEADS),
    "GLM-4 MoE Lite": _of("Glm4MoeLite", **_ROUTED, **_LATENT),
    "GLM-5": _of("GlmMoeDsa", **_ROUTED, **_LATENT),
    "GPT-2": _of("GPT2", "GPT2LMHeadModel"),
    "GPT-J": _of("GPTJ", rotary_dim=8),
    "Granite MoE": _of("GraniteMoe", **_FOUR_LOCAL),
    "Granite MoE with shared experts": _of("GraniteMoeShared", shared_intermediate_size=32, **_FOUR_LOCAL),
    "Granite 4 hybrid": _of("GraniteMoeHybrid", **_GRANITE, **_FOUR_LOCAL, **_MAMBA),
    "Helium": _of("Helium", **_HEADS),
    "Hunyuan": _of("HunYuanDenseV1", **_HEADS),
    "Hunyuan MoE": _of("HunYuanMoEV1", num_experts=4, moe_topk=2, **_HEADS),
    "HyperCLOVA X": _of("HyperCLOVAX"),
    "Jamba": _of("Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, **_FOUR),
    "JetMoE": _of("JetMoe", kv_channels=16, **_FOUR_LOCAL),
    "Kimi Linear": HYBRIDS["kimi-linear"],
    "LFM2": _of("Lfm2", **_CONV),
    "LFM2 MoE": _of("Lfm2Moe", num_experts=4, num_dense_layers=1, **_CONV, **_EXPERTS),
    "Llama 4": _of("Llama4Text", "Llama4ForCausalLM", num_local_experts=2),
    "Mamba": _of("Mamba"),
    "MiMo-V2 Flash": _of("MiMoV2Flash"),
    "MiniCPM3": _of("MiniCPM3", **_LATENT),
    "MiniMax-Text-01": _of("MiniMax", **_FOUR_LOCAL),
    "MiniMax-M2": _of("MiniMaxM2", rotary_dim=8, **_FOUR_LOCAL, **_HEADS),
    "Ministral": _of("Ministral", **_LOCAL, **_HEADS),
    "Ministral 3": _of("Ministral3"),
    "Mistral 4": _of("Mistral4", **_ROUTED, **_LATENT),
    "MPT": _of("Mpt", d_model=64, n_heads=4, n_layers=LAYERS),
    "nanochat": _of("NanoChat"),
    "Nemotron": _of("Nemotron"),
    "Nemotron-H": _of("NemotronH", hybrid_override_pattern="M*-M", **_NEMOTRON, **_HEADS),
    "OLMo": _of("Olmo"),
    "OLMo Hybrid": HYBRIDS["olmo-hybrid"],
    "OLMo 3": _of("Olmo3", **_LOCAL),
    "OLMoE": _of("Olmoe", **_FOUR),
    "OPT": _of("OPT", ffn_dim=80),
    "Persimmon": _of("Persimmon"),
    "Phi-3.5-MoE": _of("Phimoe", **_FOUR_LOCAL),
    "Qwen2-MoE": _of("Qwen2Moe", **_SHARED),
    "Qwen3-Next": _of("Qwen3Next", **_SHARED, **_DELTA),
    "Qwen3.5": _of("Qwen3_5Text", "Qwen3_5ForCausalLM", **_DELTA),
    "Qwen3.5 MoE": _of("Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", **_SHARED, **_DELTA),
    "Seed-OSS": _of("SeedOss", **_HEADS),
    "Solar Open": _of("SolarOpen", n_routed_experts=4, **_EXPERTS),
    "VaultGemma": _of("VaultGemma", **_LOCAL, **_HEADS),
}
"""Families that are tried with their tiny model alone, by the names that people know."""

FAMILIES = {**{TITLES[name]: family for name, family in {**CORE, **WIDE}.items()}, **ALSO}

_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding window",
    "linear_attention": "recurrent",
    "conv": "convolution",
}


def measure(title: str) -> FamilyResult:
    """Build the family's tiny model, admit it and run both passes. float32, on the CPU."""
    from blend.errors import BlendError
    from blend.model.decoder import Decoder

    with redirect_stderr(StringIO()):
        model = build(FAMILIES[title])
    tested = title in TITLES.values()
    try:
        decoder = Decoder(model, name=title)
        return FamilyResult(title, ", ".join(_layers(model, decoder)), tested, "", *_differences(decoder))
    except BlendError as error:
        reason = str(error).removesuffix("; use full prefill for this model").removeprefix(title).lstrip(": ")
        reason = re.sub(r" \(\w+: .*\)$", "", reason)  # what another library says
        return FamilyResult(title, ", ".join(_layers(model, None)), tested, reason)


def _layers(model: Any, decoder: Decoder | None) -> Iterator[str]:
    """Words for the kinds of layers, from the configuration and, for an admitted model, from what admission measured."""
    config = model.config.get_text_config(decoder=True)
    names = getattr(config, "layer_types", None)
    if not names:
        names = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    yield from dict.fromkeys(_KINDS.get(name, name.replace("_", " ")) for name in names)
    if getattr(config, "kv_lora_rank", None):
        yield "latent KV"
    if decoder is None:
        return
    if shared := len(decoder.layers) - len(decoder.rotations):
        yield f"KV shared by the last {shared} of {len(decoder.layers)}"
    with_kv = [layer for layer in decoder.rotations if layer.width]
    turns = [layer.keys for layer in with_kv]
    widths = [layer.key_shape[1] for layer in with_kv]
    if any(turn is not None and turn.interleaved for turn in turns):
        yield "interleaved RoPE"
    pairs = zip(turns, widths, strict=True)
    if any(turn is not None and 2 * len(turn.inv_freq) < width for turn, width in pairs):
        yield "partial RoPE"
    if None in turns and not getattr(config, "kv_lora_rank", None):
        yield "some layers without RoPE"


def _differences(decoder: Decoder) -> tuple[float, float | None]:
    import torch

    from blend.errors import BlendError
    from blend.model.cache import Run
    from blend.model.passes import RowRequest

    ids = torch.randint(3, VOCABULARY, (1, ROWS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = decoder.run_whole(input_ids=ids, use_cache=True).logits[0, -1]

    def error(rows: torch.Tensor, cache: Any) -> float:
        logits = decoder.prefill([RowRequest(ids[:, rows], Run.read(rows), cache)])[0]
        return float((logits - expected).abs().max() / expected.abs().max())

    cache = decoder.new_cache(ROWS)
    all_rows = error(torch.arange(ROWS), cache)
    try:
        return all_rows, error(torch.tensor(SCATTERED), cache)
    except BlendError:  # rows that this model does not run apart
        return all_rows, None


def measure_all() -> Iterator[FamilyResult]:
    """Every family, by name."""
    for title in sorted(FAMILIES, key=str.lower):
        say(title)
        yield measure(title)
