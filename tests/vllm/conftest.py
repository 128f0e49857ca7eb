"""Tests of kvblend inside vLLM run where vLLM is; elsewhere each is skipped by its name, with the reason."""

import os
from importlib.util import find_spec

import pytest

_FOUND = find_spec("vllm")
HAS_VLLM = _FOUND is not None and _FOUND.origin is not None  # this folder has the same name, and is no package
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    TORCHDYNAMO_DISABLE="1",  # vLLM compiles what counts log-probabilities, which takes longer than all tests
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
)


os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vLLM is not installed here; test_in_its_environment.py runs this where it is")
    for item in items:
        if item.get_closest_marker("inside_vllm") and not HAS_VLLM:
            item.add_marker(missing)
