"""Importing is free, and the public surface is whole."""

import os
import subprocess
import sys

import pytest
from places import PYTHONPATH, REPOSITORY

import blend

HEAVY = "torch transformers triton faiss sentence_transformers numpy rich safetensors gguf"
LIGHT = (
    "blend blend.cli blend.config blend.errors blend.eval blend.select blend.store blend.types blend.weights "
    "blend_kernels blend_retrieval"
)
WITH_NUMPY = "blend.eval.report blend.eval.show"


def _python(code: str, *arguments: str) -> str:
    """Output of a fresh interpreter that sees the source tree; another folder must not help it."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        check=False,
        cwd=REPOSITORY / "tests",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_heavy():
    code = f"""
import importlib, sys
for module in {f"{LIGHT} {WITH_NUMPY}"!r}.split():
    importlib.import_module(module)
    allowed = {{"numpy"}} if module in {WITH_NUMPY!r} else set()
    print(*(f"{{module}} loads {{name}}" for name in (set({HEAVY!r}.split()) & set(sys.modules)) - allowed))
"""
    assert _python(code) == ""


def test_looking_at_a_store_from_the_command_line_loads_nothing_heavy(tmp_path):
    from blend.store import open_store

    store = open_store(tmp_path / "kv")
    store.describe("abc", {"model": "tiny", "dtype": "float32", "prefix_tokens": "3"})
    store.write_artifact("surrogate-abc", b'{"chunks": [[1, 2, 3]]}')
    store.write_artifact("correction-abc", b"a correction")
    code = f"""
import sys
from blend.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("loaded:", *(set({HEAVY.replace(" rich", "")!r}.split()) & set(sys.modules)))
"""
    lines = _python(code, "store", "--store", str(tmp_path), "--json").splitlines()
    assert any("surrogate-abc" in line for line in lines)
    assert lines[-1] == "loaded:"


def test_every_public_name_resolves_to_its_home_whatever_was_imported_before():
    code = f"""
import importlib, types
import blend
importlib.import_module("blend.rag")
for name in {sorted(blend.__all__, reverse=True)!r} + {list(blend.__all__)!r}:
    assert not isinstance(getattr(blend, name), types.ModuleType), name
"""
    _python(code)
    assert sorted(blend.__all__) == list(blend.__all__)
    assert set(blend.__all__) <= set(dir(blend))
    for name in blend.__all__:
        value = getattr(blend, name)
        assert value.__name__ == name
        assert value.__doc__, f"{name} has no docstring"
        assert value.__module__.startswith("blend")
    with pytest.raises(AttributeError, match="module 'blend' has no attribute 'blnder'"):
        blend.blnder  # noqa: B018
    assert all(part.isdigit() for part in blend.__version__.split("."))


def test_kernels_is_a_source_root_and_hides_no_package():
    """A package named `kernels` would shadow the one that transformers imports."""
    code = "from importlib.util import find_spec as f; s = f('kernels'); print(s.origin if s and s.origin else 'site-packages')"
    assert "site-packages" in _python(code)
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
