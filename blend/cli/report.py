"""`blend report`: full recompute, plain reuse and blended prefill on the same token ids, alternating."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import options

if TYPE_CHECKING:
    from blend.dataset import Record
    from blend.pipeline import Rag
    from blend.report import Measurement, Report


@click.command("report")
@click.option(
    "--dataset", type=click.Path(path_type=Path), help="JSONL question file; without one, built-in questions."
)
@click.option("--limit", type=click.IntRange(1), help="At most so many questions. [default: all; 12 built-in ones]")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the report as JSON.")
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw quality against TTFT (.png or .svg)."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Longest answer.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Timed prefills of each method.")
@options.common
@options.corpus
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
    from blend.cli.console import note, output
    from blend.report import render_report, write_json, write_picture

    records = _load(dataset, limit)
    rag = options.open_rag(given)
    note(f"Loading {given['model']} ...")
    rag.decoder  # noqa: B018 - its own step, before the questions
    if records is None:
        from blend.cli.workload import builtin_records

        records = builtin_records(rag, limit or 12)
    measured, interrupted = _measure(rag, records, max_new_tokens, repeats)
    if not measured:
        raise click.Abort
    report = _summarise(rag, measured, dataset, given)
    output.print(render_report(report))
    if json_path:
        write_json(report, json_path)
        note(f"wrote {json_path}")
    if picture:
        write_picture(report, picture)
        note(f"wrote {picture}")
    if interrupted:
        raise click.Abort


def _load(dataset: Path | None, limit: int | None) -> list[Record] | None:
    """Read the question file before anything heavy is loaded, so that a mistake in it shows at once."""
    from blend.dataset import load_dataset

    return load_dataset(dataset, limit) if dataset else None


def _measure(rag: Rag, records: list[Record], max_new_tokens: int, repeats: int) -> tuple[list[Measurement], bool]:
    """Measurements of all records, and whether Ctrl-C came before the last."""
    from blend.cli.console import note, seconds
    from blend.errors import PromptError
    from blend.evaluate import Evaluator, standard_methods

    evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=max_new_tokens, repeats=repeats)
    methods = standard_methods(rag.blend_config)
    measured: list[Measurement] = []
    try:
        evaluator.warm_up(records[0], methods)
        for number, record in enumerate(records, 1):
            try:
                rows = evaluator.measure(record, methods)
            except PromptError as error:
                note(f"{record.id} left out: {error}")
                continue
            measured += rows
            times = ", ".join(f"{row.method} {seconds(row.ttft_s)}" for row in rows)
            note(f"[{number}/{len(records)}] {record.id}: {times}")
    except KeyboardInterrupt:
        note("interrupted: reporting what was measured so far")
        return measured, True
    return measured, False


def _summarise(rag: Rag, measured: list[Measurement], dataset: Path | None, given: dict[str, Any]) -> Report:
    from blend.machine import describe_machine
    from blend.report import RunInfo, summarise

    config = {"blend": asdict(rag.blend_config), "corpus": asdict(rag.corpus_config), "model": given["model"]}
    info = RunInfo(
        model=given["model"],
        workload=dataset.name if dataset else "built-in questions",
        command=shlex.join(["blend", *sys.argv[1:]]),
        config=config,
        machine=describe_machine(),
    )
    return summarise(measured, info=info)
