"""`Rag.warm_up` rehearses what a question runs, once, and leaves no trace."""

import pytest

from blend import BlendConfig, Rag
from blend.prefill.blender import Blend as Prefilled
from blend.prefill.blender import Blender


@pytest.mark.parametrize("selector", ["hkvd", "query_guided"])
def test_warm_up_runs_every_step_and_stores_nothing(filled, monkeypatch, selector):
    prefilled: list[Prefilled] = []
    full: list[int] = []
    prefill = Blender.prefill

    def spy(*arguments, **options):
        prefilled.append(prefill(*arguments, **options))
        return prefilled[-1]

    def files():
        """Times are left out, because a store notes when an entry was last used."""
        return {path: (path.stat().st_ino, path.read_bytes()) for path in filled.store.rglob("*") if path.is_file()}

    monkeypatch.setattr(Blender, "prefill", spy)
    monkeypatch.setattr("blend.rag.full_prefill", lambda decoder, layout: full.append(layout.rows))
    before = files()
    rag = Rag(filled.store, model=str(filled.model), device="cpu", blend=BlendConfig(selector=selector, ratio=0.3))
    rag.warm_up()
    assert full == []
    for _ in range(2):
        rag.warm_up(compare=True)
    assert files() == before
    (rehearsal,) = prefilled
    assert rehearsal.hits == (True, False)
    assert {"load", "reposition", "select", "recompute", "first_token"} <= set(rehearsal.stages)
    assert rehearsal.rows_recomputed < rehearsal.layout.rows - len(rehearsal.layout.prefix)  # it narrowed
    assert full == [rehearsal.layout.rows]
