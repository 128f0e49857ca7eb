"""`Rag.warm_up` rehearses what a question runs, once, and leaves no trace."""

from pathlib import Path

import pytest

from blend import BlendConfig, Rag
from blend.prefill.blender import Blend as Prefilled
from blend.prefill.blender import Blender


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and what is in it; times are left out, because a store notes when an entry was last used."""
    return {str(p): (p.stat().st_ino, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("selector", ["hkvd", "query_guided"])
def test_warm_up_runs_every_step_and_stores_nothing(filled, monkeypatch, selector):
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
