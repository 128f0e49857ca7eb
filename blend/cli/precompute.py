"""`blend precompute`: documents -> chunks -> index and chunk caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from blend.cli import options


@click.command("precompute")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--add", is_flag=True, help="Keep what the store's index holds and add these documents to it.")
@options.common
@options.corpus
def command(paths: tuple[Path, ...], add: bool, **given: Any) -> None:
    """Chunk, index and cache the documents under PATHS: folders or files of .md, .txt, .rst, .html, .pdf or .jsonl.

    The corpus becomes exactly these documents; chunks that did not change are not computed again. A run that was stopped
    goes on where it was when it is started again.
    """
    from blend.cli.console import note, output, stage_progress

    rag = options.open_rag(given)
    note(f"Loading {given['model']} ...")
    rag.decoder  # noqa: B018 - its own step, before the progress bars
    with stage_progress() as progress:
        done = rag.precompute(paths, add=add, progress=progress)
    for skipped in done.skipped:
        note(f"skipped {skipped.source}: {skipped.reason}")
    rate = f" at {done.tokens / done.seconds:.0f} tokens/s" if done.tokens and done.seconds else ""
    stats = rag.store.stats()
    output.print(
        f"{done.documents} documents, {done.chunks} chunks ({done.added} new, {done.removed} gone); "
        f"{done.computed} caches computed{rate}, {done.reused} already stored. "
        f"{given['store']}: {stats.entries} caches, {stats.nbytes / 1e6:.0f} MB."
    )
