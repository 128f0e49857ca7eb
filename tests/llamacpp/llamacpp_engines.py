"""One tiny model in two engines: transformers in float32, and llama.cpp on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blend.integrations.llamacpp.context import ContextOptions
from blend.integrations.llamacpp.decoder import CellDecoder
from blend.integrations.llamacpp.model import GGUFModel
from blend.model.decoder import Decoder
from tests.llamacpp.gguf_files import neighbours, save_gguf
from tests.models import FAMILIES, build, tokenizer

NAMES = ("llama", "qwen2", "qwen3", "gemma3")
_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
_CHANGES: dict[str, dict[str, Any]] = {"gemma3": {"num_hidden_layers": 6, "layer_types": _LAYERS}}
WINDOW = FAMILIES["gemma3"].options["sliding_window"]


class Pair(NamedTuple):
    """A model in both engines."""

    name: str
    theirs: Decoder
    ours: CellDecoder

    def as_ours(self, keys: Tensor) -> Tensor:
        """Keys of transformers `[1, kv_heads, rows, head_dim]` in the order of llama.cpp's file."""
        if self.name != "llama":
            return keys
        _, heads, rows, dim = keys.shape
        flat = keys[0].transpose(0, 1).reshape(rows, heads * dim).T.contiguous()
        return neighbours(flat, heads).T.view(1, rows, heads, dim).transpose(1, 2)


class Engines:
    """Makes pairs, each once."""

    def __init__(self, library: Any, folder: Path) -> None:
        self._library = library
        self._folder = folder
        self._pairs: dict[tuple[Any, ...], Pair] = {}

    def pair(self, name: str, *, cache_type: str = "f16", tokens: int = 512, ubatch: int = 512, **changes: Any) -> Pair:
        """A family's model, with `changes` of its configuration."""
        key = (name, cache_type, tokens, ubatch, *sorted(changes.items()))
        if key not in self._pairs:
            model = build(FAMILIES[name], **{**_CHANGES.get(name, {}), **changes})
            file = save_gguf(self._folder / f"{len(self._pairs)}.gguf", model)
            options = ContextOptions(tokens, threads=1, cache_type=cache_type, ubatch=ubatch)
            ours = CellDecoder(GGUFModel(self._library, file), options, tokenizer=tokenizer())
            self._pairs[key] = Pair(name, Decoder(model, name=name, weights=name), ours)
        return self._pairs[key]

    def close(self) -> None:
        """Free all models."""
        for pair in self._pairs.values():
            pair.ours.close()


def token_ids(rows: int, seed: int = 0) -> Tensor:
    """Random ones, `[1, rows]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (1, rows), generator=generator)
