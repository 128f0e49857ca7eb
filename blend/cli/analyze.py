"""`blend analyze`: attention, KV deviation and what blending restores, as a page and its JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import check_outputs, note, say, write_document
from blend.cli.options import OUTPUT, PLACE, TEXT, number
from blend.cli.progress import counting
from blend.cli.report import calibrate, fitting_records, run_info
from blend.errors import ConfigError, PromptError
from blend.eval.dataset import load_dataset

if TYPE_CHECKING:
    from blend.analyze.document import Analyzed
    from blend.eval.dataset import Record
    from blend.layout import PromptLayout
    from blend.rag import Rag

_Prompt = tuple[str, str, "PromptLayout", list[str]]  # id, question, layout, titles of its chunks
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
    if (question is None) == (dataset is None):
        raise click.UsageError("give a QUESTION or --dataset FILE, one of them")
    if question is not None and not question.strip():
        raise PromptError("the question is empty; ask something")
    if page is None and json_path is None:
        raise click.UsageError("say where to write: --html FILE, --json FILE or both")
    check_outputs(json=json_path, html=page)
    records = load_dataset(dataset, limit) if dataset else []
    opening.check(values, needs_corpus=question is not None or bool(values["name"]))
    rag = opening.open_rag(values, needs_index=question is not None)
    opening.note_caveats(rag)
    depth = len(rag.decoder.rotations)
    if layer is not None and layer >= depth:
        raise ConfigError(f"there is no layer {layer}: {rag.decoder.name} has layers 0 to {depth - 1}")
    prompts = _recorded(rag, records) if question is None else _asked(rag, question)
    analyzed = _analyze(rag, prompts, layer, head)
    if analyzed:
        workload = dataset.name if dataset else "one question over the index"
        _write(_document(rag, analyzed, workload), page, json_path)
    if len(analyzed) < len(prompts):
        raise click.Abort(f"interrupted after {len(analyzed)} of {len(prompts)} questions")


def _asked(rag: Rag, question: str) -> list[_Prompt]:
    """One prompt as `blend answer` makes it."""
    ranked, layout = rag.retrieve(question)
    return [("question", question, layout, [hit.chunk.title for hit in ranked])]


def _recorded(rag: Rag, records: list[Record]) -> list[_Prompt]:
    """The prompts of a question file, with a KV correction fitted to them, as `blend report` does."""
    from blend.eval.evaluator import Evaluator

    fitting = fitting_records(rag, records, 0)
    calibrate(rag, Evaluator(rag.blender, rag.template), fitting)
    return [
        (
            record.id,
            record.question,
            rag.template.layout(record.question, record.chunks),
            [chunk.title for chunk in record.chunks],
        )
        for record in fitting
    ]


def _analyze(rag: Rag, prompts: list[_Prompt], layer: int | None, head: int | None) -> list[Analyzed]:
    """The prompts that were analyzed before Ctrl-C, the first few with a view, the first with pictures."""
    from blend.analyze.document import Analyzed, prompt_document
    from blend.analyze.numbers import summarize
    from blend.analyze.study import analyze_prompt

    analyzed: list[Analyzed] = []
    try:
        with counting("Analyzing prompts", "prompts", len(prompts)) as count:
            for place, (name, question, layout, titles) in enumerate(prompts):
                analysis = analyze_prompt(rag.blender, layout, head=head)
                identity = {"id": name, "question": question}
                view = None
                if place < MOST_VIEWS:
                    view = prompt_document(
                        analysis, rag.blend_config, identity, pictures=place == 0, layer=layer, titles=titles
                    )
                analyzed.append(Analyzed(identity, summarize(analysis), analysis.mapped, view))
                note(f"[{place + 1}/{len(prompts)}] {name}: {layout.rows} tokens")
                count(place + 1)
    except KeyboardInterrupt:
        pass
    return analyzed


def _document(rag: Rag, analyzed: list[Analyzed], workload: str) -> dict[str, Any]:
    from blend.analyze.document import analysis_document

    notes = []
    if any(name.endswith("sinks") for name, _ in rag.decoder.model.named_parameters()):
        notes.append("This model gives part of its attention to learned sinks; all shares are of the rest.")
    if rag.blend_config.correction and not any(prompt.mapped for prompt in analyzed):
        notes.append(
            "No KV correction was applied: the store has none that fits these prompts, or no prompt has two chunks."
        )
    info = replace(run_info(rag, workload), config=rag.blend_config.plain())
    return analysis_document(analyzed, info, notes)


def _write(document: dict[str, Any], page: Path | None, json_path: Path | None) -> None:
    from blend.analyze.document import write_page

    if json_path is not None:
        write_document(document, json_path)
    if page is not None:
        write_page(document, page)
        note(f"wrote {page}")
    for sentence in document["readings"].values():
        say(sentence)
