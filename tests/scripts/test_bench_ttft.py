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

import pytest
import torch
from ttft_rows import METHODS, held

pytestmark = pytest.mark.timeout(600)  # processes that load torch
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
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
    ours = top in ("blend", "blend_retrieval", "blend_kernels", "__main__") or top.startswith(("_", "bench_"))
    if ours and level == 0 and name.partition(".")[0] in {BLOCKED!r}:
        raise ImportError(f"{{name}} is not installed here, {{top}} asked for it")
    return found(name, globals, locals, fromlist, level)
builtins.__import__ = refused
"""


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
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env), file


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
    code = "exec('import filelock', {'__name__': 'blend.store'})"
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
