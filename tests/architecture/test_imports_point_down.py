"""Imports point down only, and every heavy library has its few doors."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter

import pytest
from imports import ROOT, importers, imports, modules, top

# From the top down: a module may import what stands below its own line, and its own room. All of `blend` stands here.
LAYERS = (
    ("blend.__main__",),
    ("blend.cli",),
    ("blend.analyze",),
    ("blend.eval",),
    ("blend.integrations",),
    ("blend.serve",),
    ("blend.shards", "blend.plan"),
    ("blend.rag",),
    ("blend.corpus",),
    ("blend.corpora",),
    ("blend.blender",),
    ("blend.chunks", "blend.recompute"),
    ("blend.model",),
    ("blend.store", "blend.weights", "blend.prompt"),
    ("blend.config",),
    ("blend.select",),  # a configuration holds a selector; the decoder that shows it evidence is handed in
    ("blend.types", "blend.timing"),
    ("blend.limits",),
    ("blend.errors", "blend.visible", "blend.files", "blend.lazy", "blend.version", "blend"),
)
ROOMS_OF_MANY_JOBS = ("blend.model", "blend.chunks", "blend.eval")


def _unit(module: str) -> str:
    """The line's entry that a module belongs to: itself, or its package."""
    parts = module.split(".")
    return ".".join(parts[:2])


def _door(module: str) -> str:
    """Who a library is opened by: a module or a small package, inside of rooms that do many things."""
    return ".".join(module.split(".")[:3]) if _unit(module) in ROOMS_OF_MANY_JOBS else _unit(module)


RANK = {unit: depth for depth, line in enumerate(LAYERS) for unit in line}


def test_every_module_of_blend_has_its_place() -> None:
    units = {_unit(module) for module in modules() if top(module) == "blend"}
    assert units == set(RANK)


def test_imports_point_down_only() -> None:
    """Names that only annotations need are free to point anywhere; the public surface in `blend/__init__.py` is lazy."""
    wrong = []
    for entry in imports():
        if entry.typing_only or top(entry.module) != "blend" or top(entry.target) != "blend":
            continue
        here, there = _unit(entry.module), _unit(entry.target)
        if here not in (there, "blend") and RANK[here] >= RANK[there]:
            wrong.append(f"{entry.module} -> {entry.target}")
    assert not wrong


def test_no_module_imports_the_root_package() -> None:
    """It is the public surface, made of them; `blend.version` holds what they share with it."""
    assert {
        entry.module
        for entry in imports()
        if entry.target in ("blend", "blend_retrieval", "blend_kernels") and top(entry.module) == entry.target
    } == set()


# A factory that loads an implementation of the contract beside it when it is asked for one.
FACTORIES = {("blend_retrieval.embedders", "blend_retrieval.embedders.sentence")}


def test_no_module_imports_itself_by_a_detour() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for entry in imports():
        if entry.typing_only or (entry.module, entry.target) in FACTORIES:
            continue
        if entry.target in graph and entry.target != entry.module:
            graph[entry.module].add(entry.target)
    TopologicalSorter(graph).prepare()


def test_the_kernels_have_few_doors() -> None:
    doors = {"blend.model.forward", "blend.model.admission", "blend.select.selectors"}
    assert {m for m in importers("blend_kernels") if top(m) != "blend_kernels"} == doors


DOORS = {
    "transformers": {
        "blend.model.driver",
        "blend.model.forward",
        "blend.model.cache",
        "blend.model.decoder",
        "blend.model.fingerprint",
        "blend.model.generate",
        "blend.model.outline",
        "blend.weights",
        "blend_retrieval.embedders.sentence",
    },
    "vllm": {"blend.integrations"},
    "blend_retrieval": {
        "blend.plan",
        "blend.rag",
        "blend.corpus",
        "blend.corpora",
        "blend.serve",
        "blend.cli",
        "blend.weights",
        "blend.files",
    },
    "faiss": {"blend_retrieval.index"},
    "sentence_transformers": {"blend_retrieval.embedders.sentence"},
    "py3langid": {"blend_retrieval.embedders.sentence"},
    "triton": {"blend_kernels"},
    "matplotlib": {"blend.eval.show"},
    "rouge_score": {"blend.eval.metrics"},
    "gguf": {"blend.weights"},
    "starlette": {"blend.serve", "blend.integrations"},
    "pydantic": {"blend.serve"},
    "prometheus_client": {"blend.serve"},
    "uvicorn": {"blend.serve"},
    "ray": {"blend.shards"},
    "opentelemetry": {"blend.serve"},
    "click": {"blend.cli"},
    "rich": {"blend.cli", "blend.eval.show"},
    "obstore": {"blend.store"},
    "redis": {"blend.store"},
    "cachetools": {"blend.serve", "blend.store"},
    "blake3": {"blend.store"},
    "xxhash": {"blend.store", "blend.model.decoder", "blend.model.fingerprint"},
}


@pytest.mark.parametrize("library", DOORS)
def test_a_library_is_imported_only_through_its_doors(library: str) -> None:
    inside = {m for m in importers(library) if top(m) != library}
    found = {m if top(m) == "blend_retrieval" else top(m) if top(m) == "blend_kernels" else _door(m) for m in inside}
    assert found <= DOORS[library]


def test_other_engines_are_entered_by_the_command_line_alone() -> None:
    inside = {e.module for e in imports() if e.target.startswith("blend.integrations") and not e.typing_only}
    assert {module for module in inside if not module.startswith("blend.integrations")} == {"blend.cli.vllm"}


def _outside(package: str) -> set[str]:
    """Libraries and packages of ours that a package imports, the standard library apart."""
    tops = {
        top(entry.target)
        for entry in imports()
        if f"{entry.module}.".startswith(f"{package}.") and not entry.typing_only
    }
    return tops - set(sys.stdlib_module_names) - {top(package)}


def test_retrieval_knows_nothing_of_blend() -> None:
    assert not _outside("blend_retrieval") & {"blend", "blend_kernels", "triton"}


def test_kernels_import_only_torch_and_triton() -> None:
    assert _outside("blend_kernels") <= {"torch", "triton"}


def test_the_store_knows_neither_transformers_nor_the_decoder() -> None:
    assert _outside("blend.store") <= {
        "blake3",
        "cachetools",
        "filelock",
        "numpy",
        "obstore",
        "redis",
        "torch",
        "xxhash",
    }
    ours = {_unit(e.target) for e in imports() if e.module.startswith("blend.store") and top(e.target) == "blend"}
    assert ours <= {"blend.store", "blend.types", "blend.errors", "blend.config", "blend.files"}


def test_only_the_switch_registers_attention_and_nothing_is_patched_on_import() -> None:
    users = {m for m, path in modules().items() if "ALL_ATTENTION_FUNCTIONS" in path.read_text(encoding="utf-8")}
    assert users == {"blend.model.driver"}


def test_a_default_is_written_once() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.startswith("DEFAULT_"):
                homes.setdefault(node.id, []).append(module)
            elif isinstance(node, ast.FunctionDef):
                for name in _literal_defaults(node.args) & {"max_new_tokens", "max_tokens", "chunk_tokens", "top_k"}:
                    homes.setdefault(name, []).extend([module, "a signature"])
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def _literal_defaults(arguments: ast.arguments) -> set[str]:
    placed = [*arguments.posonlyargs, *arguments.args][
        len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) :
    ]
    pairs = [
        *zip(placed, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {each.arg for each, default in pairs if isinstance(default, ast.Constant) and default.value is not None}


def test_files_come_to_their_place_through_one_writer_a_package() -> None:
    """`path.replace(target)` has one argument, the method of texts two; `mkstemp` is how drafts are made by hand."""
    movers = set()
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                moves = node.func.attr == "replace" and len(node.args) == 1
                if moves or node.func.attr in {"mkstemp", "NamedTemporaryFile"}:
                    movers.add(module)
    assert movers == {"blend.files", "blend_retrieval.generations", "blend_kernels.tuning"}


def test_kernels_is_a_source_root_and_no_package() -> None:
    """A top-level package named `kernels` would shadow the one that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not importers("kernels")


def test_the_reader_of_imports_sees_them() -> None:
    """These tests could not fail if it found nothing."""
    seen = {(entry.module, entry.target, entry.lazy) for entry in imports()}
    assert ("blend.store", "blend.store.disk", True) in seen
    assert ("blend.model.forward", "blend_kernels", False) in seen
    assert any(entry.typing_only for entry in imports())
    assert ("blend_kernels.attention_op", "blend_kernels.checks", False) in seen
