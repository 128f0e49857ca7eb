"""A fit that is interrupted goes on where it was."""

from pathlib import Path
from typing import Any

import pytest

from blend.config import CorpusConfig
from blend.eval import estimates
from blend.intervals import LEAST_SAMPLE
from blend.quality import Estimator
from blend.rag import Rag
from tests import towns
from tests.tiny_model import save_tiny_model


def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = tmp_path / "documents"
    towns.write_documents(documents)
    model = save_tiny_model(tmp_path / "tiny", "\n".join(towns.documents().values()))
    corpus = CorpusConfig(chunk_tokens=64, surrogate_tokens=0, top_k=3)
    rag = Rag(tmp_path / "store", model=str(model), device="cpu", dtype="float32", corpus=corpus)
    rag.precompute(documents, quick=True)
    questions = [f"When did gate {number} open?" for number in range(LEAST_SAMPLE)]
    measured: list[Any] = []
    measure = estimates.measure

    def counted(*arguments: Any) -> Any:
        measured.append(arguments)
        return measure(*arguments)

    def interrupted(stage: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(estimates, "measure", counted)
    monkeypatch.setattr(estimates, "COMPARED_TOKENS", 4)
    with pytest.raises(KeyboardInterrupt):
        estimates.fit_estimator(rag, questions, interrupted)
    estimator = estimates.fit_estimator(rag, questions)
    assert len(measured) == LEAST_SAMPLE
    assert not (rag.root / "estimating.json").exists()
    library = rag.blender.library(rag.template.prefix)
    stored = rag.store.read_artifact(library.isolated.identity.quality_name)
    assert stored is not None
    assert Estimator.from_bytes(stored) == estimator
    assert estimates.fit_estimator(rag, questions) == estimator
