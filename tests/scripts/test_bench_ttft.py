"""`scripts/bench_ttft --shape` and `scripts/bench_gpu` on a CPU: rows and resumption."""

import gc
import json

import pytest
import torch
from commands import main, output

from _results import Results
from _shapes import SHAPES
from _ttft import METHODS, Bench, random_subject

pytestmark = pytest.mark.timeout(600)  # processes that load torch


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Options of a run of seconds on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return ["--json", tmp_path / "gpu.json", "--only", "ttft:tiny", "--chunk-tokens", "128", "--rounds", "1"]


def rows(file):
    return json.loads(file.read_text(), parse_constant=pytest.fail)["ttft"]


def test_one_command_measures_all_methods_in_all_stores_and_goes_on_where_it_was_stopped(small, tmp_path, capfd):
    file = tmp_path / "gpu.json"
    assert main("bench_gpu", *small, "--minutes", "0") == 3
    assert "run the same command again" in capfd.readouterr().out
    assert not file.exists()
    output("bench_gpu", *small, CUDA_VISIBLE_DEVICES="")
    found = rows(file)
    assert [(row["store"], row["method"]) for row in found] == [(s, m) for s in ("memory", "disk") for m in METHODS]
    assert all(row["ttft_s"] > 0 and row["wrong"] is None and row["prompt"] == 1024 + 104 for row in found)
    blended = [row for row in found if row["method"] != "full"]
    assert all(row["over_floor"] > 0 and row["speedup"] > 0 and not row["notes"] for row in blended)
    assert {row["bytes_loaded"] for row in blended} == {1024 * 2 * 3 * 2 * 16 * 4}, "K and V, 3 layers, 2 heads of 16"
    assert not list(tmp_path.glob("tmp*")), "the disk store is gone"
    assert main("bench_gpu", *small) == 0
    assert rows(file) == found
    assert "1024" in capfd.readouterr().out


def test_rows_of_another_machine_are_not_mixed(tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"machine": {"cpu": "another"}, "ttft": []}))
    with pytest.raises(SystemExit, match="was measured on another machine"):
        main("bench_ttft", "--shape", "tiny", "--json", file)


def test_a_piece_that_there_is_none_of_is_refused(small, capsys):
    with pytest.raises(SystemExit):
        main("bench_gpu", *small, "--only", "ttft:9B")
    assert "no piece is called ttft:9B: name KIND" in capsys.readouterr().err


def test_only_rows_that_are_missing_are_measured(tmp_path, monkeypatch):
    """A model is made for them alone; all others stay."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that other tests hold
    made = []

    def load():
        made.append(1)
        return random_subject("tiny", torch.device("cpu"), torch.bfloat16, 16)

    def run(*lengths):
        return Bench(load, {"shape": "tiny"}, Results(tmp_path / "r.json"), 1).run(lengths, ["memory"])

    first = run(64)
    assert [row["method"] for row in first] == list(METHODS)
    assert run(64) == first
    assert len(made) == 1
    both = run(64, 96)
    assert (both[: len(METHODS)], len(both)) == (first, 2 * len(METHODS))


def test_out_of_memory_is_said_in_the_rows():
    def load():
        raise torch.OutOfMemoryError("no")

    rows = Bench(load, {"shape": "8B"}, Results(None), 1).run([4096], ["memory"])
    assert [row["why_not"] for row in rows] == ["out of GPU memory"] * len(METHODS)


@pytest.mark.parametrize(("shape", "billions"), [("0.5B", 0.494), ("1.5B", 1.544), ("8B", 8.03), ("70B-shard", 8.82)])
def test_shapes_are_those_of_the_models(shape, billions):
    """Parameters as the models' cards say them; 70B-shard has an eighth of 70.55 billion."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[shape].config(), dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
