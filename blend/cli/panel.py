"""The summary behind an answer: where the time went, which chunks were hits, what was recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blend.cli.console import ANSWER_KEEPS, counted, seconds
from blend.visible import visible

if TYPE_CHECKING:
    from blend.rag import Answer, FullAnswer


def answer_panel(answer: Answer) -> Panel:
    """One compact panel."""
    parts: list[RenderableType] = [Text(_time(answer)), Text(_rows(answer)), _chunks(answer)]
    if answer.full is not None:
        parts += _comparison(answer, answer.full)
    return Panel(Group(*parts), title="blended prefill", title_align="left", expand=False)


def _time(answer: Answer) -> str:
    stages = {name.replace("_", " "): value for name, value in answer.stages.items() if name != "retrieve"}
    parts = " + ".join(f"{name} {seconds(value)}" for name, value in stages.items())
    before = seconds(answer.stages.get("retrieve", 0.0))
    return f"first token after {seconds(answer.ttft_s)} = {parts}   (retrieval before that: {before})"


def _rows(answer: Answer) -> str:
    blend = answer.blend
    missed = sum(not hit for hit in blend.hits)
    stored = f"; {counted(missed, 'chunk')} computed now" if missed else ""
    return (
        f"rows recomputed {blend.rows_recomputed:,} of {blend.layout.rows:,}; "
        f"compute {blend.rows_share:.0%} of full prefill; {blend.bytes_loaded / 1e6:.0f} MB of stored KV{stored}"
    )


def _chunks(answer: Answer) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for ranked, hit in zip(answer.chunks, answer.blend.hits, strict=True):
        word = Text("hit" if hit else "miss", style="green" if hit else "yellow")
        table.add_row(word, f"{ranked.score:.2f}", Text(visible(ranked.chunk.title)))
    return table


def _comparison(answer: Answer, full: FullAnswer) -> list[RenderableType]:
    longer = full.ttft_s / answer.ttft_s
    told = f"full prefill: first token after {seconds(full.ttft_s)}, {longer:.1f} times as long; it answers"
    if full.text == answer.text:
        return [Text(f"{told} the same")]
    return [Text(f"{told}:"), Text(visible(full.text, keep=ANSWER_KEEPS), style="dim")]
