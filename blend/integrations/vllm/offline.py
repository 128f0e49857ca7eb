"""Computes the caches of a corpus with vLLM's own model, so that they are those of the server that will blend them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from blend.errors import ConfigError
from blend.model.engines import read_engine_options
from blend_retrieval.installation import install_command


def load_decoder(model: str, store: str, dtype: str, engine_options: str = "") -> Any:
    """The model as vLLM loads it, as a decoder under the name that serving workers look for.

    Args:
        model: a directory or a HuggingFace id.
        store: as `--store`, in which a probe may show that transformers' caches are the same.
        dtype: "auto", or as vLLM names it.
        engine_options: vLLM's engine arguments as a JSON object, such as `{"quantization": "fp8"}`.

    Raises:
        ConfigError: vLLM is not installed, its options are wrong, or it refuses the model.

    """
    if find_spec("vllm") is None:
        raise ConfigError(f"--engine vllm needs vLLM: {install_command('vllm')}")
    options = read_engine_options(engine_options)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is then in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; its own default takes most of the memory
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = KVTransferConfig(
        kv_connector="KVBlend",
        kv_connector_module_path="blend.integrations.vllm.connector",
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": store, "learn": False},
    )
    settings = {"enforce_eager": True, "max_num_seqs": 1, **options}
    try:
        engine = LLM(model, dtype=dtype, kv_transfer_config=connector, **settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM cannot load {model}: {error}") from error
    decoder: Any = get_kv_transfer_group().queue.blender.decoder
    decoder.tokenizer = engine.get_tokenizer()
    decoder.engine = engine  # lives as long
    return decoder
