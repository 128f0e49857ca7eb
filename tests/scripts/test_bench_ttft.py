"""`scripts/bench_ttft --shape` and `scripts/bench_gpu` on a CPU: rows, resumption, and what is not needed for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
METHODS = ["full", "reuse", "query_guided 5 %", "query_guided 15 %", "hkvd 15 %"]
# Installed wherever kvblend is, but not on a GPU machine that was made for something else.
BLOCKED = (
    "click", "faiss", "filelock", "markdown_it", "matplotlib", "rich", "semantic_text_splitter", "sentence_transformers",
)  # fmt: skip
# Only our own imports are refused: other libraries bring theirs, or do without.
BLOCKER = f"""
import builtins, sys
found = builtins.__import__
def refused(name, globals=None, locals=None, fromlist=(), level=0):
    top = (globals or {{}}).get("__name__", "").partition(".")[0]
    ours = top in ("blend", "retrieval", "blend_kernels", "__main__") or top.startswith(("_", "bench_"))
    if ours and level == 0 and name.partition(".")[0] in {BLOCKED!r}:
        raise ImportError(f"{{name}} is not installed here, {{top}} asked for it")
    return found(name, globals, locals, fromlist, level)
builtins.__import__ = refused
"""


def held(file: Path) -> dict[str, Any]:
    """The file as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(file.read_text(), parse_constant=refuse)
    return found


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: Python imports its `sitecustomize` at every start, children's too."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, blocked: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One whole run of the one command at the tiny shape, where nothing but the few libraries can be imported."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(blocked)}
    command = [sys.executable, str(SCRIPTS / "bench_gpu"), *small(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env), file


def small(file: Path) -> list[str]:
    """Arguments of a run of seconds."""
    return [
        *("--json", str(file), "--only", "ttft:tiny:256", "--chunk-tokens", "32", "--rounds", "1"),
        *("--stores", "memory", "disk", "--folder", str(file.parent)),
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`scripts/bench_gpu` in this process, which starts those that measure."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    loader = SourceFileLoader("bench_gpu", str(SCRIPTS / "bench_gpu"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader.exec_module(module)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_gpu", *arguments])
        return int(module.main())

    return run


def test_the_blocker_blocks(blocked: Path) -> None:
    code = "import blend.store.artifacts as a, types; exec('import filelock', {'__name__': 'blend.store'})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (blocked, ROOT)))}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "filelock is not installed here" in result.stderr


def test_one_command_measures_all_methods_in_all_stores(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    result, file = measured
    assert result.returncode == 0, result.stderr
    rows = held(file)["ttft"]
    stores = [("", METHODS[:1]), ("memory", METHODS[1:]), ("disk", METHODS[1:])]
    assert [(row["store"], row["method"]) for row in rows] == [(s, m) for s, methods in stores for m in methods]
    assert all(row["ttft_s"] > 0 and row["wrong"] is None and row["prompt"] == 256 + 104 for row in rows)
    assert all(row["over_floor"] > 0 and row["speedup"] > 0 and not row["notes"] for row in rows[1:])
    assert all(row["bytes_loaded"] == 256 * 2 * 3 * 2 * 16 * 4 for row in rows[1:]), (
        "K and V, 3 layers, 2 heads of 16, fp32"
    )
    assert [row["held"].split(",")[-1] for row in rows[1:]] == ["memory"] * 4 + [" in the page cache"] * 4
    assert not list(file.parent.glob("tmp*")), "the disk store is gone"


def test_the_file_says_what_it_was_measured_on_and_the_verdicts(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    result, file = measured
    found = held(file)
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert found["goals"][-1].startswith("PASS ")
    assert "9 of 9 rows" in found["goals"][-1]
    assert all(goal.startswith("not measured") for goal in found["goals"][:-1])
    assert all(goal in result.stdout for goal in found["goals"])
    if not torch.cuda.is_available():
        assert "no CUDA GPU here" in result.stderr


def test_time_that_is_up_loses_nothing(
    measured: tuple[subprocess.CompletedProcess[str], Path],
    gpu: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped while a process measures, and before one starts."""
    file = tmp_path / "gpu.json"
    file.write_bytes(measured[1].read_bytes())
    for minutes in ("0.005", "0"):
        assert gpu(*small(file), "--minutes", minutes) == 3
        assert "run the same command again" in capsys.readouterr().out
        assert held(file)["ttft"] == held(measured[1])["ttft"]


def test_rows_of_another_machine_are_not_mixed(
    measured: tuple[subprocess.CompletedProcess[str], Path],
    gpu: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, before = tmp_path / "gpu.json", held(measured[1])
    before["environment"]["gpu"] = "another GPU"
    file.write_text(json.dumps(before))
    assert gpu(*small(file)) == 2
    assert "was measured with gpu another GPU" in capsys.readouterr().err
    assert held(file) == before


@pytest.mark.parametrize(
    ("piece", "says"),
    [("kernels:8B", "the kernels need a CUDA GPU"), ("ttft:9B", "there is no piece 'ttft:9B'"), ("kernel", "no piece")],
)
def test_a_piece_that_cannot_be_is_refused_in_one_line(
    gpu: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    piece: str,
    says: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu("--json", str(tmp_path / "gpu.json"), "--only", piece) == 2
    found = capsys.readouterr().err
    assert says in found
    assert len(found.splitlines()) == 1
    assert not (tmp_path / "gpu.json").exists()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _shapes
    import _stores
    import _ttft

    class Parts:
        shapes, stores, ttft = _shapes, _stores, _ttft

    return Parts


def only(parts: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Full prefill and one method, to be quick."""
    monkeypatch.setattr(parts.ttft, "METHODS", {method: parts.ttft.METHODS[method]})


@pytest.fixture
def bench(parts: Any, tmp_path: Path) -> Any:
    """A bench of the tiny shape, in bf16 as on a GPU."""
    from _results import Results

    def make(file: Path | None = None, **changed: Any) -> Any:
        options = {
            "shape": "tiny", "device": torch.device("cpu"), "dtype": torch.bfloat16, "chunk_tokens": 16, "codec": "bfloat16",
            "correction": "neutral", "rounds": 1, "stores": ("memory",), "folder": tmp_path,
        }  # fmt: skip
        return parts.ttft.Bench(parts.ttft.Plan(**{**options, **changed}), Results(file), resume=True)

    return make


def test_rows_are_written_one_by_one_and_the_lost_one_again(bench: Any, tmp_path: Path) -> None:
    """The file holds every row before the next is measured; what a killed call lost is measured, all others stay."""
    file, seen = tmp_path / "r.json", []
    made = bench(file)
    put = made.results.put

    def watched(table: str, key: Any, row: Any) -> None:
        put(table, key, row)
        seen.append([each["method"] for each in held(file)["ttft"]])

    made.results.put = watched
    made.run([64])
    assert seen == [METHODS[:count] for count in range(1, 6)]
    whole = held(file)["ttft"]
    file.write_text(json.dumps({"ttft": whole[:-1], "more": 1}))
    again = bench(file).run([64])
    assert again[:-1] == whole[:-1]
    assert again[-1]["method"] == METHODS[-1]
    assert again[-1]["when"] >= whole[-1]["when"]
    assert again[-1] != whole[-1]
    assert held(file) == {"ttft": again, "more": 1}
    last = bench(file)
    assert last.run([64]) == again
    assert "decoder" not in last.__dict__, "a model is made for rows that are lacking"


def test_the_neutral_correction_is_applied_in_every_layer_and_changes_nothing(bench: Any, parts: Any) -> None:
    from blend import BlendConfig, Blender, open_store

    made = bench()
    layout = parts.shapes.random_layout(512, 96, 16)
    others = [parts.shapes.random_ids(512, 16, 100 + number) for number in range(16)]
    found = {}
    for correction in ("neutral", "off"):
        store = open_store("memory:")
        parts.stores.fill(made.decoder, store, layout, others, correction)
        blender = Blender(made.decoder, store)
        for contextual in (False, True):
            held = blender.correction(layout.prefix, contextual=contextual)
            assert (held is not None) == (correction == "neutral")
            assert held is None or sum(layer is not None for layer in held.layers) == 2
        found[correction] = blender.prefill(layout, config=BlendConfig(ratio=0.15))
    assert found["neutral"].correction_fits
    torch.testing.assert_close(found["neutral"].logits, found["off"].logits, rtol=0, atol=0)


def test_a_fitted_correction_and_none_are_measured_too(bench: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(parts, monkeypatch, "query_guided 15 %")
    for correction in ("fitted", "off"):
        assert [row["wrong"] for row in bench(correction=correction).run([64])] == [None] * 2


def test_every_store_holds_the_same_caches_one_after_another(bench: Any, parts: Any, tmp_path: Path) -> None:
    """The logits from each store are those from the first, and a store is empty when the next one is full."""
    from blend import Blender, open_store

    made, layout = bench(), parts.shapes.random_layout(512, 96, 16)
    first = open_store("memory:")
    parts.stores.fill(
        made.decoder, first, layout, [parts.shapes.random_ids(512, 16, n) for n in range(100, 116)], "neutral"
    )
    expected, entries = Blender(made.decoder, first).prefill(layout), first.stats().entries
    target = open_store(tmp_path / "store")
    parts.stores.move(first, target)
    assert (first.stats().entries, target.stats().entries) == (0, entries)
    again = Blender(made.decoder, target).prefill(layout)
    assert all(again.hits)
    torch.testing.assert_close(again.logits, expected.logits, rtol=0, atol=0)


def test_a_prompt_that_does_not_fit_says_so_in_its_rows(
    bench: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.shapes, "free_host_bytes", lambda: 1 << 10)
    made = bench(shape="8B")
    rows = made.run([4096])
    assert "decoder" not in made.__dict__
    assert all(row["why_not"].endswith("GiB of memory, 0.0 GiB are free") for row in rows)


def test_cold_rows_are_cold_or_say_why_not(bench: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(parts, monkeypatch, "reuse")
    full, cold = bench(stores=("disk-cold",)).run([64])
    assert full["method"] == "full"
    assert cold.get("held", "").endswith("cold") or "does not forget" in cold["why_not"]


@pytest.mark.parametrize(
    ("shape", "billions", "kib_a_token"),
    [("0.5B", 0.494, 12), ("1.5B", 1.544, 28), ("8B", 8.03, 128), ("70B-shard", 8.82, 40)],
)
def test_shapes_are_those_of_the_models(parts: Any, shape: str, billions: float, kib_a_token: int) -> None:
    """Parameters and bf16 KV of a token, as the models' cards say them; 70B-shard has an eighth of 70.55 billion."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parts.shapes.SHAPES[shape].config(), dtype=torch.bfloat16)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == pytest.approx(billions * 1e9, rel=1e-3)
    assert parts.shapes.SHAPES[shape].parameters == pytest.approx(numbers, rel=1e-3)
    assert parts.shapes.SHAPES[shape].kv_width * 2 == kib_a_token << 10
