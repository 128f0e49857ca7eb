"""Measure methods on sets of questions, resumably."""

from __future__ import annotations

import random
from argparse import Namespace
from functools import cached_property
from pathlib import Path
from typing import Any

from _results import Results, Row, say
from blend.config import BlendConfig, CorpusConfig
from blend.errors import DatasetError, PromptError
from blend.eval.dataset import Record, load_dataset
from blend.eval.evaluator import Evaluator, Method
from blend.eval.metrics import word_f1
from blend.eval.report import Measurement
from blend.model.decoder import Decoder
from blend.prefill.blender import Blender
from blend.prompt_template import PromptTemplate
from blend.store import open_store
from blend.weights import resolve_model
from study.selectors import OverCaches, studied_selector
from study.tables import BASELINE, BASELINE_RATIO, FULL, GRADUAL

# Last records of the shuffle: the KV correction is fitted on their chunks, and no method is measured on them.
APART = 30
STORE_BYTES = 6 << 30
ROUND = 4  # records of a set before the next set has its turn
Methods = dict[str, BlendConfig]
_AS_STORED: dict[str, Any] = {"correction": False, "surrogate": False}


def methods(options: Namespace, blender: Blender) -> Methods:
    """Plain reuse, the published selection at one layer and gradually, and --selectors at each of --ratios.

    A name is such as `query_guided 15 %`; `published` alone has 15 %.
    """
    compared = {"reuse": BlendConfig(selector="none", **_AS_STORED)}
    for name, selector in ((BASELINE, "hkvd"), (GRADUAL, "gradual")):
        for ratio in options.published:
            config = BlendConfig(selector=selector, ratio=ratio, mask="bottom-right", **_AS_STORED)
            compared[name if ratio == BASELINE_RATIO else _with_ratio(name, ratio)] = config
    for spec in options.selectors:
        own_selector = studied_selector(spec, blender)
        for ratio in options.ratios:
            compared[_with_ratio(spec, ratio)] = BlendConfig(selector=own_selector, ratio=ratio)
    return compared


def _with_ratio(name: str, ratio: float) -> str:
    return f"{name} {100 * ratio:.0f} %"


class Workload:
    """A set by its name, in one codec. records: to be measured on. suffix: of the methods' names, where codecs are several."""

    def __init__(self, path: Path, decoder: Decoder, options: Namespace, codec: str) -> None:
        several = len(options.codecs) > 1
        self.name = path.stem
        self.suffix = f", {codec}" if several else ""
        self.model = options.model
        shuffled = load_dataset(path)
        random.Random(0).shuffle(shuffled)
        self.records = shuffled[:-APART]
        self._apart = shuffled[-APART:]
        place = options.stores / options.model.lstrip("/") / path.stem
        store = open_store(place / codec if several else place, codec=codec, budget_bytes=STORE_BYTES)
        template = PromptTemplate(decoder.tokenizer)
        blender = Blender(decoder, store)
        self.methods = methods(options, blender)
        self._evaluator = Evaluator(blender, template, max_new_tokens=options.max_new_tokens)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Calibrated on the records apart: a surrogate context and KV corrections, which the store keeps."""
        self._evaluator.calibrate(self._apart, CorpusConfig.surrogate_tokens)
        return self._evaluator


def run(options: Namespace, results: Results) -> None:
    """Measure methods on the first --records of each set; what the results hold is not measured again."""
    decoder = Decoder.load(str(resolve_model(options.model)), name=options.model, dtype="float32")
    workloads = [Workload(path, decoder, options, codec) for path in options.sets for codec in options.codecs]
    if not any(workload.records for workload in workloads):
        raise DatasetError(f"no set has a record to measure; the last {APART} of each are kept apart")
    for start in range(0, options.records, ROUND):
        for workload in workloads:
            for record in workload.records[start : min(start + ROUND, options.records)]:
                _measure(workload, record, results)


def _measure(workload: Workload, record: Record, results: Results) -> None:
    """Measure what is missing on one record, after full recompute; a prompt that does not fit the model is left out."""
    about = {"model": workload.model, "set": workload.name, "id": record.id}
    named = {f"{name}{workload.suffix}": config for name, config in workload.methods.items()}
    missing = [
        Method(name, config) for name, config in named.items() if not results.find("rows", {**about, "method": name})
    ]
    if not missing:
        return
    try:
        full, *others = workload.evaluator.measure(record, [Method(FULL), *missing])
    except PromptError as error:
        say(f"{record.id} left out: {error}")
        return
    for measured in (full, *others):
        row = _row(measured, full, record)
        config = named.get(measured.method)
        if config is not None and isinstance(config.selector, OverCaches):  # it costs full prefills, and not each time
            row |= {"ttft_s": None, "select_s": None}
        results.put("rows", {**about, "method": measured.method}, row)
    say(f"{workload.name} {record.id} ({full.rows_total} rows)")


def _row(measured: Measurement, full: Measurement, record: Record) -> Row:
    """A method on a record, next to full recompute of it.

    f1_full: word F1 to full recompute's answer. gold: the gold answers. kind: the record's kind. None means undefined.
    """
    itself = measured is full
    same = ("f1", "rouge_l", "answer", "right", "ttft_s")
    return {name: getattr(measured, name) for name in same} | {
        "kl": 0.0 if itself else measured.kl,
        "top1": 1.0 if itself else measured.top1,
        "f1_full": word_f1(measured.answer, (full.answer,)),
        "full_ttft_s": full.ttft_s,
        "select_s": measured.stages.get("select", 0.0),
        "rows": measured.rows_total,
        "share": measured.rows_computed / measured.rows_total,
        "gold": record.answers,
        "kind": record.task,
    }
