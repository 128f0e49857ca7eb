"""`blend vllm` computes in vLLM's dtype, and says where the store's caches have another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blend.cli.vllm import dtype_of_vllm, note_other_dtype
from blend.config import CorpusConfig
from blend.rag import Rag
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


def test_caches_of_another_dtype_are_named_with_the_remedy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, store, corpus = tmp_path / "documents", tmp_path / "store", CorpusConfig(surrogate_tokens=0)
    documents.mkdir()
    (documents / "harbour.md").write_text(TEXT)
    rags = {
        dtype: Rag(store, model=str(model), device="cpu", dtype=dtype, corpus=corpus)
        for dtype in ("float32", "bfloat16")
    }
    note_other_dtype(rags["bfloat16"])
    rags["float32"].precompute(documents)
    note_other_dtype(rags["float32"])
    assert capsys.readouterr().err == ""
    note_other_dtype(rags["bfloat16"])
    said = " ".join(capsys.readouterr().err.split())
    assert "run blend precompute with --dtype bfloat16" in said
    assert "start vLLM and blend vllm with --dtype float32" in said
