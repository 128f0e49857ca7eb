"""Stored layers are read ahead of the forward pass that needs them: it waits for no more than its next layer."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from blends import filled, texts
from cases import assert_same_blend, make_layout
from models import LAYERS, decoder
from test_correction_bounds import GUIDED, with_map_scaled

from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.layout import PromptLayout
from blend.model.cache import BlendedLayer
from blend.prefill.blender import Blender
from tests.store.reading import damage_caches, flip, open_descriptors, path_of, watched

LAYOUT = make_layout()


def on_disk(folder: Path) -> Blender:
    """Over a store that keeps nothing in memory: every prompt reads its caches."""
    return filled(decoder("llama"), LAYOUT, location=folder)


def assert_nothing_is_left(opened: list[Any], descriptors: int) -> None:
    assert opened
    assert all(reader.closed for reader in opened)
    assert open_descriptors() == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvblend-loader")]


@pytest.mark.parametrize("selector", ["none", "query_guided", "first_k", "hkvd"])
def test_a_layer_is_computed_while_later_ones_are_still_to_be_read(selector, tmp_path, monkeypatch):
    """The store holds the last layer back until the first one has been computed: all at once beforehand would wait for ever."""
    blender, config = on_disk(tmp_path), BlendConfig(selector, ratio=0.3)
    expected = blender.prefill(LAYOUT, config=config)
    first = threading.Event()
    waited: list[bool] = []

    def before(layer: int) -> None:
        if layer == LAYERS - 1:
            waited.append(first.wait(60))

    watched(blender.store, monkeypatch, before)
    with blender.decoder.layers[0].register_forward_hook(lambda *_: first.set()):
        blend = blender.prefill(LAYOUT, config=config)
    assert waited == [True] * len(LAYOUT.chunks)
    assert_same_blend(blend, expected)


def test_every_layer_is_read_meanwhile(tmp_path, monkeypatch):
    """The first layer does not end before the last one is being read."""
    blender, last = on_disk(tmp_path), threading.Event()
    watched(blender.store, monkeypatch, lambda layer: last.set() if layer == LAYERS - 1 else None)
    reached: list[bool] = []
    with blender.decoder.layers[0].register_forward_hook(lambda *_: reached.append(last.wait(60))):
        blender.prefill(LAYOUT, config=BlendConfig("none"))
    assert reached == [True]


def test_an_outage_in_the_middle_is_raised_and_leaves_nothing_behind(tmp_path, monkeypatch):
    blender = on_disk(tmp_path)

    def before(layer: int) -> None:
        if layer == 2:
            raise StoreError("the network is down")

    opened, descriptors = watched(blender.store, monkeypatch, before), open_descriptors()
    for _ in range(3):
        with pytest.raises(StoreError, match="the network is down"):
            blender.prefill(LAYOUT)
    assert_nothing_is_left(opened, descriptors)
    monkeypatch.undo()
    assert blender.prefill(LAYOUT).hits == (True,) * len(LAYOUT.chunks)


@pytest.mark.parametrize("refused", [0, 1])
def test_a_system_without_more_threads_is_an_error_that_leaves_nothing_behind(refused, tmp_path, monkeypatch):
    blender = on_disk(tmp_path)
    opened, descriptors = watched(blender.store, monkeypatch, lambda layer: None), open_descriptors()
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == f"kvblend-loader_{refused}":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        blender.prefill(LAYOUT)
    assert_nothing_is_left(opened, descriptors)


def test_damage_in_the_last_layer_costs_one_more_attempt_and_no_wrong_row(tmp_path):
    blender, whole = on_disk(tmp_path), on_disk(tmp_path / "whole")
    for chunk in LAYOUT.chunks[1:3]:
        key = blender.encoder(LAYOUT.prefix).identity.key(chunk)
        flip(path_of(blender.store, key), -1)
        whole.store.delete(key)
    blend, expected = blender.prefill(LAYOUT), whole.prefill(LAYOUT)
    assert blend.hits == expected.hits == (True, False, False, True)
    assert len(blend.problems) == 2
    assert torch.equal(blend.logits, expected.logits)


def test_threads_end_with_the_prefill(tmp_path):
    blender = on_disk(tmp_path)
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for selector in ("none", "query_guided", "all"):
        blender.prefill(LAYOUT, config=BlendConfig(selector))
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() == descriptors


def test_what_takes_the_place_of_a_damaged_entry_may_be_damaged_too(tmp_path):
    """The contextual cache and the isolated one behind it, both in a layer that is read late."""
    blender = on_disk(tmp_path)
    library = with_surrogate(blender.library(LAYOUT.prefix), texts(*[14] * 16), 28)
    library.compute(library.missing(LAYOUT.chunks))
    damage_caches(tmp_path)
    blend = blender.prefill(LAYOUT)
    assert blend.hits == (False,) * len(LAYOUT.chunks)
    assert len(blend.problems) == 2 * len(LAYOUT.chunks) - 1
    assert torch.allclose(blend.logits, blender.prefill(LAYOUT, config=BlendConfig("all")).logits, atol=1e-5)


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


def test_a_second_attempt_without_the_kv_correction_has_let_go_of_the_firsts_memory(monkeypatch):
    blender, layout = with_map_scaled(100)
    assert most_at_once(blender, layout, monkeypatch) == (2, LAYERS)


def test_a_second_attempt_without_a_damaged_layer_has_let_go_of_the_firsts_memory(tmp_path, monkeypatch):
    blender = on_disk(tmp_path)
    damage_caches(tmp_path)
    assert most_at_once(blender, LAYOUT, monkeypatch) == (2, LAYERS)
