"""kvblend: KV-cache reuse and RAG prefill for HuggingFace decoders.

Importing this package loads neither torch nor transformers; the public names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blend.version import __version__ as __version__

if TYPE_CHECKING:
    from blend.answers import Answer
    from blend.attached.attached import attach
    from blend.chunks.encode import ChunkEncoder
    from blend.config import BlendConfig, CorpusConfig, PromptConfig
    from blend.errors import BlendError
    from blend.layout import PromptLayout
    from blend.model.decoder import Decoder
    from blend.model.generate import Generation, generate
    from blend.prefill.blender import Blend, Blender
    from blend.prompt_template import PromptTemplate
    from blend.rag import Rag
    from blend.select import Evidence, Needs, Selector
    from blend.store import open_store
    from blend.types import ChunkCache, ChunkKey, Selection


_PUBLIC = {
    "blend.answers": ("Answer",),
    "blend.attached.attached": ("attach",),
    "blend.prefill.blender": ("Blend", "Blender"),
    "blend.chunks.encode": ("ChunkEncoder",),
    "blend.config": ("BlendConfig", "CorpusConfig", "PromptConfig"),
    "blend.errors": ("BlendError",),
    "blend.model.decoder": ("Decoder",),
    "blend.model.generate": ("Generation", "generate"),
    "blend.prompt_template": ("PromptTemplate",),
    "blend.rag": ("Rag",),
    "blend.select": ("Evidence", "Needs", "Selector"),
    "blend.store": ("open_store",),
    "blend.layout": ("PromptLayout",),
    "blend.types": ("ChunkCache", "ChunkKey", "Selection"),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "Answer",
    "Blend",
    "BlendConfig",
    "BlendError",
    "Blender",
    "ChunkCache",
    "ChunkEncoder",
    "ChunkKey",
    "CorpusConfig",
    "Decoder",
    "Evidence",
    "Generation",
    "Needs",
    "PromptConfig",
    "PromptLayout",
    "PromptTemplate",
    "Rag",
    "Selection",
    "Selector",
    "attach",
    "generate",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blend' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
