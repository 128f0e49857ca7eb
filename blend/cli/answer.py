"""`blend answer`: retrieve, blend, decode, and show where the time went."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from blend.cli import options
from blend.config import CorpusConfig

if TYPE_CHECKING:
    from rich.panel import Panel

    from blend.pipeline import Answer


@click.command("answer")
@click.argument("question")
@click.option("--top-k", type=int, default=CorpusConfig().top_k, show_default=True, help="Chunks to retrieve.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Longest answer.")
@click.option("--compare", is_flag=True, help="Also answer after full prefill of the same token ids.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@options.common
@options.corpus
@options.blending
def command(question: str, top_k: int, max_new_tokens: int, compare: bool, as_json: bool, **given: Any) -> None:
    """Answer QUESTION over the precomputed documents."""
    from blend.cli.console import note, output

    rag = options.open_rag({**given, "top_k": top_k})
    note(f"Loading {given['model']} ...")
    rag.warm_up()
    stream = None if as_json else lambda piece: click.echo(piece, nl=False)
    answer = rag.answer(question, max_new_tokens=max_new_tokens, compare=compare, on_text=stream)
    for problem in answer.problems:
        note(f"recomputed and replaced: {problem}")
    if not any(answer.blend.hits):
        _explain_misses(rag.store.namespaces(), rag.blender.encoder(rag.template.prefix).identity.namespace)
    if as_json:
        click.echo(
            json.dumps(answer_document(answer, given["model"], rag.blend_config.selector, rag.blend_config.ratio))
        )
        return
    click.echo()
    output.print(_panel(answer))


def answer_document(answer: Answer, model: str, selector: str, ratio: float) -> dict[str, object]:
    """What `--json` prints."""
    blend, full = answer.blend, answer.full
    document: dict[str, object] = {
        "question": answer.question,
        "answer": answer.text,
        "model": model,
        "selector": selector,
        "ratio": ratio,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.generation.tpot_s,
        "tokens": len(answer.generation.token_ids),
        "stages": answer.stages,
        "rows_total": blend.layout.rows,
        "rows_recomputed": blend.rows_recomputed,
        "rows_share": blend.rows_share,
        "bytes_loaded": blend.bytes_loaded,
        "chunks": [
            {"id": ranked.chunk.id, "title": ranked.chunk.title, "score": ranked.score, "hit": hit}
            for ranked, hit in zip(answer.chunks, blend.hits, strict=True)
        ],
        "problems": list(answer.problems),
    }
    if full is not None:
        document["full"] = {"answer": full.text, "ttft_s": full.ttft_s, "speedup": full.ttft_s / answer.ttft_s}
    return document


def _panel(answer: Answer) -> Panel:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from blend.cli.console import seconds

    blend = answer.blend
    stages = {name: value for name, value in answer.stages.items() if name != "retrieve"}
    lines = [
        Text(
            f"first token after {seconds(answer.ttft_s)} = "
            + " + ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in stages.items())
            + f"   (retrieval before that: {seconds(answer.stages.get('retrieve', 0.0))})"
        ),
        Text(
            f"rows recomputed {blend.rows_recomputed:,} of {blend.layout.rows:,}; "
            f"compute {blend.rows_share:.0%} of full prefill; {blend.bytes_loaded / 1e6:.0f} MB of stored KV"
        ),
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for ranked, hit in zip(answer.chunks, blend.hits, strict=True):
        table.add_row(
            Text("hit" if hit else "miss", style="green" if hit else "yellow"),
            f"{ranked.score:.2f}",
            ranked.chunk.title,
        )
    rows: list[Any] = [*lines, table]
    if answer.full is not None:
        ratio = answer.full.ttft_s / answer.ttft_s
        rows.append(
            Text(
                f"full prefill: first token after {seconds(answer.full.ttft_s)}, {ratio:.1f} times as long; it answers:"
            )
        )
        rows.append(Text(answer.full.text, style="dim"))
    return Panel(Group(*rows), title="blended prefill", title_align="left", expand=False)


def _explain_misses(namespaces: dict[str, dict[str, str]], mine: str) -> None:
    """Why nothing was in the store: it was made with another model, dtype or prompt."""
    from blend.cli.console import note

    others = sorted({f"{d.get('model', '?')} in {d.get('dtype', '?')}" for n, d in namespaces.items() if n != mine})
    if others:
        note(
            f"no chunk was cached for this model, dtype and prompt: the store was made with {', '.join(others)}; "
            "the chunks of this answer were computed and stored now, `blend precompute` does it for all"
        )
