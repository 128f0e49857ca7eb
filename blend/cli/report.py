"""`blend report`: full recompute, plain reuse and blended prefill on the same token ids, alternating."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import options
from blend.cli.options import OUTPUT, OUTPUT_OR_STDOUT, PLACE, number
from blend.config import REPORT_TOKENS

if TYPE_CHECKING:
    from blend.eval.dataset import Record
    from blend.eval.report import Measurement, Report
    from blend.rag import Rag

BUILTIN_QUESTIONS = 12


@click.command("report")
@click.option("--dataset", type=PLACE, help="JSONL question file; without one, built-in questions.")
@number("--limit", "limit", f"At most so many questions.  [default: all; {BUILTIN_QUESTIONS} built-in ones]")
@click.option(
    "--json",
    "json_path",
    type=OUTPUT_OR_STDOUT,
    help="Write the report as JSON; - is standard output, and the table then goes to standard error.",
)
@click.option("--picture", type=OUTPUT, help="Draw quality against TTFT (.png, .svg or .pdf).")
@number("--max-new-tokens", "max_new_tokens", "Longest answer.", default=REPORT_TOKENS, show_default=True)
@number("--repeats", "repeats", "Timed prefills of each method.", default=1, show_default=True)
@options.without_tiers
@options.common
@options.retrieval
@options.blending
def command(
    dataset: Path | None,
    limit: int | None,
    json_path: Path | None,
    picture: Path | None,
    max_new_tokens: int,
    repeats: int,
    **given: Any,
) -> None:
    """Measure TTFT and quality of blended prefill and plain reuse against full recompute, question by question.

    Ctrl-C ends the run early and reports what was measured.
    """
    from blend.cli.report import check_outputs, load_records, show_report

    check_outputs(json_path, picture)
    rag, records = load_records(given, dataset, limit or BUILTIN_QUESTIONS if dataset is None else limit)
    measured, interrupted = _measure(rag, records, max_new_tokens, repeats)
    if measured:
        show_report(_summarise(rag, measured, dataset), json_path, picture)
    if interrupted:
        done = len({row.record_id for row in measured})
        raise click.Abort(f"interrupted after {done} of {len(records)} questions")


def _measure(rag: Rag, records: list[Record], max_new_tokens: int, repeats: int) -> tuple[list[Measurement], bool]:
    """Measurements of all records, and whether Ctrl-C came before the last."""
    from blend.cli.console import note, seconds
    from blend.cli.report import calibrate
    from blend.eval.evaluator import Evaluator, standard_methods

    measured: list[Measurement] = []
    try:
        evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=max_new_tokens, repeats=repeats)
        methods = standard_methods(rag.blend_config)
        fitting = _fitting(rag, records, max_new_tokens)
        calibrate(rag, evaluator, fitting)
        evaluator.warm_up(fitting[0], methods)
        for number, record in enumerate(fitting, 1):
            rows = evaluator.measure(record, methods)
            measured += rows
            times = ", ".join(f"{row.method} {seconds(row.ttft_s)}" for row in rows)
            note(f"[{number}/{len(fitting)}] {record.id}: {times}")
    except KeyboardInterrupt:
        return measured, True
    return measured, False


def _fitting(rag: Rag, records: list[Record], max_new_tokens: int) -> list[Record]:
    """Records whose prompt and answer fit the model's context; the others are named. Raises `PromptError` if none does."""
    from blend.cli.console import note
    from blend.errors import PromptError

    fitting = []
    for record in records:
        rows = rag.template.layout(record.question, record.chunks).rows
        try:
            rag.decoder.check_length(rows + max_new_tokens)
        except PromptError as error:
            note(f"{record.id} left out: {error}")
            continue
        fitting.append(record)
    if not fitting:
        raise PromptError(
            f"no question fits the {rag.decoder.context_length} tokens that the model reads, with {max_new_tokens} for the "
            "answer; use shorter records, fewer chunks, or a model with a longer context"
        )
    return fitting


def _summarise(rag: Rag, measured: list[Measurement], dataset: Path | None) -> Report:
    from blend.eval.machine import describe_machine
    from blend.eval.report import RunInfo, summarise

    config = {"blend": rag.blend_config.plain(), "corpus": asdict(rag.corpus_config), "model": rag.model}
    info = RunInfo(
        model=rag.model,
        workload=dataset.name if dataset else "built-in questions",
        command=shlex.join(["blend", *sys.argv[1:]]),
        config=config,
        machine=describe_machine(),
    )
    return summarise(measured, info=info)
