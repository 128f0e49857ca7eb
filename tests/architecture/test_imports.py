"""Layers, cycles and who may import which library; `[tool.importlinter]` in pyproject.toml holds what import-linter can say."""

import os
import subprocess
import sys

import grimp
import pytest
from places import PYTHONPATH, REPOSITORY

# Who may import a library: modules, or packages with all that is in them.
IMPORTERS = {
    "transformers": "blend.model blend.weights blend.attached blend.integrations.llamacpp blend_retrieval.hub",
    "vllm": "blend.integrations",
    "faiss": "blend_retrieval.index",
    "sentence_transformers": "blend_retrieval.hub",
    "py3langid": "blend_retrieval.embedders.sentence",
    "triton": "blend_kernels",
    "blend_kernels": (
        "blend_kernels blend.model.attention blend.model.passes blend.model.cache blend.model.admission "
        "blend.model.row_decoder blend.model.device_path blend.model.fused blend.model.addressed_pass blend.model.graphs "
        "blend.chunks blend.integrations.llamacpp"
    ),
    "gguf": "blend.weights",
    "starlette": "blend.serve blend.integrations",
    "sse_starlette": "blend.serve",
    "pydantic": "blend.serve blend.config",
    "prometheus_client": "blend.serve blend.integrations",
    "uvicorn": "blend.serve",
    "httpx": "blend.integrations",
    "opentelemetry": "blend.serve",
    "ray": "blend.shards",
    "cachetools": "blend.serve blend.prefill",
    "llguidance": "blend.serve",
    "blake3": "blend.store blend.model blend.shards",
    "click": "blend.cli",
    "rich": "blend.cli blend.eval blend.census",
    "obstore": "blend.store",
    "redis": "blend.store",
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    graph = grimp.build_graph(
        "blend",
        "blend_retrieval",
        "blend_kernels",
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    assert graph.find_modules_that_directly_import("transformers"), "no test would fail"
    return graph


def test_import_linters_contracts_hold():
    """In a separate process: import-linter disables loggers and closes the streams of their handlers."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--config", str(REPOSITORY / "pyproject.toml"), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " kept, 0 broken" in done.stdout


@pytest.mark.parametrize("library", IMPORTERS)
def test_a_library_has_few_importers(library, graph):
    ours = library in graph.modules and not graph.is_module_squashed(library)
    parts = {library, *graph.find_descendants(library)} if ours else {library} & graph.modules
    found = {module for part in parts for module in graph.find_modules_that_directly_import(part)}
    allowed = tuple(f"{name}." for name in IMPORTERS[library].split())
    assert [module for module in sorted(found) if not f"{module}.".startswith(allowed)] == []


@pytest.mark.parametrize(
    ("package", "libraries"),
    [
        ("blend_kernels", {"torch", "triton", "numpy"}),
        ("blend.store", {"blend", "torch", "filelock", "numpy", "obstore", "redis", "blake3"}),
    ],
)
def test_a_package_needs_few_libraries(package, libraries, graph):
    inside = {package, *graph.find_descendants(package)}
    outside = {name for module in inside for name in graph.find_modules_directly_imported_by(module)} - inside
    assert {name.partition(".")[0] for name in outside} - set(sys.stdlib_module_names) <= libraries
