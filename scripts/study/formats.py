"""Number formats: fidelity of blends in each to full recompute in float32, over their own caches and another format's."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import NamedTuple

import torch

from blend.compare import Fidelity, Reference
from blend.config import CorpusConfig
from blend.errors import PromptError
from blend.eval.dataset import Record
from blend.eval.evaluator import Evaluator
from blend.model.decoder import Decoder, FullPrefill, full_prefill
from blend.prefill.blender import Blend, Blender
from blend.prompt import PromptTemplate
from blend.store import open_store
from blend.types import PromptLayout
from blend.weights import resolve_model
from study.measuring import STORE_BYTES, Setting, divided
from study.methods import BASELINE, FULL, methods
from study.rows import Row, append_rows, read_rows

METHODS = {name: config for name, config in methods("finalists").items() if name != BASELINE}


class Format(NamedTuple):
    """What a decoder computes in, and the dtype of the decoder whose caches it reads; None for its own."""

    dtype: str
    weights: str = "native"
    caches: str | None = None


REFERENCE = "float32"
FORMATS = {
    REFERENCE: Format("float32"),
    "bfloat16": Format("bfloat16"),
    "int8": Format("bfloat16", "int8"),
    "float32, caches of bfloat16": Format("float32", caches="bfloat16"),
    "bfloat16, caches of float32": Format("bfloat16", caches="float32"),
}


def run_formats(setting: Setting, out: Path, records: int) -> Iterator[str]:
    """Measure the first so many records of each set; a line on each. What the file holds is not measured again.

    All sets together are one corpus, with one surrogate context and one KV correction for each format.
    """
    measured = {(row.set, row.id) for row in read_rows(out) if row.model == setting.model}  # all formats in one write
    torch.set_num_threads(setting.threads)
    sets = {path.stem: divided(path) for path in setting.sets}
    evaluators = _evaluators(setting)
    for evaluator in evaluators.values():
        evaluator.calibrate([record for _, apart in sets.values() for record in apart], CorpusConfig.surrogate_tokens)
    for index in range(records):
        for name, (questions, _) in sets.items():
            for record in questions[index : index + 1]:
                if (name, record.id) not in measured:
                    yield _measure(setting, out, name, record, evaluators)


def _evaluators(setting: Setting) -> dict[str, Evaluator]:
    location = str(resolve_model(setting.model))
    loaded: dict[Format, Decoder] = {}
    for form in FORMATS.values():
        if form.caches is None:
            loaded[form] = Decoder.load(
                location, name=setting.model, device="cpu", dtype=form.dtype, weights=form.weights
            )
    store = open_store(setting.folder / "formats", codec=setting.codecs[0], budget_bytes=STORE_BYTES)
    evaluators = {}
    for name, form in FORMATS.items():
        decoder = copy(loaded[form._replace(caches=None)])
        decoder.kept_as = form.caches or decoder.kept_as
        evaluators[name] = Evaluator(Blender(decoder, store), PromptTemplate(decoder.tokenizer))
    return evaluators


def _measure(setting: Setting, out: Path, name: str, record: Record, evaluators: dict[str, Evaluator]) -> str:
    reference = evaluators[REFERENCE]
    layout = reference.template.layout(record.question, record.chunks)
    try:
        reference.decoder.check_length(layout.rows + setting.max_new_tokens)
    except PromptError as error:
        return f"{record.id} left out: {error}"
    whole = full_prefill(reference.decoder, layout)
    full = Reference.of(whole, layout, setting.max_new_tokens)

    def row_of(method: str, ttft_s: float, fidelity: Fidelity, share: float = 1.0) -> Row:
        return Row(
            model=setting.model,
            set=name,
            task=record.task,
            id=record.id,
            method=method,
            kl=fidelity.kl,
            top1=fidelity.top1,
            ttft_s=ttft_s,
            full_ttft_s=whole.ttft_s,
            select_s=0.0,
            rows=layout.rows,
            share=share,
        )

    rows = [row_of(FULL, whole.ttft_s, Fidelity(0.0, 1.0))]
    for format_name, evaluator in evaluators.items():
        for method, prefilled in _prefills(evaluator, layout, format_name, room=len(full.answer.token_ids)):
            share = prefilled.rows_share if isinstance(prefilled, Blend) else 1.0
            rows.append(row_of(f"{method}, {format_name}", prefilled.ttft_s, full.fidelity(prefilled), share))
    append_rows(out, rows)
    return f"{name} {record.id} ({layout.rows} rows): " + ", ".join(f"{row.method} {row.kl:.4f}" for row in rows)


def _prefills(
    evaluator: Evaluator, layout: PromptLayout, format_name: str, room: int
) -> Iterator[tuple[str, FullPrefill | Blend]]:
    """The blends, and before them full prefill where a format has not been measured in it yet."""
    evaluator.cache_chunks(layout)
    if format_name != REFERENCE and FORMATS[format_name].caches is None:
        yield FULL, full_prefill(evaluator.decoder, layout)
    for method, config in METHODS.items():
        yield method, evaluator.blender.prefill(layout, config=config, room=room)
