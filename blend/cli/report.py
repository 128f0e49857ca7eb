"""`blend report`: full recompute, plain reuse and blended prefill on the same token ids, alternating.

It asks the questions of a file, questions over the corpus, or built-in ones.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import errors, note, output, print_json, print_wide, seconds, stage_progress
from blend.cli.options import OUTPUT, OUTPUT_OR_STDOUT, PLACE, Parsed, number
from blend.cli.questions import AUTO, made_questions, read_questions
from blend.config import REPORT_TOKENS
from blend.errors import ConfigError, QualityError
from blend.eval.dataset import LINE, Record, RecordChunk, load_dataset
from blend.eval.needles import MIN_CHUNKS, make_needles

if TYPE_CHECKING:
    from blend.eval.evaluator import Evaluator
    from blend.eval.report import Measurement, Report, RunInfo
    from blend.rag import Rag

STDOUT = Path("-")
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
@click.option(
    "--json",
    "json_path",
    type=OUTPUT_OR_STDOUT,
    help="Write the report as JSON; - is standard output, and the table then goes to standard error.",
)
@click.option("--picture", type=OUTPUT, help="Draw quality against TTFT (.png, .svg or .pdf).")
@number("max_new_tokens", "Longest answer.", REPORT_TOKENS)
@number("repeats", "Timed prefills of each method.", 1)
@options.without_tiers
@options.common
@options.retrieval
@options.blending
def command(
    dataset: Path | None,
    questions: str | None,
    limit: int | None,
    json_path: Path | None,
    picture: Path | None,
    max_new_tokens: int,
    repeats: int,
    **values: Any,
) -> None:
    """Measure TTFT and quality of blended prefill and plain reuse against full recompute, question by question.

    The store keeps caches of the questions' chunks; `blend store prune --unused` removes them. Ctrl-C ends the run early and
    reports what was measured.

    The exit code is 10 if the whole 95 % interval of the mean KL lies above --quality, or that of the share of different
    answers above --flips.
    """
    check_outputs(json_path, picture)
    rag, records = load_records(values, dataset, limit, questions)
    opening.note_no_estimates(rag)
    measured, interrupted = _measure(rag, records, max_new_tokens, repeats)
    report = None
    if measured:
        report = _summarise(rag, measured, dataset.name if dataset else _workload(questions))
        show_report(report, json_path, picture)
    if interrupted:
        count = len({row.record_id for row in measured})
        raise click.Abort(f"interrupted after {count} of {len(records)} questions")
    if report is not None:
        _require_kept(report)


def _require_kept(report: Report) -> None:
    """Raise `QualityError` if the answers are certainly farther from full recompute than --quality or --flips allow."""
    broken = [line for name, line in report.judged_lines.items() if report.judged[name].decision == "broken"]
    if broken:
        raise QualityError(
            f"{' and '.join(broken)}: fit the estimates to more questions (`blend precompute --questions`), or take a larger "
            "--ratio"
        )


def _measure(
    rag: Rag,
    records: list[Record],
    max_new_tokens: int,
    repeats: int,
) -> tuple[list[Measurement], bool]:
    """Measurements of all records, and whether Ctrl-C came before the last."""
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


def _fitting(
    rag: Rag,
    records: list[Record],
    max_new_tokens: int,
) -> list[Record]:
    """Records whose prompt and answer fit the model's context; the others are named. Raises `PromptError` if none does."""
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


def check_outputs(json_path: Path | None, picture: Path | None) -> None:
    """Raise `ConfigError` for files that cannot be written, and for missing packages."""
    if find_spec("rouge_score") is None:
        raise ConfigError("a report needs rouge-score: pip install 'kvblend[report]'")
    check_files(json_path, picture)


def check_files(json_path: Path | None, picture: Path | None) -> None:
    """Raise `ConfigError` for files that cannot be written, and for a picture without matplotlib."""
    from blend.eval.output import check_writable
    from blend.eval.show import SUFFIXES

    if picture and picture.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{picture}: a picture ends in one of {', '.join(SUFFIXES)}")
    if picture and find_spec("matplotlib") is None:
        raise ConfigError("the picture needs matplotlib: pip install 'kvblend[report]'")
    if picture and picture == json_path:
        raise ConfigError(f"{picture}: --json and --picture name the same file; give each its own")
    for path in (json_path, picture):
        if path and path != STDOUT:
            check_writable(path)


def show_report(report: Report, json_path: Path | None, picture: Path | None) -> None:
    """Print the table and write the files. With JSON on standard output, the table goes to standard error."""
    from blend.eval.report import report_document, write_json
    from blend.eval.show import WIDTH, render_report, write_picture

    to_stdout = json_path == STDOUT
    print_wide(errors if to_stdout else output, render_report(report), WIDTH)
    if json_path and not to_stdout:
        write_json(report, json_path)
        note(f"wrote {json_path}")
    if picture:
        write_picture(report, picture)
        note(f"wrote {picture}")
    if to_stdout:
        print_json(json.loads(json.dumps(report_document(report), default=str)))


def load_records(
    values: dict[str, Any],
    dataset: Path | None,
    limit: int | None,
    questions: str | None = None,
) -> tuple[Rag, list[Record]]:
    """The engine with its model loaded, and the questions, which are read first so that mistakes show at once."""
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
    _ = rag.store, rag.decoder
    return rag, records


def calibrate(rag: Rag, evaluator: Evaluator, records: list[Record]) -> None:
    """Choose a surrogate context and fit KV corrections on these records' chunks, unless the store or the options have them."""
    if rag.blend_config.correction:
        with stage_progress() as progress:
            evaluator.calibrate(records, rag.corpus_config.surrogate_tokens, progress)


def builtin_records(rag: Rag, limit: int) -> list[Record]:
    """Questions about the demo corpus, if the index holds it, alternating with needle questions over its chunks.

    Raises `ConfigError` for a corpus of fewer than four different chunks.
    """
    chunks = rag.index.chunks
    filler = list(dict.fromkeys(chunk.text.strip() for chunk in chunks))
    if len(filler) < MIN_CHUNKS:
        raise ConfigError(
            f"the corpus has {len(filler)} different chunks, built-in questions need {MIN_CHUNKS}: "
            "precompute more documents, or bring questions of your own with --dataset"
        )
    about = _corpus_questions(rag, {chunk.document_id for chunk in chunks})
    needles = make_needles(
        filler,
        per_kind=limit // 4 + 1,
        chunks=min(NEEDLE_CHUNKS, len(filler)),
        seed=0,
    )
    alternating = chain.from_iterable(zip_longest(about, needles))
    return [record for record in alternating if record is not None][:limit]


def _corpus_questions(rag: Rag, documents: set[str]) -> list[Record]:
    from blend_retrieval.demo_questions import DEMO_QUESTIONS

    records = []
    for place, demo in enumerate(DEMO_QUESTIONS):
        if {f"{module}.md" for module in demo.modules} <= documents:
            task = "corpus" if len(demo.modules) == 1 else "corpus-two-modules"
            record = corpus_record(rag, f"corpus-{place:02}", demo.question)
            records.append(replace(record, answers=demo.answers, task=task))
    return records


def corpus_record(rag: Rag, name: str, question: str) -> Record:
    """A question over the corpus, with the chunks that it retrieves."""
    hits = rag.retriever.search(question, rag.corpus_config.top_k)
    chunks = tuple(RecordChunk(hit.chunk.title, hit.chunk.text) for hit in hits)
    return Record(name, question, (), chunks)
