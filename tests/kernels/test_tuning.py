import json

import pytest
import torch

from blend_kernels import tuning
from blend_kernels.tiles import Shape, Tile, candidates, chunks

TILES = [Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tiles.json"
    monkeypatch.setenv("BLEND_KERNELS_CACHE", str(path))
    monkeypatch.setenv("BLEND_KERNELS_TUNE", "1")
    tuning.forget()
    yield path
    tuning.forget()


def test_measures_once_and_remembers_across_processes(file):
    asked = []
    seconds = {TILES[0]: 3.0, TILES[1]: 1.0, TILES[2]: float("inf")}

    def measure(tile):
        asked.append(tile)
        return seconds[tile]

    assert tuning.choose("key", TILES, measure) == TILES[1]
    tuning.forget()
    assert tuning.choose("key", TILES, measure) == TILES[1]
    assert asked == TILES
    assert json.loads(file.read_text()) == {"key": list(TILES[1])}


def test_a_choice_that_is_no_longer_offered_is_measured_again(file):
    file.parent.mkdir()
    file.write_text(json.dumps({"key": [1, 2, 3, 4, False]}))
    assert tuning.choose("key", TILES, lambda tile: tile.rows) == TILES[2]


@pytest.mark.parametrize("content", ["{", "[]", '{"key": 7}'])
def test_a_damaged_file_is_ignored(file, content):
    file.parent.mkdir()
    file.write_text(content)
    assert tuning.choose("key", TILES, lambda tile: tile.rows) == TILES[2]


def test_can_be_switched_off(file, monkeypatch):
    monkeypatch.setenv("BLEND_KERNELS_TUNE", "0")
    assert tuning.choose("key", TILES, lambda tile: 1 / 0) == TILES[0]
    assert not file.exists()


@pytest.mark.parametrize(
    ("dim", "cut"), [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (112, (64, 64)), (192, (128, 64)), (8, (16, 0))]
)
def test_head_dims_are_cut_with_little_padding(dim, cut):
    assert chunks(dim) == cut
    assert sum(cut) >= dim


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [32, 80, 128, 192, 256])
@pytest.mark.parametrize("lines", [1, 20, 64, 5000])
@pytest.mark.parametrize("windowed", [False, True])
def test_every_kind_of_work_has_few_candidates_that_suit_it(major, dtype, dim, lines, windowed):
    tiles = candidates(major, Shape(dtype, dim, dim, lines, windowed, tma=True))
    assert 1 <= len(tiles) <= 4
    for tile in tiles:
        assert not tile.tma or (major in (9, 10) and not chunks(dim).second)
        assert tile.rows < 2 * max(16, lines) or dtype == torch.float32
