"""A prompt that is put together a second time has let go of the first one's memory: it was given room for one cache."""

import pytest
import torch
from models import LAYERS
from test_correction_bounds import GUIDED, hundredfold, with_map_changed
from test_loading import LAYOUT, filled

from blend.model.cache import BlendedLayer
from blend.prefill.blender import Blender
from blend.types import PromptLayout
from tests.store.reading import damage_caches


def most_at_once(blender: Blender, layout: PromptLayout, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of caches with room for a prompt, how many a prefill fills, and how many of them have their memory at one time."""
    made, counts, take = list[BlendedLayer](), list[int](), BlendedLayer.take

    def counting(layer: BlendedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer.capacity >= layout.rows and layer not in made:
            made.append(layer)  # held, as whoever runs the rows of an attempt does
            counts.append(sum(one is layer or one.is_initialized for one in made))
        take(layer, keys, values)

    monkeypatch.setattr(BlendedLayer, "take", counting)
    blender.prefill(layout, config=GUIDED)
    return len(made) // LAYERS, max(counts)


def test_one_whose_kv_correction_does_not_fit(monkeypatch):
    blender, layout = with_map_changed(hundredfold)
    assert most_at_once(blender, layout, monkeypatch) == (2, LAYERS)


def test_one_that_met_a_damaged_layer(tmp_path, monkeypatch):
    blender = filled(tmp_path)
    damage_caches(tmp_path)
    assert most_at_once(blender, LAYOUT, monkeypatch) == (2, LAYERS)
