"""Computes the caches of a corpus with vLLM's own model, so that they are those of the server that will blend them.

vLLM loads this module as its connector, in the process that precomputes. Nothing is served.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from blend.errors import ConfigError

_MODELS: list[Any] = []
"""The `RowModel` of vLLM's worker in this process."""


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
        raise ConfigError("--engine vllm needs vLLM: pip install 'kvblend[vllm]'")
    options = _options(engine_options)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is then in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; its own default takes most of the memory
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from blend.integrations.vllm.loads import row_blender

    connector = KVTransferConfig(
        kv_connector="KVBlend",
        kv_connector_module_path=__name__,
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": store},
    )
    settings = {"enforce_eager": True, "max_num_seqs": 1, **options}
    try:
        engine = LLM(model, dtype=dtype, kv_transfer_config=connector, **settings)
        decoder: Any = row_blender(_MODELS[-1], {"store": store, "learn": False}).decoder
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM cannot load {model}: {error}") from error
    decoder.tokenizer = engine.get_tokenizer()
    decoder.engine = engine  # lives as long
    return decoder


def _options(text: str) -> Mapping[str, Any]:
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError('--engine-options is a JSON object, such as {"quantization": "fp8"}')
    return options


def __getattr__(name: str) -> Any:
    """The connector, made when vLLM asks for it: its base class is in vLLM."""
    if name != "KVBlend":
        raise AttributeError(name)
    from blend.integrations.vllm.connector import KVBlendConnector
    from blend.integrations.vllm.loads import row_model

    class Precomputing(KVBlendConnector):
        """Only keeps the worker's model."""

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            """The cache is allocated."""
            _MODELS.append(row_model(self.site(kv_caches)))

    globals()["KVBlend"] = Precomputing
    return Precomputing
