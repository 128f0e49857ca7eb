"""Measure methods on sets of questions, resumably."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blend.config import CorpusConfig
from blend.errors import DatasetError, PromptError
from blend.eval.dataset import load_dataset
from blend.eval.evaluator import Evaluator, Method
from blend.eval.metrics import word_f1
from blend.model.decoder import Decoder
from blend.prefill.blender import Blender
from blend.prompt import PromptTemplate
from blend.store import open_store
from blend.weights import resolve_model
from study.methods import FULL, GROUPS, Methods
from study.rows import Key, append_rows, read_rows, row_of

# Last records of the shuffle: the KV correction is fitted on their chunks, and no method is measured on them.
APART = 30
STORE_BYTES = 6 << 30
ROUND = 4  # records of a set before the next set has its turn


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured with: sets of questions, a model, and a folder for its stores.

    codecs: of the stores; of several, a method's name says which one it was measured with. max_new_tokens: of every answer.
    """

    sets: Sequence[Path]
    stores: Path
    model: str
    codecs: Sequence[str] = (CorpusConfig.codec,)
    max_new_tokens: int = 24


class Workload:
    """A set by its name, in one codec. records: to be measured on, the others are apart to fit the KV correction on.

    suffix: of the methods' names, where there are several codecs.
    """

    def __init__(self, path: Path, decoder: Decoder, setting: Setting, codec: str) -> None:
        several = len(setting.codecs) > 1
        self.name = path.stem
        self.suffix = f", {codec}" if several else ""
        self.model = setting.model
        shuffled = load_dataset(path)
        random.Random(0).shuffle(shuffled)
        self.records = shuffled[:-APART]
        self._apart = shuffled[-APART:]
        place = setting.stores / setting.model.lstrip("/") / path.stem
        store = open_store(place / codec if several else place, codec=codec, budget_bytes=STORE_BYTES)
        template = PromptTemplate(decoder.tokenizer)
        self._evaluator = Evaluator(Blender(decoder, store), template, max_new_tokens=setting.max_new_tokens)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Calibrated on the records apart: a surrogate context and KV corrections, which the store keeps."""
        self._evaluator.calibrate(self._apart, CorpusConfig.surrogate_tokens)
        return self._evaluator


def run(setting: Setting, out: Path, group: str, records: int) -> Iterator[str]:
    """Measure a group of methods on the first so many records of each set; a line on each record when it is in the file.

    What the file holds is not measured again. Raises `DatasetError` where no set has a record to measure.
    """
    measured = {row.key for row in read_rows(out)}
    decoder = Decoder.load(str(resolve_model(setting.model)), name=setting.model, dtype="float32")
    workloads = [Workload(path, decoder, setting, codec) for path in setting.sets for codec in setting.codecs]
    if not any(workload.records for workload in workloads):
        raise DatasetError(f"no set has a record to measure; the last {APART} of each are kept apart")
    for start in range(0, records, ROUND):
        for workload in workloads:
            for index in range(start, min(start + ROUND, records, len(workload.records))):
                yield from _measure(workload, index, _missing(workload, index, GROUPS[group], measured), out)


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
