import argparse
import json

import pytest
import torch

from blend_kernels import attention_launch, selective_attention, tiles, tune
from blend_kernels.checks import Rule, Work
from blend_kernels.tiles import Kind, Machine, Shape, Tile, best_tile, candidates, chunks, key_of
from tests.kernels.test_selective_attention import make, scattered

H100 = Machine("H100", 9, "3.6.0")


def kind(lines=1024, group=4, **changed):
    shape = Shape(torch.bfloat16, 128, 128, lines, windowed=False, tma=True)
    return Kind(shape._replace(**changed), group, False)


GUESSES = candidates(9, kind().shape)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tiles.json"
    monkeypatch.setenv("BLEND_KERNELS_CACHE", str(path))
    tiles.forget()
    yield path
    tiles.forget()


def test_without_measurements_the_best_guess_is_taken(file):
    assert best_tile(H100, kind()) == GUESSES[0]
    assert not file.exists()


def test_measured_tiles_are_used_by_later_processes(file):
    tiles.save({key_of(H100, kind()): GUESSES[2]})
    tiles.save({key_of(H100, kind(lines=64)): candidates(9, kind(lines=64).shape)[1]})
    assert len(json.loads(file.read_text())) == 2
    assert best_tile(H100, kind()) == GUESSES[2]
    assert best_tile(H100, kind(lines=64)) == candidates(9, kind(lines=64).shape)[1]


@pytest.mark.parametrize(
    "work",
    [kind(lines=512), kind(group=8), kind(windowed=True), kind(tma=False), kind()._replace(capped=True)],
    ids=str,
)
def test_what_changes_the_kernel_is_a_kind_by_itself(work, file):
    tiles.save({key_of(H100, kind()): GUESSES[2]})
    assert best_tile(H100, work) == candidates(9, work.shape)[0]
    assert best_tile(H100._replace(triton="3.9.0"), kind()) == GUESSES[0]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"key": 7}', json.dumps({key_of(H100, kind()): [1, 2, 3, 4, False, 1]})]
)
def test_a_damaged_file_and_tiles_that_are_listed_no_more_are_ignored(content, file):
    file.parent.mkdir()
    file.write_text(content)
    assert best_tile(H100, kind()) == GUESSES[0]


@pytest.mark.parametrize(
    ("dim", "cut"), [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (112, (64, 64)), (192, (128, 64)), (8, (16, 0))]
)
def test_head_dims_are_cut_with_little_padding(dim, cut):
    assert chunks(dim) == cut
    assert sum(cut) >= dim


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [32, 80, 128, 192, 256])
def test_every_kind_of_work_has_few_candidates_that_suit_it(major, dtype, dim):
    for lines in (1, 20, 64, 128, 5000):
        for windowed in (False, True):
            listed = candidates(major, Shape(dtype, dim, dim, lines, windowed, tma=True))
            assert 1 <= len(listed) <= 5
            assert len(set(listed)) == len(listed)
            for tile in listed:
                assert not tile.tma or (major in (9, 10) and not chunks(dim).second)
                assert tile.rows < 2 * max(16, lines) or dtype == torch.float32


class _OnGpu(torch.Tensor):
    """A tensor without memory that says it is on a GPU, which is all that choosing looks at."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def test_a_call_takes_its_tile_without_measuring(file, monkeypatch):
    monkeypatch.setattr(attention_launch, "machine", lambda device: H100)
    monkeypatch.setattr(attention_launch, "takes_tma", lambda x: True)
    rule = Rule("exact", None, None, 0.1)
    for rows, lines in ((1, 16), (64, 256), (2048, 1024), (3000, 1024)):
        q = torch.empty(1, 32, rows, 128, dtype=torch.bfloat16, device="meta").as_subclass(_OnGpu)
        k = torch.empty(1, 8, 131_072, 128, dtype=torch.bfloat16, device="meta").as_subclass(_OnGpu)
        work = Work(q, k, k, torch.empty(rows), rule)
        # a GPU that is not there cannot be waited for
        assert attention_launch.choose_tile(work) == candidates(9, kind(lines=lines).shape)[0]
        assert attention_launch.choose_tile(work._replace(v=None)) == attention_launch.choose_tile(work)


SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--keys", "400"]


@pytest.fixture
def tuner(file, device, monkeypatch):
    """The tuner on small work, with seconds by tile in place of a clock."""
    seconds = {}
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        tune, "works", lambda options, _, works=tune.works: list(works(options, torch.device(device)))[:1]
    )
    monkeypatch.setattr(tune, "graph_seconds", lambda run: run() and seconds.setdefault("next", []).pop(0))
    return seconds


def test_the_tuner_writes_the_fastest_tile_of_each_kind(tuner, file, device, capsys):
    tuner["next"] = [2.0, 1.0]
    assert tune.main(SMALL) == 0
    assert tuner["next"] == []
    ((key, tile),) = json.loads(file.read_text()).items()
    assert "/torch.bfloat16/16/16/16/False/" in key
    major = attention_launch.machine(torch.device(device)).major
    assert tile == list(candidates(major, kind(lines=16, dim=16, value_dim=16, tma=False).shape)[1])
    assert "1000.000 ms" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_works_have_folded_rows_in_powers_of_two_and_last_a_share_of_all():
    options = argparse.Namespace(
        dtype="float32", keys=1000, heads=4, kv_heads=2, head_dim=16, value_dim=None, window=9, softcap=None
    )
    works = list(tune.works(options, torch.device("cpu")))
    assert [work.q.shape[2] * 2 for work in works] == [16, 32, 64, 128, 256, 512, 300]
    for work in works:
        assert selective_attention(work.q, work.k, work.v, work.positions, window=9).isfinite().all()


def _failures():
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    yield CompilationError("", None, "cannot compile")
    yield OutOfResources(300_000, 232_448, "shared memory")
    yield PTXASError("ptxas died")
    yield RuntimeError("PassManager::run failed")


def small_work(device):
    q, k, v = make(device, rows=5)
    return Work(q, k, v, scattered(5, 63, device), Rule("exact", None, None, 0.2))


def _raising(error):
    def launch(*_arguments):
        raise error

    return launch


def test_a_tile_that_cannot_run_is_none(device, monkeypatch):
    for failure in _failures():
        monkeypatch.setattr(attention_launch, "launch_attention", _raising(failure))
        assert tune.measured_seconds(small_work(device), Tile(16, 16, 4, 1)) == float("inf")


def test_an_error_of_the_call_is_no_property_of_the_tile(device, monkeypatch):
    monkeypatch.setattr(attention_launch, "launch_attention", _raising(RuntimeError("CUDA error: device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        tune.measured_seconds(small_work(device), Tile(16, 16, 4, 1))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_tile_has_no_time(wrong, device, monkeypatch):
    work, launch = small_work(device), attention_launch.launch_attention

    def spoiled(*arguments):
        out, lse = launch(*arguments)
        out[0, 1, 3, 7] += 0.5 if wrong else 0.0
        return out, lse

    monkeypatch.setattr(attention_launch, "launch_attention", spoiled)
    monkeypatch.setattr(tune, "graph_seconds", lambda run: 1.0)
    seconds = tune.measured_seconds(work, Tile(16, 16, 4, 1))
    assert tune.describe(seconds) == ("wrong result" if wrong else "1000.000 ms")
