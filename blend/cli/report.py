"""`blend report`: full recompute, plain reuse and blended prefill on the same token ids, alternating.

It asks questions over the corpus, those of a file that brings its own chunks, or built-in ones.
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
from blend.cli.options import OUTPUT, PLACE, Parsed, number
from blend.cli.progress import counting, stage_progress
from blend.cli.questions import AUTO, made_questions, read_question_file
from blend.config import REPORT_TOKENS
from blend.errors import ConfigError, PromptError, QualityError
from blend.eval.dataset import LINE, QUESTION_LINE, Question, Record, RecordChunk, load_dataset
from blend.eval.needles import MIN_CHUNKS, make_needles
from blend.select import make_selector
from blend.select.base import needs_of
from blend_retrieval.installation import install_command

if TYPE_CHECKING:
    from blend.eval.evaluator import Evaluator, Method
    from blend.eval.report import Measurement, Report, RunInfo
    from blend.rag import Rag

NEEDLE_CHUNKS = 8
BUILTIN_QUESTIONS = 12


@click.command("report", cls=options.Command)
@click.option(
    "--questions",
    type=Parsed("path", str),
    metavar="FILE",
    help="Questions over the corpus, each with the chunks that it retrieves: plain text, one a line, or with gold answers, "
    f"{QUESTION_LINE}. auto makes them from the chunks.",
)
@click.option(
    "--dataset",
    type=PLACE,
    help=f"File of questions, each on a line with the chunks to answer it from: {LINE}. Without any file, built-in questions.",
)
@number("limit", f"At most so many questions.  [default: all; {BUILTIN_QUESTIONS} built-in ones]")
@number("repeats", "Timed prefills of each method on each question, of which the median counts.", 1)
@options.json_file
@click.option("--picture", type=OUTPUT, help="Draw KL against TTFT and rows, and changed answers (.png or .svg).")
@click.option(
    "--html", "page", type=OUTPUT, help="Write one page: tables, pictures, and the answers that changed, side by side."
)
@number("max_new_tokens", "Longest answer.", REPORT_TOKENS)
@options.common
@options.retrieval
@options.comparing
def command(
    dataset: Path | None,
    questions: str | None,
    limit: int | None,
    repeats: int,
    json_path: Path | None,
    picture: Path | None,
    page: Path | None,
    max_new_tokens: int,
    selectors: tuple[str, ...],
    ratios: tuple[float, ...],
    **values: Any,
) -> None:
    """Measure TTFT and quality of blended prefill and plain reuse against full recompute, question by question.

    Several --selector and --ratio are compared in one run, each selector at each ratio.

    The store keeps caches of the questions' chunks; `blend store prune --unused` removes them. Ctrl-C ends the run early and
    reports what was measured.

    The exit code is 10 if the whole 95 % interval of the mean KL lies above --quality, or that of the share of different
    answers above --flips.
    """
    _check_files(json_path, picture, page)
    if len(set(ratios)) > 1 and (values["quality"] is not None or values["flips"] is not None):
        raise ConfigError("--quality and --flips choose the ratio of each prompt: give one --ratio with them")
    values |= {"selector": selectors[0], "ratio": ratios[0]}
    rag, records = load_records(values, dataset, limit, questions)
    opening.note_caveats(rag)
    opening.note_no_estimates(rag)
    methods = _methods(rag, selectors, ratios)
    measured, is_whole = _measure(rag, records, methods, max_new_tokens, repeats)
    if measured:
        report = _summarise(rag, measured, methods, dataset.name if dataset else _workload(questions))
        _show(report, json_path, picture, page)
        if is_whole:
            _require_kept(report)
    if not is_whole:
        count = len({row.record_id for row in measured})
        raise click.Abort(f"interrupted after {count} of {len(records)} questions")


def _check_files(json_path: Path | None, picture: Path | None, page: Path | None) -> None:
    """Raise `ConfigError` for a file that could not be written, and for pictures without matplotlib."""
    from blend.eval.picture import check_picture, require_matplotlib

    check_outputs(json=json_path, picture=picture, html=page)
    if picture is not None:
        check_picture(picture)
    if page is not None:
        require_matplotlib("--html")


def _show(report: Report, json_path: Path | None, picture: Path | None, page: Path | None) -> None:
    """Print the tables and write the files."""
    from blend.eval.page import write_page
    from blend.eval.picture import write_picture
    from blend.eval.report import report_document
    from blend.eval.show import render_report

    show_results(render_report(report), report_document(report), json_path)
    if picture is not None:
        write_picture(report, picture)
        note(f"wrote {picture}")
    if page is not None:
        write_page(report, page)
        note(f"wrote {page}")


def _methods(rag: Rag, selectors: tuple[str, ...], ratios: tuple[float, ...]) -> tuple[Method, ...]:
    """The methods to compare. Raises `ConfigError` for a selector that this model cannot serve."""
    from blend.eval.evaluator import standard_methods

    for selector in selectors:
        needs_of(make_selector(selector), len(rag.decoder.rotations))
    return standard_methods(rag.blend_config, selectors, ratios)


def _require_kept(report: Report) -> None:
    """Raise `QualityError` if the answers are certainly farther from full recompute than --quality or --flips allow."""
    judged = zip(report.judgements, report.judged_lines, strict=True)
    broken = [line for judgement, line in judged if judgement.figure.decision == "broken"]
    if broken:
        raise QualityError(
            f"{' and '.join(broken)}: fit the estimates to more questions (`blend precompute --questions`), or take a larger "
            "--ratio"
        )


def _measure(
    rag: Rag, records: list[Record], methods: tuple[Method, ...], max_new_tokens: int, repeats: int
) -> tuple[list[Measurement], bool]:
    """Measurements of the records that fit the model, and whether they are whole: Ctrl-C may come before the last."""
    from blend.eval.evaluator import Evaluator
    from blend.eval.metrics import has_rouge, wants_rouge

    if not has_rouge() and any(wants_rouge(record.answers, record.task) for record in records):
        note(f"ROUGE-L of long answers is left out: it needs rouge-score, {install_command('report')}")
    measured: list[Measurement] = []
    try:
        evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=max_new_tokens, repeats=repeats)
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


def _summarise(rag: Rag, measured: list[Measurement], methods: tuple[Method, ...], workload: str) -> Report:
    from blend.eval.report import summarise
    from blend.quality import Quality

    config = {
        "blend": rag.blend_config.plain(),
        "methods": {method.name: method.config and method.config.plain() for method in methods},
        "corpus": asdict(rag.corpus_config),
        "model": rag.model,
    }
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
    corpus_questions = read_question_file(Path(questions)) if questions not in (None, AUTO) else []
    opening.check(values, needs_corpus=dataset is None or bool(values["name"]))
    rag = opening.open_rag(values, needs_index=dataset is None)
    if questions:
        corpus_questions = corpus_questions or [Question(text) for text in made_questions(rag)]
        records = [
            corpus_record(rag, f"q{place:03}", question) for place, question in enumerate(corpus_questions[:limit], 1)
        ]
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


def corpus_record(rag: Rag, name: str, question: Question) -> Record:
    """A question over the corpus, with the chunks that it retrieves."""
    hits = rag.retriever.search(question.text, rag.corpus_config.top_k)
    chunks = tuple(RecordChunk(hit.chunk.title, hit.chunk.text) for hit in hits)
    return Record(name, question.text, question.answers, chunks, question.task)
