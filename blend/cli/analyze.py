"""`blend analyze`: attention, KV deviation and what blending restores, as a page and its JSON."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import note, say
from blend.cli.options import OUTPUT, PLACE, TEXT, number
from blend.cli.report import calibrate
from blend.errors import ConfigError, PromptError
from blend.eval.dataset import Record, load_dataset

if TYPE_CHECKING:
    from blend.analyze.document import Analyzed
    from blend.analyze.study import PromptAnalysis
    from blend.rag import Rag
    from blend.types import PromptLayout

_Prompt = tuple[str, str, "PromptLayout"]  # id, question, layout
# Prompts whose text the page can show; the numbers of all of them are averaged.
MOST_VIEWS = 8


@click.command("analyze", cls=options.Command)
@click.argument("question", required=False, type=TEXT)
@click.option(
    "--dataset", type=PLACE, help="JSONL question file, as of `blend report`, to analyze instead of QUESTION."
)
@number("limit", "At most so many questions of the file.  [default: all]")
@click.option("--html", "page", type=OUTPUT, help="Write the page, one file that loads nothing.")
@click.option("--json", "json_path", type=OUTPUT, help="Write the numbers that the page shows.")
@number("layer", "Layer to picture first.  [default: a middle one]")
@number("head", "Head to picture.  [default: each layer's most cross-chunk one]")
@options.without_tiers
@options.common
@options.retrieval
@options.blending
def command(
    question: str | None,
    dataset: Path | None,
    limit: int | None,
    page: Path | None,
    json_path: Path | None,
    layer: int | None,
    head: int | None,
    **values: Any,
) -> None:
    """Show which attention, rows and chunks matter: for QUESTION over the precomputed documents, or for a question file.

    Every prompt runs under full recompute, under plain reuse and under the blend that the options choose. Ctrl-C ends a
    question file early and writes what was analyzed.
    """
    _check_usage(question, dataset, page, json_path)
    records = load_dataset(dataset, limit) if dataset else []
    opening.check(values, needs_corpus=question is not None or bool(values["name"]))
    rag = opening.open_rag(values, needs_index=question is not None)
    depth = len(rag.decoder.layers)
    if layer is not None and layer >= depth:
        raise ConfigError(f"layer {layer} does not exist: {rag.decoder.name} has layers 0 to {depth - 1}")
    if question is None:
        prompts = [
            (record.id, record.question, rag.template.layout(record.question, record.chunks)) for record in records
        ]
        _calibrate(rag, records, prompts)
    else:
        prompts = _asked(rag, question)
    analyzed, left_out, interrupted = _analyze(rag, prompts, layer, head)
    if analyzed:
        _write(_document(rag, analyzed, left_out, dataset), page, json_path)
    if interrupted:
        raise click.Abort(f"interrupted after {len(analyzed)} of {len(prompts)} questions")


def _check_usage(
    question: str | None,
    dataset: Path | None,
    page: Path | None,
    json_path: Path | None,
) -> None:
    from blend.eval.output import check_writable

    if (question is None) == (dataset is None):
        raise click.UsageError("give a QUESTION or --dataset FILE, one of them")
    if question is not None and not question.strip():
        raise PromptError("the question is empty; ask something")
    if page is None and json_path is None:
        raise click.UsageError("say where to write: --html FILE, --json FILE or both")
    if page == json_path:
        raise click.UsageError("--html and --json name the same file; give each its own")
    for path in (page, json_path):
        if path is not None:
            check_writable(path)


def _asked(rag: Rag, question: str) -> list[_Prompt]:
    """One prompt as `blend answer` makes it."""
    ranked, layout = rag.retrieve(question)
    if not ranked:
        raise PromptError("the index holds no chunks; run `blend precompute` on your documents first")
    return [("question", question, layout)]


def _calibrate(
    rag: Rag,
    records: list[Record],
    prompts: list[_Prompt],
) -> None:
    """Fit a KV correction for a question file, as `blend report` does; a corpus already has one."""
    from blend.eval.evaluator import Evaluator

    room = rag.decoder.context_length
    layouts = [layout for _, _, layout in prompts]
    fitting = [record for record, layout in zip(records, layouts, strict=True) if room is None or layout.rows <= room]
    if fitting:
        calibrate(rag, Evaluator(rag.blender, rag.template), fitting)


def _analyze(
    rag: Rag,
    prompts: list[_Prompt],
    layer: int | None,
    head: int | None,
) -> tuple[list[Analyzed], list[str], bool]:
    """The prompts that were analyzed, a line for each that cannot be, and whether Ctrl-C came before the last.

    Raises `PromptError` when none can be.
    """
    from blend.analyze.study import analyze_prompt

    analyzed: list[Analyzed] = []
    left_out: list[str] = []
    try:
        for number, (name, question, layout) in enumerate(prompts, 1):
            try:
                analysis = analyze_prompt(rag.blender, layout, head=head)
            except PromptError as error:
                left_out.append(f"{name} left out: {error}")
                note(left_out[-1])
                continue
            analyzed.append(_analyzed(rag, analysis, {"id": name, "question": question}, len(analyzed), layer))
            note(f"[{number}/{len(prompts)}] {name}: {layout.rows} tokens")
    except KeyboardInterrupt:
        return analyzed, left_out, True
    if not analyzed:
        raise PromptError(f"nothing can be analyzed: {left_out[0]}")
    return analyzed, left_out, False


def _analyzed(
    rag: Rag,
    analysis: PromptAnalysis,
    identity: dict[str, str],
    before: int,
    layer: int | None,
) -> Analyzed:
    """The numbers of a prompt, with a view of it for the first few, with pictures for the first."""
    from blend.analyze.document import Analyzed, prompt_document
    from blend.analyze.numbers import summarize

    view = None
    if before < MOST_VIEWS:
        view = prompt_document(analysis, rag.blend_config, identity, pictures=before == 0, layer=layer)
    return Analyzed(identity["id"], identity["question"], summarize(analysis), analysis.mapped, view)


def _document(
    rag: Rag,
    analyzed: list[Analyzed],
    left_out: list[str],
    dataset: Path | None,
) -> dict[str, Any]:
    from blend.analyze.document import analysis_document
    from blend.eval.report import RunInfo

    notes = list(left_out)
    if any(name.endswith("sinks") for name, _ in rag.decoder.model.named_parameters()):
        notes.append("This model gives part of its attention to learned sinks; all shares are of the rest.")
    if rag.blend_config.correction and not any(prompt.mapped for prompt in analyzed):
        notes.append(
            "No KV correction was applied: the store has none that fits these prompts, or no prompt has two chunks."
        )
    info = RunInfo(
        model=rag.model,
        workload=dataset.name if dataset else "one question over the index",
        command=shlex.join(["blend", *sys.argv[1:]]),
        config=rag.blend_config.plain(),
    )
    return analysis_document(analyzed, info, notes)


def _write(
    document: dict[str, Any],
    page: Path | None,
    json_path: Path | None,
) -> None:
    from blend.analyze.document import write_json, write_page

    for path, write in ((json_path, write_json), (page, write_page)):
        if path is not None:
            write(document, path)
            note(f"wrote {path}")
    for sentence in document["readings"].values():
        say(sentence)
