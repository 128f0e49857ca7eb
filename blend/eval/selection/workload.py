"""One set of questions to measure on: its records in a fixed random order, and an evaluator with a store of its own."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from blend.blender import Blender
from blend.config import CorpusConfig
from blend.eval.dataset import Record, load_dataset
from blend.eval.evaluator import Evaluator
from blend.prompt import PromptTemplate
from blend.store import open_store
from blend.weights import resolve_model

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

# Last records of the shuffle: the KV correction is fitted on their chunks, and no method is measured on them.
APART = 30
_STORE_BYTES = 6 << 30


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured with: sets of questions, a model, and a folder for its stores.

    tasks: only records of these; none means all. max_new_tokens: of every answer. threads: of torch in this process.
    """

    sets: tuple[Path, ...]
    stores: Path
    model: str
    device: str = "auto"
    codec: str = CorpusConfig.codec
    tasks: Collection[str] = ()
    max_new_tokens: int = 24
    threads: int = 1


class Workload:
    """A set by its name. `records` are to be measured on, `apart` to fit the KV correction on."""

    def __init__(self, path: Path, decoder: Decoder, setting: Setting) -> None:
        self.name = path.stem
        self.model = setting.model
        shuffled = load_dataset(path)
        random.Random(0).shuffle(shuffled)
        self.records = [one for one in shuffled[:-APART] if not setting.tasks or one.task in setting.tasks]
        self.apart: list[Record] = shuffled[-APART:]
        place = setting.stores / setting.model / path.stem
        store = open_store(place, codec=setting.codec, budget_bytes=_STORE_BYTES)
        template = PromptTemplate(decoder.tokenizer)
        self._evaluator = Evaluator(Blender(decoder, store), template, max_new_tokens=setting.max_new_tokens)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Calibrated on the records apart: a surrogate context and KV corrections, which the store keeps."""
        self._evaluator.calibrate(self.apart, CorpusConfig.surrogate_tokens)
        return self._evaluator


def load_decoder(setting: Setting) -> Decoder:
    """The model of a setting, with its threads set. Raises as `resolve_model` and `Decoder.load` do."""
    import torch

    from blend.model.decoder import Decoder

    torch.set_num_threads(setting.threads)
    return Decoder.load(str(resolve_model(setting.model)), name=setting.model, device=setting.device)


def load_workloads(setting: Setting, decoder: Decoder) -> list[Workload]:
    """A workload a set."""
    return [Workload(path, decoder, setting) for path in setting.sets]
