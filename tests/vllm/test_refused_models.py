"""Models and settings that vLLM is not started with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blend.integrations.vllm.connector import refuse, refuse_version


class FullAttentionSpec:
    """As vLLM describes a layer's cache; the class goes by its name."""

    def __init__(self, **more: int) -> None:
        self.sliding_window = more.get("sliding_window")
        self.attention_chunk_size = more.get("attention_chunk_size")


class SlidingWindowSpec:
    sliding_window = 64


class MambaSpec:
    pass


def checked(*specs: Any, **changes: Any) -> None:
    settings = {
        "model_config": SimpleNamespace(use_mla=False, is_encoder_decoder=False),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "kv_transfer_config": SimpleNamespace(kv_role="kv_consumer", kv_load_failure_policy="recompute"),
        "lora_config": None,
        "speculative_config": None,
    }
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    refuse(SimpleNamespace(**settings | changes), SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "0.3.2", "1.0"])
def test_versions_that_it_was_not_run_with_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=rf"^kvblend: vLLM {version} is not supported; install 0.32$"):
        refuse_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu"])
def test_versions_that_it_was_run_with_are_served(version: str) -> None:
    refuse_version(version)


def test_the_second_model_runner_is_refused_with_the_remedy() -> None:
    """After a load that failed it goes on counting the rows as computed: a wrong answer."""
    with pytest.raises(ValueError, match=r"^kvblend: .* VLLM_USE_V2_MODEL_RUNNER=0"):
        checked(FullAttentionSpec(), use_v2_model_runner=True)


def test_full_attention_is_served() -> None:
    checked(FullAttentionSpec())


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(sliding_window=64), FullAttentionSpec(attention_chunk_size=64), SlidingWindowSpec()]
)
def test_windows_are_refused_also_where_vllm_caches_them_as_full_attention(spec: Any) -> None:
    """With a connector vLLM has no hybrid cache manager: windows beside full attention become one group of full caches."""
    with pytest.raises(ValueError, match="kvblend: models with sliding windows or chunked attention are not supported"):
        checked(spec)


@pytest.mark.parametrize("specs", [(MambaSpec(),), (FullAttentionSpec(), FullAttentionSpec())])
def test_several_kinds_of_cache_are_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="several kinds of KV cache"):
        checked(*specs)


def test_outages_must_not_end_requests() -> None:
    policy = SimpleNamespace(kv_role="kv_consumer", kv_load_failure_policy="fail")
    with pytest.raises(ValueError, match='"kv_load_failure_policy": "recompute"'):
        checked(FullAttentionSpec(), kv_transfer_config=policy)
