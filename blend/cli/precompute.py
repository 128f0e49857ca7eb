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
from blend.cli.console import note, print_json, say
from blend.cli.options import PLACE, TEXT, Parsed, number
from blend.cli.progress import reading, stage_progress
from blend.cli.questions import AUTO, made_questions, read_questions
from blend.config import WHOLE, Share
from blend.errors import ConfigError
from blend.store.addresses import store_name
from blend.text import counted
from blend_retrieval.document import summarized
from blend_retrieval.readers import TEXT_FIELD

if TYPE_CHECKING:
    from blend.corpus import Compute, Precomputed
    from blend.rag import Rag
    from blend.store import StoreStats
    from blend_retrieval.document import LoadedDocuments

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
    help="Fit estimates of quality, for --quality, to these questions, one a line, at least 16; auto makes them from "
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
    "ray_workers", "Workers on the Ray cluster.  [default: one for every GPU, or for every machine if there are none]"
)
@options.json_option
@options.common
@options.chunking
def command(paths: tuple[Path, ...], add: bool, quick: bool, text_field: str, as_json: bool, **values: Any) -> None:
    """Chunk, index and cache the documents under PATHS: folders or files.

    Kinds: .md, .txt, .rst, .html, .pdf, .docx, .odt, .rtf, .pptx, .odp, .xlsx, .ods, .csv, .tsv, .parquet, .ipynb, .org, .adoc,
    .tex, .epub, .eml, .ics, .vtt, .srt, .jsonl, .log, source code, and text in files without a suffix.

    The corpus becomes exactly these documents. Chunks that did not change are not computed again. A document that exists but
    cannot be read stays as it was. Run a stopped command again to go on.
    """
    opening.check(values)
    _check(values, quick=quick)
    share: Share | None = values["share"]
    questions = _questions(values["questions"])
    documents = _load(paths, text_field)
    rag = opening.open_rag(values, needs_index=False)
    if values["engine"] == "vllm":
        from blend.integrations.vllm.offline import load_decoder
        from blend.weights import resolve_model

        model = str(resolve_model(rag.model))
        rag.decoder = load_decoder(model, str(rag.root), values["dtype"], values["engine_options"])
    else:
        opening.note_caveats(rag)
    try:
        on_ray = ", on Ray" if values["ray"] is not None else ""
        progress = stage_progress(f", shard {share}" if share else on_ray)
        with _computing(rag, values) as compute:
            result = rag.precompute(
                documents, add=add, quick=quick, share=share or WHOLE, compute=compute, progress=progress
            )
        _note(result)
        stats = rag.store.stats()
        if as_json:
            print_json(precomputed_document(result, stats, share))
        else:
            say(_summary(result, values["store"], stats))
            if share:
                say(_shares_in_words(share, result.shares_left))
        if questions is not None:
            note(_fitted(rag, questions))
    except KeyboardInterrupt:
        raise click.Abort(_RESUME) from None


def _load(paths: tuple[Path, ...], text_field: str) -> LoadedDocuments:
    """Read the documents in a process with limits: a file that ends it or fills its memory is skipped."""
    from blend_retrieval import load_documents
    from blend_retrieval.reader_process import ReaderProcess

    with reading() as progress, ReaderProcess(progress=progress) as reader:
        return load_documents(paths, text_field=text_field, read=reader.read)


def _check(values: dict[str, Any], *, quick: bool) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    chosen = {name for name in ("share", "ray", "questions") if values[name] is not None}
    if {"share", "ray"} <= chosen:
        raise ConfigError("--shard and --ray are two ways of sharing the work: leave one of them out")
    if quick and chosen:
        raise ConfigError("--quick goes with none of --shard, --ray and --questions: leave one of them out")
    if {"share", "questions"} <= chosen:
        raise ConfigError("--questions needs all caches and the KV correction: leave out --shard")
    if values["ray_workers"] and "ray" not in chosen:
        raise ConfigError("--ray-workers says how many workers --ray has: give both")
    if values["engine"] == "vllm" and chosen & {"ray", "questions"}:
        raise ConfigError("--ray and --questions do not go with --engine vllm: leave them out")


def _questions(source: str | None) -> list[str] | None:
    """The user's questions to fit estimates to; none of them for auto; None without estimates."""
    if source in (None, AUTO):
        return [] if source else None
    from blend.intervals import LEAST_SAMPLE

    questions = read_questions(Path(source))
    if len(questions) < LEAST_SAMPLE:
        raise ConfigError(
            f"{source} has {counted(len(questions), 'question')}, estimates take {LEAST_SAMPLE}: add some, or give "
            "--questions auto"
        )
    return questions


def _fitted(rag: Rag, questions: list[str]) -> str:
    """Fit the estimates; what they allow, in words."""
    from blend.eval.estimates import fit_estimator
    from blend.quality import Quality

    estimator = fit_estimator(rag, questions or made_questions(rag), stage_progress())
    limit = estimator.limit(Quality(_EXAMPLE))
    fitted = f"estimates of quality fitted to {counted(estimator.prompts, 'question')}"
    if not limit:
        least = ceil(estimator.least_kl * 1000) / 1000
        return f"{fitted}: too few for --quality {_EXAMPLE:g}, which would recompute all rows; they can show {least:g}"
    return f"{fitted}: --quality {_EXAMPLE:g} takes {estimator.policy(limit).rows.mean():.0%} of their rows"


@contextmanager
def _computing(rag: Rag, values: dict[str, Any]) -> Iterator[Compute]:
    """The function that computes the caches: on the workers of a Ray cluster with --ray, else in this process."""
    from blend.corpus import compute_here
    from blend.shards import ray_cluster

    if values["ray"] is None:
        yield compute_here
    else:
        with ray_cluster(values["ray"], values["ray_workers"], on_gpu=values["device"] != "cpu") as cluster:
            yield partial(cluster.precompute, rag)


def precomputed_document(result: Precomputed, stats: StoreStats, share: Share | None) -> dict[str, object]:
    """What `--json` prints: `Precomputed`, the rate, and what the store holds now."""
    document = asdict(result)
    shares_left = document.pop("shares_left")
    document["skipped"] = [{"source": skip.source, "reason": skip.reason, "lost": skip.lost} for skip in result.skipped]
    document["tokens_per_s"] = result.tokens / result.seconds if result.computed else None
    document["store"] = {"entries": stats.entries, "bytes": stats.nbytes}
    if share:
        document |= {"shard": str(share), "shards_to_come": list(shares_left), "finished": not shares_left}
    return document


def _note(result: Precomputed) -> None:
    for skipped in summarized(result.skipped):
        note(f"skipped {skipped}" if skipped.lost else str(skipped))
    if result.unread:
        note(f"{counted(result.unread, 'document')} of the index that could not be read: kept as before")
    if result.rebuilt:
        note(f"the index was built anew: {result.rebuilt}")
    if result.evicted:
        note(
            f"the store's budget has no room for {counted(result.evicted, 'cache')} of this corpus; "
            "they are computed when a question needs them: raise --store-budget, or maxmemory of a Redis, to keep all"
        )


def _summary(result: Precomputed, store: Path, stats: StoreStats) -> str:
    rate = f" at {result.tokens / result.seconds:,.0f} tokens/s" if result.computed else ""
    return (
        f"{counted(result.documents, 'document')}, {counted(result.chunks, 'chunk')} "
        f"({result.added:,} new, {result.removed:,} gone); "
        f"{counted(result.computed, 'cache')} computed{rate}, {result.reused:,} already stored. "
        f"{store_name(store)}: {stats.nbytes / 1e6:,.0f} MB."
    )


def _shares_in_words(share: Share, left: tuple[int, ...]) -> str:
    if not left:
        return "All shards are done: the corpus is complete."
    missing = ", ".join(str(share._replace(number=number)) for number in left)
    return f"Caches are still missing of shard {missing}; the last one to finish fits the KV correction."
