"""`scripts/bench_ttft --shape` and `scripts/bench_gpu` on a CPU: rows and resumption."""

import gc
import json

import pytest
import torch
from commands import ROOT, main, output

from _results import Results
from _shapes import SHAPES
from _ttft import METHODS, Bench, random_subject
from _turns import comparison, rows_in_turns

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


def test_the_disk_store_stands_in_the_folder_with_its_codec(tmp_path, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that other tests hold
    sizes = []

    def read_rate(folder):
        assert folder.parent == tmp_path
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*.safetensors")))
        return 1e9

    monkeypatch.setattr("_ttft.read_rate", read_rate)
    for codec in ("int8", "bfloat16"):
        subject = random_subject("tiny", torch.device("cpu"), torch.float32, 16)
        Bench(lambda subject=subject: subject, {}, Results(None), 1, codec, tmp_path).run([64], ["disk"])
    assert 0 < sizes[0] < sizes[1]
    assert not list(tmp_path.iterdir()), "the stores are gone"


def test_two_checkouts_take_turns():
    options = ("--shape", "tiny", "--lengths", "64", "--chunk-tokens", "16", "--stores", "memory", "--rounds", "2")
    printed = output("bench_ttft", *options, "--threads", "1", "--against", ROOT, CUDA_VISIBLE_DEVICES="")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    rows = [line for line in lines if line[0] == "64"]
    assert [row[2] for row in rows] == list(METHODS)
    assert all(row[3].endswith(" ms") and row[4].endswith(" ms") and float(row[5]) > 0 and not row[7] for row in rows)


def test_a_prefill_waits_for_its_turn(tmp_path):
    """Of two checkouts with scripts of a few lines: each prefill of one is followed by the other's."""
    log = tmp_path / "log"
    checkouts = []
    for name in ("here", "there"):
        scripts = tmp_path / name / "scripts"
        scripts.mkdir(parents=True)
        (scripts / "_paths.py").write_text("")
        (scripts / "_ttft.py").write_text(
            "def run_once(words):\n    with open(words[0], 'a') as log:\n        log.write(words[1])\n"
        )
        (scripts / "bench_ttft").write_text(f"""
import json, sys, _ttft
for turn in "12345":
    _ttft.run_once([{str(log)!r}, {name[0]!r} + turn + " "])
row = {{"tokens": 8, "store": "memory", "method": "full", "ttft_s": 2.0, "all_s": [{len(name)}.0, 2.0]}}
json.dump({{"ttft": [row]}}, open(sys.argv[-1], "w"))
""")
        checkouts.append(tmp_path / name)
    rows, other_rows = rows_in_turns(*checkouts, [])
    assert log.read_text() == "".join(f"h{turn} t{turn} " for turn in "12345")
    (line,) = [line for line in comparison(rows, other_rows) if line.startswith("| 8")]
    assert line == "| 8 | memory | full | 2000.0 ms | 2000.0 ms | 0.900 | 0.800 to 1.000 |  |"


def test_a_checkout_that_cannot_be_asked_ends_it_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"no checkout of kvblend with scripts/_ttft.py"):
        rows_in_turns(ROOT, tmp_path, [])
    with pytest.raises(SystemExit, match="bench_ttft ended with 2 and no rows; does it have these options"):
        rows_in_turns(ROOT, ROOT, ["--no-such-option"])


def test_rows_that_one_checkout_lacks_are_named():
    row = {"tokens": 8, "store": "memory", "method": "full", "ttft_s": 2.0, "all_s": [2.0]}
    new, old = {**row, "method": "new"}, {**row, "method": "old", "wrong": "no"}
    wrong = {**row, "wrong": "not finite"}
    lines = [line.split(" | ")[2:] for line in comparison([row, new], [wrong, old])][3:]
    assert [line[0] for line in lines] == ["full", "new", "old"]
    assert lines[0][-1] == "WRONG there: not finite |"
    assert [line[1] for line in lines[1:]] == ["only here |", "only there |"]


@pytest.mark.parametrize(("shape", "billions"), [("0.5B", 0.494), ("1.5B", 1.544), ("8B", 8.03), ("70B-shard", 8.82)])
def test_shapes_are_those_of_the_models(shape, billions):
    """Parameters as the models' cards say them; 70B-shard has an eighth of 70.55 billion."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[shape].config(), dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
