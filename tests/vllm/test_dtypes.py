"""`blend vllm` computes in vLLM's dtype."""

import json
from pathlib import Path

import pytest

from blend.cli.vllm import dtype_of_vllm
from tests.tiny_model import save_tiny_model

TEXT = "The harbour has three gates and a bell. Its keeper counts forty visitors a day. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dtypes") / "tiny", TEXT)


@pytest.mark.parametrize(("kept", "found"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")])
def test_auto_is_what_vllm_takes_for_a_checkpoint(model: Path, tmp_path: Path, kept: str, found: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": kept}))
    assert dtype_of_vllm(str(tmp_path)) == found
