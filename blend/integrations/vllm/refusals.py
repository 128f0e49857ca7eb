"""What blended KV was never shown to be right for: vLLM is not started with it, and the reason is one line."""

from __future__ import annotations

from typing import Any

VERSIONS = ("0.32",)
"""Of vLLM, in which the connector's tests pass: its interface to connectors changes with each."""


def refuse_version(version: str) -> None:
    """Raise `ValueError` for a vLLM that the connector was never run with."""
    if not version.startswith(tuple(f"{one}." for one in VERSIONS)):
        raise ValueError(f"kvblend: vLLM {version} is not supported; install {' or '.join(VERSIONS)}")


def refuse(config: Any, cache: Any) -> None:
    """Raise `ValueError` for a `VllmConfig` and a `KVCacheConfig` that the connector is not for."""
    for reason, holds in _reasons(config, cache).items():
        if holds:
            raise ValueError(f"kvblend: {reason}")


def _reasons(config: Any, cache: Any) -> dict[str, bool]:
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    groups = cache.kv_cache_groups if cache is not None else ()
    specs = [group.kv_cache_spec for group in groups]
    kinds = {type(spec).__name__ for spec in specs}
    widths = {getattr(parallel, name, 1) for name in ("decode_context_parallel_size", "prefill_context_parallel_size")}
    return {
        "models with latent attention (MLA) are not supported; serve this one without the connector": model.use_mla,
        "vLLM's second model runner is not supported: set VLLM_USE_V2_MODEL_RUNNER=0 for vLLM": getattr(
            config, "use_v2_model_runner", False
        ),
        "LoRA adapters are not supported: start vLLM without --enable-lora": config.lora_config is not None,
        "models with sliding windows or chunked attention are not supported; serve this one without the connector": any(
            map(_windowed, specs)
        ),
        "models with several kinds of KV cache are not supported; serve this one without the connector": len(groups) > 1
        or not kinds <= {"FullAttentionSpec"},
        "encoder-decoder models are not supported; serve this one without the connector": model.is_encoder_decoder,
        "speculative decoding is not supported: start vLLM without --speculative-config": config.speculative_config
        is not None,
        "a quantised KV cache is not supported: start vLLM with --kv-cache-dtype auto": config.cache_config.cache_dtype
        != "auto",
        "pipeline and context parallelism are not supported; use tensor or data parallelism": parallel.pipeline_parallel_size
        != 1
        or widths != {1},
        'the role must be "kv_role": "kv_consumer" in --kv-transfer-config': transfer.kv_role != "kv_consumer",
        'give "kv_load_failure_policy": "recompute" in --kv-transfer-config: else an outage of the prefill process ends '
        "requests": transfer.kv_load_failure_policy != "recompute",
    }


def _windowed(spec: Any) -> bool:
    """Whether a layer sees part of the prompt alone: without its hybrid cache manager vLLM gives it a full layer's cache."""
    return any(getattr(spec, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
