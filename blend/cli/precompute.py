"""`blend precompute`: documents -> chunks -> index and chunk caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.audit import read_questions
from blend.cli.console import counted, note, print_json, say, stage_progress
from blend.cli.options import PLACE, TEXT, Parsed, number
from blend.errors import ConfigError
from blend.types import WHOLE, Share
from blend_retrieval.document import summarized
from blend_retrieval.readers import TEXT_FIELD

if TYPE_CHECKING:
    from blend.corpus import Compute, Precomputed
    from blend.rag import Rag
    from blend.store import StoreStats

_EXAMPLE = 0.05  # the quality that the documentation asks for
_RESUME = "interrupted; what was computed is stored, run the same command again to go on"


@click.command("precompute")
@click.argument("paths", nargs=-1, required=True, type=PLACE)
@click.option("--add", is_flag=True, help="Add these documents to those in the store's index.")
@click.option(
    "--quick", is_flag=True, help="Compute one cache a chunk, enough for a first answer; run again for the rest."
)
@click.option(
    "--shard",
    "share",
    type=Parsed("i/n", Share.parse),
    default=None,
    help="Compute one share of the caches, such as 2/4. Other processes compute the others into the same store, with the same "
    "documents and options, in any order.",
)
@click.option(
    "--ray",
    type=TEXT,
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[ADDRESS]",
    help="Compute the caches on the Ray cluster at ADDRESS (put =ADDRESS or --ray last), or on one that is started here.",
)
@click.option(
    "--questions",
    type=Parsed("path", str),
    default=None,
    metavar="FILE",
    help="Calibrate estimates of quality, for --quality, on these questions, one a line, at least 16; auto makes them from "
    "the chunks.",
)
@click.option(
    "--text-field",
    type=TEXT,
    default=TEXT_FIELD,
    show_default=True,
    metavar="NAME",
    help="Field of JSONL records that holds their text.",
)
@number(
    "ray_workers",
    "Workers on the Ray cluster.  [default: one for every GPU, or for every machine if there are none]",
)
@options.json_option
@options.common
@options.chunking
def command(paths: tuple[Path, ...], add: bool, quick: bool, text_field: str, as_json: bool, **given: Any) -> None:
    """Chunk, index and cache the documents under PATHS: folders or files.

    Kinds: .md, .txt, .rst, .html, .pdf, .docx, .pptx, .xlsx, .csv, .tsv, .epub, .eml, .jsonl, .log and source code.

    The corpus becomes exactly these documents. Chunks that did not change are not computed again. A document that exists but
    cannot be read stays as it was. Run a stopped command again to go on.
    """
    from blend_retrieval import load_documents

    opening.check(given)
    share, ray = given["share"], given["ray"]
    _check(share, ray, given["ray_workers"], quick=quick)
    asked = _questions(given["questions"], share, quick=quick)
    documents = load_documents(paths, text_field=text_field)
    rag = opening.open_rag(given, needs_index=False)
    part = f", shard {share}" if share else "" if ray is None else ", on Ray"
    try:
        opening.note_other_dtypes(rag)
        with stage_progress(part) as progress, _computing(rag, given) as compute:
            kind = share or WHOLE
            done = rag.precompute(documents, add=add, quick=quick, share=kind, compute=compute, progress=progress)
        _note(done)
        stats = rag.store.stats()
        if as_json:
            print_json(precomputed_document(done, stats, share))
        else:
            say(_summary(done, given["store"], stats))
            if share:
                say(_shares_in_words(share, done.shares_left))
        if asked is not None:
            note(_calibrated(rag, asked))
    except KeyboardInterrupt:
        raise click.Abort(_RESUME) from None


def _questions(given: str | None, share: Share | None, *, quick: bool) -> list[str] | None:
    """The user's questions to calibrate on; none of them for auto; None without a calibration."""
    if given is None:
        return None
    if quick or share is not None:
        raise ConfigError("--questions needs all caches and the KV correction: leave out --quick and --shard")
    if given == "auto":
        return []
    from blend.intervals import LEAST_SAMPLE

    questions = read_questions(Path(given))
    if len(questions) < LEAST_SAMPLE:
        raise ConfigError(
            f"{given} has {counted(len(questions), 'question')}, a calibration takes {LEAST_SAMPLE}: add some, or give "
            "--questions auto"
        )
    return questions


def _calibrated(rag: Rag, questions: list[str]) -> str:
    """Calibrate; what that allows, in words."""
    from blend.eval.quality import MADE, calibrate_quality
    from blend.quality import Quality, questions_of

    questions = questions or questions_of([chunk.text for chunk in rag.index.chunks], MADE)
    with stage_progress() as progress:
        made = calibrate_quality(rag, questions, progress)
    limit = made.limit(Quality(_EXAMPLE))
    calibrated = f"estimates of quality calibrated on {counted(made.prompts, 'question')}"
    if not limit:
        least = ceil(made.least_kl * 1000) / 1000
        return (
            f"{calibrated}: too few for --quality {_EXAMPLE:g}, which would recompute all rows; they can show {least:g}"
        )
    return f"{calibrated}: --quality {_EXAMPLE:g} takes {made.policy(limit).rows.mean():.0%} of their rows"


def _check(share: Share | None, ray: str | None, workers: int | None, *, quick: bool) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    ways = [name for name, value in (("--shard", share), ("--ray", ray)) if value is not None]
    if quick and ways:
        raise ConfigError(f"--quick is for one process, {ways[0]} for many: leave one of them out")
    if len(ways) > 1:
        raise ConfigError("--shard and --ray are two ways of sharing the work: leave one of them out")
    if workers and ray is None:
        raise ConfigError("--ray-workers says how many workers --ray has: give both")


@contextmanager
def _computing(rag: Rag, given: dict[str, Any]) -> Iterator[Compute]:
    """The function that computes the caches: on the workers of a Ray cluster with --ray, else in this process."""
    from blend.corpus import compute_here
    from blend.shards import ray_cluster

    if given["ray"] is None:
        yield compute_here
    else:
        with ray_cluster(given["ray"], given["ray_workers"], on_gpu=given["device"] != "cpu") as cluster:
            yield partial(cluster.precompute, rag)


def precomputed_document(done: Precomputed, stats: StoreStats, share: Share | None = None) -> dict[str, object]:
    """What `--json` prints: `Precomputed`, the rate, and what the store holds now."""
    document = asdict(done)
    left = document.pop("shares_left")
    skipped = [{"source": one.source, "reason": one.reason, "lost": one.lost} for one in done.skipped]
    rate = done.tokens / done.seconds if done.computed else None
    store = {"entries": stats.entries, "bytes": stats.nbytes}
    shares = {"shard": str(share), "shards_to_come": list(left), "finished": not left} if share else {}
    return {**document, "skipped": skipped, "tokens_per_s": rate, "store": store, **shares}


def _note(done: Precomputed) -> None:
    for skipped in summarized(done.skipped):
        note(f"skipped {skipped}" if skipped.lost else str(skipped))
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
    rate = f" at {done.tokens / done.seconds:,.0f} tokens/s" if done.computed else ""
    return (
        f"{counted(done.documents, 'document')}, {counted(done.chunks, 'chunk')} "
        f"({done.added:,} new, {done.removed:,} gone); "
        f"{counted(done.computed, 'cache')} computed{rate}, {done.reused:,} already stored. "
        f"{store}: {stats.nbytes / 1e6:,.0f} MB."
    )


def _shares_in_words(share: Share, left: tuple[int, ...]) -> str:
    if not left:
        return "All shards are done: the corpus is complete."
    missing = ", ".join(str(share._replace(number=number)) for number in left)
    return f"Caches are still missing of shard {missing}; the last one to finish fits the KV correction."
