"""examples/kvblend.ipynb in a fresh kernel, with a real model; and the outputs that it is kept with."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from example_server import environment
from places import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "kvblend.ipynb"
nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient")


def _shown(notebook: Any) -> tuple[str, list[str]]:
    """What the cells printed, and the kinds of their pictures."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    kinds = [kind for output in outputs for kind in output.get("data", {}) if kind.startswith("image/")]
    return printed, kinds


def _check(notebook: Any) -> None:
    printed, pictures = _shown(notebook)
    assert pictures == ["image/png"] * 2
    assert printed.count("Tomas Reed") >= 3, "blended, with full prefill, and by the model's own generate"
    assert int(re.findall(r"(\d+)% of the rows computed", printed)[0]) < 30
    (rows, stored, computed) = re.findall(r"rows=(\d+), rows_stored=(\d+), rows_computed=(\d+)", printed)[0]
    assert int(stored) > 0.8 * int(rows)
    assert int(computed) < 0.4 * int(rows)


def test_the_notebook_is_kept_with_what_it_shows():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    _check(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run from top to bottom"
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(root|home|work|tmp)/|Warning|Traceback", text)


@pytest.mark.real
def test_the_notebook_runs_in_a_fresh_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
    for name in set(os.environ) - set(env):
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3", resources=place).execute()
    _check(notebook)
