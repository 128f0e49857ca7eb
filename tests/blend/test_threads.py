"""Threads beside the model's must not make helpers of their own: with more threads than cores all of them go to sleep."""

from __future__ import annotations

import threading

import pytest
import torch
from cases import cache_chunks, make_layout
from models import decoder

from blend.blender import Blender
from blend.chunks import loader
from blend.config import BlendConfig
from blend.store import open_store


@pytest.mark.parametrize("count", [2, 3])
def test_loading_threads_compute_alone_and_leave_everybody_else_his_threads(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blender, layout = Blender(decoder("llama"), open_store("memory:")), make_layout()
    cache_chunks(blender, layout)
    seen: list[int] = []
    plain = loader.LayerLoader._wait

    def wait(self: loader.LayerLoader, layer: int) -> bool:
        seen.append(torch.get_num_threads())
        return plain(self, layer)

    monkeypatch.setattr(loader.LayerLoader, "_wait", wait)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        blender.prefill(layout, config=BlendConfig(ratio=0.3))
        assert torch.get_num_threads() == count
        new: list[int] = []
        thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert new == [count]
    finally:
        torch.set_num_threads(before)
    assert seen
    assert set(seen) == {1}
