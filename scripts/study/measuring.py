"""Measure methods on sets of questions, resumably."""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from blend.config import CorpusConfig
from blend.errors import ConfigError, DatasetError, PromptError
from blend.eval.dataset import Record, load_dataset
from blend.eval.evaluator import Evaluator, Method
from blend.eval.metrics import word_f1
from blend.prefill.blender import Blender
from blend.prompt import PromptTemplate
from blend.store import open_store
from blend.weights import resolve_model
from study.methods import FULL, Methods, methods
from study.rows import Key, append_rows, read_rows, row_of

if TYPE_CHECKING:
    from blend.model.decoder import Decoder


# Last records of the shuffle: the KV correction is fitted on their chunks, and no method is measured on them.
APART = 30
STORE_BYTES = 6 << 30


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured with: sets of questions, a model, and a folder for its stores.

    codecs: of the stores; of several, a method's name says which one it was measured with. max_new_tokens: of every answer.
    threads: of torch in this process.
    """

    sets: Sequence[Path]
    stores: Path
    model: str
    device: str = "auto"
    codecs: Sequence[str] = (CorpusConfig.codec,)
    max_new_tokens: int = 24
    threads: int = 1

    @property
    def folder(self) -> Path:
        """Of the model's stores, below `stores` also where the model is an absolute path."""
        return self.stores / self.model.lstrip("/")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Setting:
        """From a command line that has some of these options."""
        names = {field.name for field in fields(cls)} & vars(options).keys()
        return cls(**{name: vars(options)[name] for name in names})


def divided(path: Path) -> tuple[list[Record], list[Record]]:
    """A set in a fixed random order: the records to measure on, and those apart."""
    shuffled = load_dataset(path)
    random.Random(0).shuffle(shuffled)
    return shuffled[:-APART], shuffled[-APART:]


class Workload:
    """A set by its name, in one codec. `records` are to be measured on, `apart` to fit the KV correction on.

    suffix: of the methods' names, where there are several codecs.
    """

    def __init__(self, path: Path, decoder: Decoder, setting: Setting, codec: str) -> None:
        several = len(setting.codecs) > 1
        self.name = path.stem
        self.suffix = f", {codec}" if several else ""
        self.model = setting.model
        self.records, self.apart = divided(path)
        place = setting.folder / path.stem
        if several:
            place /= codec
        store = open_store(place, codec=codec, budget_bytes=STORE_BYTES)
        template = PromptTemplate(decoder.tokenizer)
        self._evaluator = Evaluator(Blender(decoder, store), template, max_new_tokens=setting.max_new_tokens)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Calibrated on the records apart: a surrogate context and KV corrections, which the store keeps."""
        self._evaluator.calibrate(self.apart, CorpusConfig.surrogate_tokens)
        return self._evaluator


ROUND = 4  # records of a set before the next set has its turn


@dataclass(frozen=True)
class Shard:
    """Every `count`-th record from number `index`: one of several processes that measure together."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Of "0/2". Raises `ConfigError` for anything else, or an index beyond the count."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ConfigError(f"shard is {text!r}; name one as 0/2 and 1/2")
        return cls(int(index), int(count))

    def first(self, sets: int) -> int:
        """Which of so many sets this shard starts at: another than the others, who then find its KV correction."""
        return self.index * sets // self.count


def run(setting: Setting, out: Path, *, group: str, records: int, shard: Shard) -> Iterator[str]:
    """Measure a group of methods on the first so many records of each set; a line on each record when it is in the file.

    What the file holds is not measured again. Raises `DatasetError` where no set has a record to measure.
    """
    import torch

    from blend.model.decoder import Decoder

    measured = {row.key for row in read_rows(out)}
    torch.set_num_threads(setting.threads)
    location = str(resolve_model(setting.model))
    decoder = Decoder.load(location, name=setting.model, device=setting.device, dtype="float32")
    compared = methods(group)
    workloads = [Workload(path, decoder, setting, codec) for path in setting.sets for codec in setting.codecs]
    if not any(workload.records for workload in workloads):
        raise DatasetError(f"no set has a record to measure; the last {APART} of each are kept apart")
    first = shard.first(len(workloads))
    for start in range(0, records, ROUND):
        for workload in (*workloads[first:], *workloads[:first]):
            for index in range(start, min(start + ROUND, records, len(workload.records))):
                if index % shard.count == shard.index:
                    yield from _measure(workload, index, _missing(workload, index, compared, measured), out)


def _missing(workload: Workload, index: int, compared: Methods, measured: Collection[Key]) -> Methods:
    """The methods that were not measured on a record, under their names in the file."""
    about = workload.model, workload.name, workload.records[index].id
    named = {f"{name}{workload.suffix}": config for name, config in compared.items()}
    return {name: config for name, config in named.items() if (*about, name) not in measured}


def _measure(workload: Workload, index: int, missing: Methods, out: Path) -> Iterator[str]:
    """Measure these methods on one record, after full recompute; a prompt that does not fit the model is left out."""
    if not missing:
        return
    record = workload.records[index]
    name = workload.name
    compared = [Method(FULL), *(Method(method, config) for method, config in missing.items())]
    try:
        measurements = workload.evaluator.measure(record, compared)
    except PromptError as error:
        yield f"{record.id} left out: {error}"
        return
    full = measurements[0]
    rows = [row_of(workload.model, name, row, full, word_f1(row.answer, (full.answer,))) for row in measurements]
    append_rows(out, rows)
    shown = ", ".join(f"{row.method} {row.kl:.3f}" for row in rows[1:] if row.kl is not None)
    yield f"{name} {index} {record.id} ({rows[0].rows} rows): {shown}"
