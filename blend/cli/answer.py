"""`blend answer`: retrieve, blend, decode, and show where the time went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blend.cli import opening, options
from blend.cli.console import ANSWER_KEEPS, note, output, print_json, say, seconds, silence_notes, stream
from blend.cli.options import TEXT, number
from blend.config import ANSWER_TOKENS
from blend.errors import PromptError
from blend.text import counted, is_text, visible

if TYPE_CHECKING:
    from blend.answers import Answer, FullAnswer
    from blend.rag import Rag

LONGEST_QUESTION = 1_000_000  # characters


@click.command("answer", cls=options.Command)
@click.argument("question", type=TEXT)
@number("max_new_tokens", "Longest answer.", ANSWER_TOKENS)
@click.option("--compare", is_flag=True, help="Also answer after full prefill of the same token ids.")
@click.option("-q", "--quiet", is_flag=True, help="Print the answer and nothing else.")
@options.json_option
@options.common
@options.retrieval
@options.blending
@options.reproducible
def command(question: str, max_new_tokens: int, compare: bool, quiet: bool, as_json: bool, **values: Any) -> None:
    """Answer QUESTION over the precomputed documents. A QUESTION of - is read from standard input.

    The answer is streamed to standard output as it is decoded; a summary follows: time to first token by stage, the chunks
    with hit or miss, rows recomputed. Notes go to standard error.
    """
    question = (_typed() if question == "-" else question).strip()
    if not question:
        raise PromptError("the question is empty; ask something")
    if quiet:
        silence_notes()
    opening.check(values, needs_corpus=True)
    rag = opening.open_rag(values)
    opening.note_caveats(rag)
    rag.warm_up(compare=compare)
    on_text = None if as_json else stream
    answer = rag.answer(question, max_new_tokens=max_new_tokens, compare=compare, on_text=on_text)
    if not as_json:
        say()
    _note_problems(answer)
    if as_json:
        print_json(answer_document(answer, rag, values["selector"]))
    elif not quiet:
        output.print(answer_panel(answer))


def _typed() -> str:
    """The text on standard input, which may never end: no more is read than a question may have."""
    if sys.stdin is None:
        raise click.UsageError("there is no standard input to read the question from")
    if sys.stdin.isatty():
        note("Type the question, then Ctrl-D:")
    try:
        typed = sys.stdin.read(LONGEST_QUESTION + 1)
    except (UnicodeDecodeError, OSError) as error:
        raise click.UsageError(f"the question on standard input cannot be read ({error})") from None
    if len(typed) > LONGEST_QUESTION:
        raise click.UsageError(f"the question on standard input has more than {LONGEST_QUESTION:,} characters")
    if not is_text(typed):
        raise click.UsageError("the question on standard input is not UTF-8 text")
    return typed


def _note_problems(answer: Answer) -> None:
    """Note problems and a cut answer."""
    for problem in answer.problems:
        note(problem)
    if not answer.text:
        note("the model ended its answer at once")
    if answer.cut:
        length = len(answer.generation.token_ids)
        note(f"the answer was cut after {length} tokens; --max-new-tokens allows more, up to the context")


def answer_document(answer: Answer, rag: Rag, selector: str) -> dict[str, object]:
    """What `--json` prints. Times are in seconds."""
    blend = answer.blend
    full = answer.full
    document: dict[str, object] = {
        "question": answer.question,
        "answer": answer.text,
        "cut": answer.cut,
        "model": rag.model,
        **rag.decoder.number_format,
        "selector": selector,
        "ratio": rag.blend_config.ratio,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.generation.tpot_s,
        "tokens": len(answer.generation.token_ids),
        "stages": answer.stages,
        "rows_total": blend.layout.rows,
        "rows_recomputed": blend.rows_recomputed,
        "rows_share": blend.rows_share,
        "bytes_loaded": blend.bytes_loaded,
        "quality": blend.quality.document if blend.quality else None,
        "chunks": [
            {"id": ranked.chunk.id, "title": ranked.chunk.title, "score": ranked.score, "hit": hit}
            for ranked, hit in zip(answer.chunks, blend.hits, strict=True)
        ],
        "problems": list(answer.problems),
    }
    if full is not None:
        document["full"] = {"answer": full.text, "ttft_s": full.ttft_s, "speedup": full.ttft_s / answer.ttft_s}
    return document


def answer_panel(answer: Answer) -> Panel:
    """The summary after an answer: times by stage, rows recomputed, chunks with hit or miss."""
    parts: list[RenderableType] = [Text(_time(answer)), Text(_rows(answer)), _chunks(answer)]
    if answer.full is not None:
        parts += _comparison(answer, answer.full)
    return Panel(Group(*parts), title="blended prefill", title_align="left", expand=False)


def _time(answer: Answer) -> str:
    stages = answer.stages
    before = seconds(stages.pop("retrieve", 0.0))
    parts = " + ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in stages.items())
    return f"first token after {seconds(answer.ttft_s)} = {parts}   (retrieval before that: {before})"


def _rows(answer: Answer) -> str:
    blend = answer.blend
    missed = blend.hits.count(False)
    stored = f"; {counted(missed, 'chunk')} computed now" if missed else ""
    expected = f"; expected KL {blend.quality.kl:.3f}" if blend.quality else ""
    return (
        f"rows recomputed {blend.rows_recomputed:,} of {blend.layout.rows:,}; "
        f"compute {blend.rows_share:.0%} of full prefill; {blend.bytes_loaded / 1e6:.0f} MB of stored KV{stored}{expected}"
    )


def _chunks(answer: Answer) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for ranked, hit in zip(answer.chunks, answer.blend.hits, strict=True):
        word = Text("hit" if hit else "miss", style="green" if hit else "yellow")
        table.add_row(word, f"{ranked.score:.2f}", Text(visible(ranked.chunk.title)))
    return table


def _comparison(answer: Answer, full: FullAnswer) -> list[RenderableType]:
    longer = full.ttft_s / answer.ttft_s
    line = f"full prefill: first token after {seconds(full.ttft_s)}, {longer:.1f} times as long; it answers"
    if full.text == answer.text:
        return [Text(f"{line} the same")]
    return [Text(f"{line}:"), Text(visible(full.text, keep=ANSWER_KEEPS), style="dim")]
