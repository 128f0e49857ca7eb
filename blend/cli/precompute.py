"""`blend precompute`: documents -> chunks -> index and chunk caches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.options import PLACE
from blend.cli.shares import By, by_many, shared_document, shared_words

if TYPE_CHECKING:
    from blend.corpus import Precomputed
    from blend.store import StoreStats

_RESUME = "interrupted; what was computed is stored, run the same command again to go on"


@click.command("precompute")
@click.argument("paths", nargs=-1, required=True, type=PLACE)
@click.option("--add", is_flag=True, help="Keep what the store's index holds and add these documents to it.")
@click.option(
    "--quick",
    is_flag=True,
    help="Only what a first answer needs, one cache a chunk; run again without it for the rest.",
)
@by_many
@options.json_option
@options.common
@options.chunking
def command(paths: tuple[Path, ...], add: bool, quick: bool, as_json: bool, **given: Any) -> None:
    """Chunk, index and cache the documents under PATHS: folders or files of .md, .txt, .rst, .html, .pdf or .jsonl.

    The corpus becomes exactly these documents; chunks that did not change are not computed again, and a document that is there
    but cannot be read stays as it was. A run that was stopped
    goes on where it was when it is started again.
    """
    from blend.cli.console import print_json, say, stage_progress
    from blend_retrieval import load_documents

    opening.check(given)
    by = By.of({**given, "quick": quick})
    documents = load_documents(paths)
    rag = opening.open_for_documents(given)
    try:
        _ = rag.store, rag.decoder
        with stage_progress(by.words) as progress:
            done, shared = by.precompute(rag, documents, add=add, quick=quick, progress=progress)
    except KeyboardInterrupt:
        raise click.Abort(_RESUME) from None
    _tell(done)
    if as_json:
        print_json({**precomputed_document(done, rag.store.stats()), **shared_document(shared)})
    else:
        say(_summary(done, given["store"], rag.store.stats()))
        if shared:
            say(shared_words(shared))


def precomputed_document(done: Precomputed, stats: StoreStats) -> dict[str, object]:
    """What `--json` prints: `Precomputed`, the rate, and what the store holds now."""
    document = asdict(done)
    skipped = [{"source": one.source, "reason": one.reason} for one in done.skipped]
    rate = done.tokens / done.seconds if done.computed else None
    store = {"entries": stats.entries, "bytes": stats.nbytes}
    return {**document, "skipped": skipped, "tokens_per_s": rate, "store": store}


def _tell(done: Precomputed) -> None:
    from blend.cli.console import counted, note

    for skipped in done.skipped:
        note(f"skipped {skipped.source}: {skipped.reason}")
    if done.unread:
        note(f"{counted(done.unread, 'document')} of the index that could not be read: kept as before")
    if done.rebuilt:
        note(f"the index was built anew: {done.rebuilt}")
    if done.evicted:
        note(
            f"the store's budget has no room for {counted(done.evicted, 'cache')} of this corpus; "
            "they are computed when a question needs them: raise --store-budget to keep all"
        )


def _summary(done: Precomputed, store: Path, stats: StoreStats) -> str:
    from blend.cli.console import counted

    rate = f" at {done.tokens / done.seconds:,.0f} tokens/s" if done.computed else ""
    return (
        f"{counted(done.documents, 'document')}, {counted(done.chunks, 'chunk')} "
        f"({done.added:,} new, {done.removed:,} gone); "
        f"{counted(done.computed, 'cache')} computed{rate}, {done.reused:,} already stored. "
        f"{store}: {stats.nbytes / 1e6:,.0f} MB."
    )
