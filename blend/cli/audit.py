"""`blend audit`: a corpus's answers to a file of questions, compared with full recompute's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from blend.cli import opening, options
from blend.cli.console import counted, note, print_json, read_text, say
from blend.cli.options import PLACE, number
from blend.config import REPORT_TOKENS
from blend.errors import DatasetError, PromptError, QualityError

if TYPE_CHECKING:
    from blend.intervals import Interval
    from blend.quality import Quality
    from blend.rag import Rag


class Audited(NamedTuple):
    """One answer.

    kl: mean KL of the blended to the full next-token distributions along the answer, nats. first: index of the first token that
    full recompute would not say; None if it says the same. rows_share: of full prefill's rows that were computed. estimated:
    whether a calibration chose the rows. notes: deviations from what was asked for.
    """

    question: str
    answer: str
    kl: float
    first: int | None
    rows_share: float
    estimated: bool
    notes: tuple[str, ...]


@click.command("audit")
@click.argument("questions", type=PLACE)
@number("limit", "At most so many questions.  [default: all]")
@number("max_new_tokens", "Longest answer.", REPORT_TOKENS)
@options.json_option
@options.common
@options.retrieval
@options.blending
def command(questions: Path, limit: int | None, max_new_tokens: int, as_json: bool, **given: Any) -> None:
    """Answer the QUESTIONS over the corpus, and compare each answer with full recompute of the same prompt.

    QUESTIONS is a text file with one question a line, or JSON Lines with a field "question". The exit code is 10 if the
    whole 95 % interval of the mean KL lies above --quality, or that of the share of different answers above --flips.
    """
    asked = read_questions(questions)[:limit]
    opening.check(given, needs_corpus=True)
    rag = opening.open_rag(given)
    found = []
    for place, question in enumerate(asked, 1):
        try:
            found.append(audit(rag, question, max_new_tokens))
        except PromptError as error:
            note(f"[{place}/{len(asked)}] left out: {error}")
            continue
        said = "the same" if found[-1].first is None else f"another token {found[-1].first + 1}"
        note(f"[{place}/{len(asked)}] KL {found[-1].kl:.3f}, {said}")
    if not found:
        raise PromptError("no question could be answered; see the notes above")
    from blend.quality import Quality

    for line in dict.fromkeys(line for one in found for line in one.notes):
        note(line)
    _show(found, Quality.of(rag.blend_config), as_json)


def read_questions(path: Path) -> list[str]:
    """The questions of a file. Raises `DatasetError`."""
    lines = [line.strip() for line in read_text(path, DatasetError).splitlines() if line.strip()]
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1)]
    if not questions:
        raise DatasetError(f"{path}: no question in it; write one a line")
    return questions


def _question(path: Path, number: int, line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        question = json.loads(line)["question"]
    except (ValueError, KeyError):
        question = None
    if not isinstance(question, str) or not question.strip():
        raise DatasetError(f'{path}, line {number}: no JSON object with a text "question"; write {{"question": "..."}}')
    return question


def audit(rag: Rag, question: str, max_new_tokens: int) -> Audited:
    """Answer a question, then run full prefill and the answer's tokens behind it. Raises `PromptError`."""
    from blend.eval.metrics import kl_divergence
    from blend.model.decoder import full_prefill
    from blend.model.generate import teacher_forced_logits

    answer = rag.answer(question, max_new_tokens=max_new_tokens)
    blend, tokens = answer.blend, answer.generation.token_ids
    blend.rewind()
    blended = teacher_forced_logits(blend, tokens)
    full = teacher_forced_logits(full_prefill(rag.decoder, blend.layout), tokens)
    likeliest = full.argmax(1).tolist()
    first = next((place for place, token in enumerate(tokens) if token != likeliest[place]), None)
    kl = float(kl_divergence(full, blended).mean())
    return Audited(question, answer.text, kl, first, blend.rows_share, blend.quality is not None, blend.notes)


def _show(found: list[Audited], asked: Quality, as_json: bool) -> None:
    from blend.intervals import decide, enough_for, mean_interval, share_interval

    kl = mean_interval([one.kl for one in found])
    flips = share_interval(sum(one.first is not None for one in found), len(found))
    limits = ((kl, asked.kl, "the mean KL"), (flips, asked.flips, "the share of different answers"))
    judged = [
        (what, decide(interval, len(found), limit), limit, enough_for(interval, len(found), limit))
        for interval, limit, what in limits
        if limit is not None
    ]
    broken = [f"{what} is above {limit:g}" for what, decision, limit, _ in judged if decision == "broken"]
    if as_json:
        decided = {what: decision for what, decision, _, _ in judged}
        shown = {"kl": vars(kl), "flips": vars(flips), "kept": not broken, "decided": decided}
        print_json({**shown, "answers": [one._asdict() for one in found]})
    else:
        rows = sum(one.rows_share for one in found) / len(found)
        say(f"{counted(len(found), 'answer')}, {rows:.0%} of the rows computed")
        say(f"KL to full recompute: {_words(kl, '.3f')} nats a token")
        say(f"full recompute says something else: {_words(flips, '.0%')}")
        for what, decision, limit, enough in judged:
            more = f": {counted(enough, 'question')} would probably decide" if decision == "undecided" else ""
            say(f"{what} within {limit:g}: {decision}{more}")
    if broken:
        more = "more questions" if any(one.estimated for one in found) else "questions"
        raise QualityError(
            f"{' and '.join(broken)}, the whole 95 % interval: calibrate on {more} (`blend precompute --questions`), or take a "
            "larger --ratio"
        )


def _words(interval: Interval, form: str) -> str:
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
