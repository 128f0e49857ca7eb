"""`blend report`: full recompute, plain reuse and blended prefill on the same token ids, alternating.

It asks the questions of a file, questions over the corpus, or built-in ones.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import check_outputs, note, seconds, show_results
from blend.cli.options import PLACE, Parsed, number
from blend.cli.progress import counting, stage_progress
from blend.cli.questions import AUTO, made_questions, read_questions
from blend.config import REPORT_TOKENS
from blend.errors import ConfigError, PromptError, QualityError
from blend.eval.dataset import LINE, Record, RecordChunk, load_dataset
from blend.eval.needles import MIN_CHUNKS, make_needles

if TYPE_CHECKING:
    from blend.eval.evaluator import Evaluator
    from blend.eval.report import Measurement, Report, RunInfo
    from blend.rag import Rag

NEEDLE_CHUNKS = 8
BUILTIN_QUESTIONS = 12


@click.command("report", cls=options.Command)
@click.option(
    "--dataset",
    type=PLACE,
    help=f"File of questions, each on a line with the chunks to answer it from: {LINE}. Without one, built-in questions.",
)
@click.option(
    "--questions",
    type=Parsed("path", str),
    metavar="FILE",
    help="Questions over the corpus, one a line, each with the chunks that it retrieves; auto makes them from the chunks.",
)
@number("limit", f"At most so many questions.  [default: all; {BUILTIN_QUESTIONS} built-in ones]")
@options.json_file
@number("max_new_tokens", "Longest answer.", REPORT_TOKENS)
@options.common
@options.retrieval
@options.blending
def command(
    dataset: Path | None,
    questions: str | None,
    limit: int | None,
    json_path: Path | None,
    max_new_tokens: int,
    **values: Any,
) -> None:
    """Measure TTFT and quality of blended prefill and plain reuse against full recompute, question by question.

    The store keeps caches of the questions' chunks; `blend store prune --unused` removes them. Ctrl-C ends the run early and
    reports what was measured.

    The exit code is 10 if the whole 95 % interval of the mean KL lies above --quality, or that of the share of different
    answers above --flips.
    """
    from blend.eval.report import report_document
    from blend.eval.show import render_report

    check_outputs(json=json_path)
    rag, records = load_records(values, dataset, limit, questions)
    opening.note_caveats(rag)
    opening.note_no_estimates(rag)
    measured, is_whole = _measure(rag, records, max_new_tokens)
    if measured:
        report = _summarise(rag, measured, dataset.name if dataset else _workload(questions))
        show_results(render_report(report), report_document(report), json_path)
        if is_whole:
            _require_kept(report)
    if not is_whole:
        count = len({row.record_id for row in measured})
        raise click.Abort(f"interrupted after {count} of {len(records)} questions")


def _require_kept(report: Report) -> None:
    """Raise `QualityError` if the answers are certainly farther from full recompute than --quality or --flips allow."""
    broken = [line for name, line in report.judged_lines.items() if report.judged[name].decision == "broken"]
    if broken:
        raise QualityError(
            f"{' and '.join(broken)}: fit the estimates to more questions (`blend precompute --questions`), or take a larger "
            "--ratio"
        )


def _measure(rag: Rag, records: list[Record], max_new_tokens: int) -> tuple[list[Measurement], bool]:
    """Measurements of the records that fit the model, and whether they are whole: Ctrl-C may come before the last."""
    from blend.eval.evaluator import Evaluator, standard_methods

    measured: list[Measurement] = []
    try:
        evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=max_new_tokens)
        methods = standard_methods(rag.blend_config)
        fitting = fitting_records(rag, records, max_new_tokens)
        calibrate(rag, evaluator, fitting)
        evaluator.warm_up(fitting[0], methods)
        with counting("Comparing answers", "questions", len(fitting)) as count:
            for place, record in enumerate(fitting, 1):
                rows = evaluator.measure(record, methods)
                measured += rows
                times = ", ".join(f"{row.method} {seconds(row.ttft_s)}" for row in rows)
                note(f"[{place}/{len(fitting)}] {record.id}: {times}")
                count(place)
    except KeyboardInterrupt:
        return measured, False
    return measured, True


def fitting_records(rag: Rag, records: list[Record], room: int) -> list[Record]:
    """Records whose prompt fits the model's context, with so many tokens for the answer; the others are named.

    Raises `PromptError` if none does.
    """
    fitting = []
    for record in records:
        rows = rag.template.layout(record.question, record.chunks).rows
        try:
            rag.decoder.check_length(rows + room)
        except PromptError as error:
            note(f"{record.id} left out: {error}")
            continue
        fitting.append(record)
    if not fitting:
        raise PromptError(
            f"no question fits the {rag.decoder.context_length} tokens that the model reads, with {room} for the answer; use "
            "shorter records, fewer chunks, or a model with a longer context"
        )
    return fitting


def _workload(questions: str | None) -> str:
    if questions is None:
        return "built-in questions"
    return "questions made from the chunks" if questions == AUTO else Path(questions).name


def _summarise(rag: Rag, measured: list[Measurement], workload: str) -> Report:
    from blend.eval.report import summarise
    from blend.quality import Quality

    config = {"blend": rag.blend_config.plain(), "corpus": asdict(rag.corpus_config), "model": rag.model}
    info = replace(run_info(rag, workload), config=config)
    return summarise(measured, info=info, target=Quality.of(rag.blend_config))


def run_info(rag: Rag, workload: str) -> RunInfo:
    """The setting of this command's measurements."""
    from blend.eval.machine import describe_machine
    from blend.eval.report import RunInfo

    command = shlex.join(["blend", *sys.argv[1:]])
    return RunInfo(rag.model, workload, command, machine=describe_machine(), **rag.decoder.number_format)


def load_records(
    values: dict[str, Any], dataset: Path | None, limit: int | None, questions: str | None = None
) -> tuple[Rag, list[Record]]:
    """The engine, and the questions, which are read first so that mistakes show at once."""
    if dataset and questions:
        raise ConfigError("--dataset and --questions both name the questions; give one of them")
    records = load_dataset(dataset, limit) if dataset else []
    texts = read_questions(Path(questions)) if questions not in (None, AUTO) else []
    opening.check(values, needs_corpus=dataset is None or bool(values["name"]))
    rag = opening.open_rag(values, needs_index=dataset is None)
    if questions:
        texts = texts or made_questions(rag)
        records = [corpus_record(rag, f"q{place:03}", text) for place, text in enumerate(texts[:limit], 1)]
    elif dataset is None:
        records = builtin_records(rag, limit or BUILTIN_QUESTIONS)
    return rag, records


def calibrate(rag: Rag, evaluator: Evaluator, records: list[Record]) -> None:
    """Choose a surrogate context and fit KV corrections on these records' chunks, unless the store or the options have them."""
    if rag.blend_config.correction:
        evaluator.calibrate(records, rag.corpus_config.surrogate_tokens, stage_progress())


def builtin_records(rag: Rag, limit: int) -> list[Record]:
    """Questions about invented facts in the corpus's chunks.

    Raises `ConfigError` for a corpus of fewer than four different chunks.
    """
    filler = list(dict.fromkeys(chunk.text.strip() for chunk in rag.index.chunks))
    if len(filler) < MIN_CHUNKS:
        raise ConfigError(
            f"the corpus has {len(filler)} different chunks, built-in questions need {MIN_CHUNKS}: "
            "precompute more documents, or bring questions of your own with --dataset"
        )
    return make_needles(filler, limit, min(NEEDLE_CHUNKS, len(filler)))


def corpus_record(rag: Rag, name: str, question: str) -> Record:
    """A question over the corpus, with the chunks that it retrieves."""
    hits = rag.retriever.search(question, rag.corpus_config.top_k)
    chunks = tuple(RecordChunk(hit.chunk.title, hit.chunk.text) for hit in hits)
    return Record(name, question, (), chunks)
