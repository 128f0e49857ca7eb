"""`Rag.warm_up` rehearses what a question runs, once, and leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from blend_process import Blend

from blend import BlendConfig, Rag
from blend.blender import Blend as Prefilled
from blend.blender import Blender
from blend.errors import PromptError


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and what is in it; times are left out, because a store notes when an entry was last used."""
    return {str(p): (p.stat().st_ino, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("selector", ["hkvd", "query_guided"])
def test_warm_up_runs_every_step_and_stores_nothing(
    filled: Blend, monkeypatch: pytest.MonkeyPatch, selector: str
) -> None:
    assert filled.store is not None
    prefilled: list[Prefilled] = []
    prefill = Blender.prefill

    def spy(*arguments: object, **options: object) -> Prefilled:
        prefilled.append(prefill(*arguments, **options))  # type: ignore[arg-type]
        return prefilled[-1]

    full: list[int] = []
    monkeypatch.setattr(Blender, "prefill", spy)
    monkeypatch.setattr("blend.rag.full_prefill", lambda decoder, layout: full.append(layout.rows))
    before = _files(filled.store)
    rag = Rag(filled.store, model=str(filled.model), device="cpu", blend=BlendConfig(selector=selector, ratio=0.3))
    rag.warm_up()
    assert full == []
    rag.warm_up(compare=True)
    rag.warm_up(compare=True)
    assert _files(filled.store) == before
    (rehearsal,) = prefilled
    assert rehearsal.hits == (True, False)
    assert {"load", "reposition", "select", "recompute", "first_token"} <= set(rehearsal.stages)
    assert rehearsal.rows_recomputed < rehearsal.layout.rows - len(rehearsal.layout.prefix)  # it narrowed
    assert full == [rehearsal.layout.rows]


def test_python_in_five_lines(filled: Blend, documents: Path) -> None:
    assert filled.store is not None
    rag = Rag(filled.store / "other", model=str(filled.model), blend=BlendConfig(ratio=0.15))
    assert rag.precompute(documents).computed > 0
    answer = rag.answer("When did the orchard open?", compare=True, max_new_tokens=4)
    assert answer.full is not None
    assert answer.text
    assert min(answer.ttft_s, answer.full.ttft_s) > 0
    assert all(answer.blend.hits)
    with pytest.raises(PromptError, match="empty"):
        rag.answer("  ")
    assert rag.precompute(str(documents / "market.md"), add=True).computed == 0
    assert len(rag.index.chunks) == len({hit.chunk.id for hit in rag.retriever.search("orchard", 999)})
