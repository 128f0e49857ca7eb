"""`blend verify`: whether a model may be blended, and at what ratio; passes or fails."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import check_outputs, note, say, write_document
from blend.cli.options import NAME, OUTPUT, PLACE, number
from blend.cli.progress import counting, stage_progress
from blend.cli.report import run_info
from blend.config import DEFAULT_MODEL, REPORT_TOKENS, CorpusConfig
from blend.errors import QualityError, UndecidedError
from blend.eval.dataset import Record, load_dataset

if TYPE_CHECKING:
    from blend.eval.verify import Verdict
    from blend.rag import Rag

QUESTIONS = 24


@click.command("verify")
@click.argument("model", default=DEFAULT_MODEL, type=NAME)
@click.option(
    "--questions",
    type=PLACE,
    help="JSONL question file, as of `blend report --dataset`; without one, built-in questions.",
)
@number("limit", "At most so many questions.", QUESTIONS)
@number("quality", "Most mean KL to full recompute, in nats a token.", 0.05)
@click.option("--json", "json_path", type=OUTPUT, help="Write everything that was measured as JSON.")
@options.computing
@options.model_engine
def command(
    model: str, questions: Path | None, limit: int, quality: float, json_path: Path | None, **values: Any
) -> None:
    """Check that MODEL may be blended, and find the ratio that keeps a quality.

    The exit code is 10 if it fails, and 11 if the questions are too few to tell.

    First come checks that hold for every model that is driven correctly. Then KL, changed answers and TTFT at five ratios are
    measured against full recompute; for a model with recurrent layers at two ratios, each with two kinds of states. `blend
    serve` and `blend answer` remember the result, and use the better states.
    """
    check_outputs(json=json_path)
    records = load_dataset(questions, limit) if questions else None
    with tempfile.TemporaryDirectory(prefix="kvblend") as place:
        settings = {"store": Path(place), "model": model, "name": "", "codec": CorpusConfig.codec, **values}
        opening.check(settings)
        rag = opening.open_rag(settings, needs_index=False)
        verdict = _verdict(rag, records, limit, quality, questions.name if questions else "built-in questions")
    *lines, conclusion = verdict.lines
    for line in lines:
        say(line)
    if json_path:
        write_document(verdict.document, json_path)
    if verdict.decision == "broken":
        raise QualityError(conclusion)
    if verdict.decision == "undecided":
        raise UndecidedError(conclusion)
    say(conclusion)


def _verdict(rag: Rag, records: list[Record] | None, limit: int, quality: float, workload: str) -> Verdict:
    from blend.eval.evaluator import Evaluator, Method
    from blend.eval.report import FULL, summarise
    from blend.eval.verify import RECURRENT_WAYS, WAYS, Verdict, builtin_records, check_model, remember

    if records is None:
        records = builtin_records(rag.template, limit)
    evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=REPORT_TOKENS)
    layout = rag.template.layout(records[0].question, records[0].chunks)
    evaluator.cache_chunks(layout)
    checks = check_model(rag.blender, layout)
    evaluator.calibrate(records, rag.corpus_config.surrogate_tokens, stage_progress())
    selector = str(rag.blend_config.selector)
    ways = RECURRENT_WAYS if rag.decoder.recurrent else WAYS
    methods = [Method(FULL), *(way.method(selector) for way in ways)]
    evaluator.warm_up(records[0], methods)
    measured = []
    with counting("Comparing answers", "questions", len(records)) as count:
        for place, record in enumerate(records, 1):
            rows = evaluator.measure(record, methods)
            measured += rows
            note(f"[{place}/{len(records)}] {record.id}: KL {', '.join(f'{row.kl:.3f}' for row in rows[1:])}")
            count(place)
    verdict = Verdict(tuple(checks), summarise(measured, info=run_info(rag, workload)), quality)
    remember(rag.decoder, verdict)
    return verdict
