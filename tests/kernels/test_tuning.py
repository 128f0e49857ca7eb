import json

import pytest
import torch

from blend_kernels import attention_launch, tiles
from blend_kernels.checks import Rule, Work
from blend_kernels.tiles import Shape, Tile, candidates, chunks

TILES = [Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 3)]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tiles.json"
    monkeypatch.setenv("BLEND_KERNELS_CACHE", str(path))
    monkeypatch.setenv("BLEND_KERNELS_TUNE", "1")
    tiles.forget()
    yield path
    tiles.forget()


def test_measures_once_and_remembers_across_processes(file):
    asked = []
    seconds = {TILES[0]: 3.0, TILES[1]: 1.0, TILES[2]: float("inf")}

    def measure(tile):
        asked.append(tile)
        return seconds[tile]

    assert tiles.choose("key", TILES, measure) == TILES[1]
    tiles.forget()
    assert tiles.choose("key", TILES, measure) == TILES[1]
    assert asked == TILES
    assert json.loads(file.read_text()) == {"key": list(TILES[1])}


def test_a_choice_that_is_no_longer_offered_is_measured_again(file):
    file.parent.mkdir()
    file.write_text(json.dumps({"key": [1, 2, 3, 4, False]}))
    assert tiles.choose("key", TILES, lambda tile: tile.rows) == TILES[2]


def test_when_no_tile_runs_the_best_guess_is_taken_and_not_remembered(file):
    assert tiles.choose("key", TILES, lambda tile: float("inf")) == TILES[0]
    assert not file.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"key": 7}'])
def test_a_damaged_file_is_ignored(file, content):
    file.parent.mkdir()
    file.write_text(content)
    assert tiles.choose("key", TILES, lambda tile: tile.rows) == TILES[2]


def test_can_be_switched_off(file, monkeypatch):
    monkeypatch.setenv("BLEND_KERNELS_TUNE", "0")
    assert tiles.choose("key", TILES, lambda tile: 1 / 0) == TILES[0]
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


class _OnGpu(torch.Tensor):
    """A tensor without memory that says it is on a GPU, which is all that choosing looks at."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def heavy(rows=2048, values=True, window=None, softcap=None, kv_heads=8):
    q = torch.empty(1, 32, rows, 128, dtype=torch.bfloat16, device="meta").as_subclass(_OnGpu)
    k = torch.empty(1, kv_heads, 131_072, 128, dtype=torch.bfloat16, device="meta").as_subclass(_OnGpu)
    return Work(q, k, k if values else None, torch.empty(rows), Rule("exact", window, softcap, 0.1))


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(attention_launch, "machine", lambda device: ("H200", 9, "3.9"))
    monkeypatch.setattr(attention_launch, "key_descriptor", lambda x, tile: None)
    monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_what_changes_the_kernel_changes_the_key_of_a_choice(h200, monkeypatch):
    keys = []
    monkeypatch.setattr(attention_launch, "choose", lambda key, tiles, measure: keys.append(key) or tiles[0])
    calls = [heavy(), heavy(values=False), heavy(rows=64), heavy(window=4096), heavy(softcap=30.0), heavy(kv_heads=4)]
    for work in (*calls, heavy(rows=3000)):
        attention_launch.choose_tile(work)
    assert len(set(keys[:-1])) == len(calls)
    assert keys[-1] == keys[0]


def _failures():
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    yield CompilationError("", None, "cannot compile")
    yield OutOfResources(300_000, 232_448, "shared memory")
    yield PTXASError("ptxas died")
    yield RuntimeError("PassManager::run failed")


def test_a_tile_that_cannot_run_takes_for_ever(h200, monkeypatch):
    for failure in _failures():
        monkeypatch.setattr(attention_launch, "launch_attention", _raising(failure))
        assert attention_launch.measured_seconds(heavy(), TILES[0]) == float("inf")


def test_an_error_of_the_call_is_no_property_of_the_tile(h200, monkeypatch):
    monkeypatch.setattr(attention_launch, "launch_attention", _raising(RuntimeError("CUDA error: device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        attention_launch.measured_seconds(heavy(), TILES[0])


def _raising(error):
    def launch(*_args):
        raise error

    return launch
