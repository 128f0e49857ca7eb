"""A model, a store with the caches of prompts, and what kvblend's own decoder answers over them."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from offline import COUNT, Engine
from tiny import save_model

from blend.chunks.probe import leave_probe
from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.prefill.blender import Blend, Blender
from blend.store import open_store

SETTINGS: dict[str, Any] = {"ratio": 0.15, "correction": False}


def prompt(length: int) -> PromptLayout:
    """A prefix of 20 tokens, four chunks, of which none ends where a block does, and a question of 9."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 512, (length,), generator=draw).tolist()
    shared = torch.randint(5, 512, (20,), generator=torch.Generator().manual_seed(7)).tolist()
    cuts = [20, *(20 + (length - 29) * part // 9 for part in (2, 4, 7)), length - 9]
    chunks = tuple(tuple(ids[a:b]) for a, b in pairwise(cuts))
    return PromptLayout.of_chunks(tuple(shared), chunks, tuple(ids[-9:]))


class Caches:
    """model: what vLLM loads. decoder: what is to give the same; its caches and its probe are in the store."""

    def __init__(self, folder: Path, model: Path, decoder: Decoder) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.model = model
        self.decoder = decoder
        self.store = open_store(str(folder / "store" / "kv"))
        leave_probe(self.store, decoder)
        self.blender = Blender(decoder, self.store, BlendConfig(**SETTINGS))

    def layout(self, rows: int, last: int | None = None) -> PromptLayout:
        """A prompt with caches in the store. last: its last token."""
        layout = prompt(rows)
        library = self.blender.library(layout.prefix)
        library.compute(library.missing(layout.chunks))
        return layout if last is None else replace(layout, suffix=(*layout.suffix[:-1], last))

    def missing(self, layout: PromptLayout) -> int:
        """How many caches of a prompt's chunks are missing in the store."""
        return len(self.blender.library(layout.prefix).missing(layout.chunks))

    def blended(self, layout: PromptLayout) -> list[int]:
        return self.greedy(self.blender.prefill(layout))

    def full(self, layout: PromptLayout) -> list[int]:
        return self.greedy(self.blender.prefill(layout, config=BlendConfig(ratio=1.0)))

    def greedy(self, blend: Blend) -> list[int]:
        """By kvblend's own decoding."""
        tokens, logits = list[int](), blend.logits[0]
        for _ in range(COUNT):
            tokens.append(int(logits.argmax()))
            logits = self.decoder.append(torch.tensor([[tokens[-1]]]), blend.cache)[0, -1]
        return tokens

    def engine(self, **more: Any) -> Engine:
        options = {"store": str(self.folder / "store"), "codec": "native", "learn": False, **SETTINGS}
        return Engine(self.model, options, **more)


def tiny_caches(folder: Path) -> Caches:
    """Of a tiny random model."""
    model = save_model(folder / "model")
    return Caches(folder, model, Decoder.load(str(model), device="cpu", dtype="float32"))
