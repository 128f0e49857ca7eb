"""`blend verify`: whether a model may be blended, and at what ratio; passes or fails."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import note, say, stage_progress
from blend.cli.options import NAME, OUTPUT, PLACE, number
from blend.cli.report import check_outputs, run_info
from blend.config import DEFAULT_MODEL, REPORT_TOKENS, CorpusConfig
from blend.errors import QualityError, UndecidedError
from blend.eval.dataset import load_dataset

if TYPE_CHECKING:
    from blend.eval.check import Verdict
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
@click.option("--store", type=PLACE, help="Keep the caches there.  [default: a temporary folder]")
@options.computing
def command(
    model: str,
    questions: Path | None,
    limit: int,
    quality: float,
    json_path: Path | None,
    store: Path | None,
    **values: Any,
) -> None:
    """Check that MODEL may be blended, and find the ratio that keeps a quality.

    The exit code is 10 if it fails, and 11 if the questions are too few to tell.

    First come checks that hold for every model that is driven correctly. Then KL, changed answers and TTFT at five ratios are
    measured against full recompute; for a model with recurrent layers at two ratios, each with two kinds of states. `blend
    serve` and `blend answer` remember the result, and use the better states.
    """
    check_outputs(json_path, None)
    records = load_dataset(questions, limit) if questions else None
    with ExitStack() as stack:
        place = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvblend")))
        settings = {"store": place, "model": model, "name": "", "codec": CorpusConfig.codec, **values}
        opening.check(settings)
        rag = opening.open_rag(settings, needs_index=False)
        verdict = _verdict(rag, records, limit, quality, questions)
    from blend.eval.output import write_whole

    *lines, conclusion = verdict.lines
    for line in lines:
        say(line)
    if json_path:
        write_whole(json_path, json.dumps(verdict.document, indent=1, default=str).encode())
        note(f"wrote {json_path}")
    if verdict.decision == "broken":
        raise QualityError(conclusion)
    if verdict.decision == "undecided":
        raise UndecidedError(conclusion)
    say(conclusion)


def _verdict(
    rag: Rag,
    records: list[Any] | None,
    limit: int,
    quality: float,
    questions: Path | None,
) -> Verdict:
    from blend.eval.check import Verdict, builtin_records, check_model, checked_methods, remember
    from blend.eval.evaluator import Evaluator
    from blend.eval.report import summarise

    if records is None:
        records = builtin_records(rag.template, limit)
    evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=REPORT_TOKENS)
    layout = rag.template.layout(records[0].question, records[0].chunks)
    evaluator.cache_chunks(layout)
    checks = check_model(rag.blender, layout)
    with stage_progress() as progress:
        evaluator.calibrate(records, rag.corpus_config.surrogate_tokens, progress)
    measured = []
    methods = checked_methods(str(rag.blend_config.selector), recurrent=bool(rag.decoder.recurrent))
    evaluator.warm_up(records[0], methods)
    for place, record in enumerate(records, 1):
        rows = evaluator.measure(record, methods)
        measured += rows
        note(
            f"[{place}/{len(records)}] {record.id}: KL {', '.join(f'{row.kl:.3f}' for row in rows[1:] if row.kl is not None)}"
        )
    info = run_info(rag, questions.name if questions else "built-in questions")
    verdict = Verdict(tuple(checks), summarise(measured, info=info), quality)
    remember(rag.decoder, verdict)
    return verdict
