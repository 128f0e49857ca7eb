"""Importing is free, and the public surface is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from imports import ROOT
from places import PYTHONPATH

import blend

HEAVY = (
    "torch",
    "transformers",
    "triton",
    "faiss",
    "sentence_transformers",
    "matplotlib",
    "numpy",
    "rich",
    "safetensors",
    "gguf",
)
LIGHT = (
    "blend",
    "blend_retrieval",
    "blend_retrieval.apart",
    "blend_kernels",
    "blend.cli",
    "blend.config",
    "blend.errors",
    "blend.eval",
    "blend.types",
    "blend.store",
    "blend.select",
    "blend.weights",
)


def _python(code: str) -> str:
    """Output of a fresh interpreter that sees the source tree; another folder must not help it."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False, cwd=ROOT / "tests"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module: str) -> None:
    loaded = _python(f"import {module}, sys; print(*({set(HEAVY)!r} & set(sys.modules)))")
    assert loaded == ""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = set(HEAVY) - {"rich"}
    code = f"""
import sys
sys.argv = ["blend", *{arguments!r}]
from blend.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("loaded:", *({heavy!r} & set(sys.modules)))
"""
    assert _python(code).splitlines()[-1] == "loaded:"


def test_looking_at_a_store_from_the_command_line_loads_nothing_heavy(tmp_path: Path) -> None:
    from blend.store import open_store

    store = open_store(tmp_path / "kv")
    store.describe("abc", {"model": "tiny", "dtype": "float32", "prefix_tokens": "3"})
    store.write_artifact("surrogate-abc", b'{"chunks": [[1, 2, 3]]}')
    store.write_artifact("correction-abc", b"a correction")
    code = f"""
import sys
sys.argv = ["blend", "store", "--store", {str(tmp_path)!r}, "--json"]
from blend.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("loaded:", *({set(HEAVY) - {"rich"}!r} & set(sys.modules)))
"""
    lines = _python(code).splitlines()
    assert any("surrogate context of 3 tokens" in line for line in lines)
    assert lines[-1] == "loaded:"


def test_every_public_name_resolves_to_its_home() -> None:
    assert sorted(blend.__all__) == list(blend.__all__)
    for name in blend.__all__:
        value = getattr(blend, name)
        assert value.__name__ == name
        assert value.__doc__, f"{name} has no docstring"
        assert value.__module__.startswith("blend")
    assert set(blend.__all__) <= set(dir(blend))


def test_a_public_name_is_never_hidden_by_a_module_of_that_name() -> None:
    """Whatever was imported before, and in whatever order the names are asked for."""
    code = f"""
import importlib, types
import blend
for name in {sorted(blend.__all__, reverse=True)!r} + {list(blend.__all__)!r}:
    importlib.import_module("blend.rag")
    assert not isinstance(getattr(blend, name), types.ModuleType), name
"""
    _python(code)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'blend' has no attribute 'blnder'"):
        blend.blnder  # noqa: B018


def test_the_version_is_a_release_number() -> None:
    assert all(part.isdigit() for part in blend.__version__.split("."))


def test_huggingfaces_own_kernels_package_is_not_shadowed() -> None:
    code = "from importlib.util import find_spec as f; s = f('kernels'); print(s.origin if s and s.origin else 'site-packages')"
    assert "site-packages" in _python(code)
