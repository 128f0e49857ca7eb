"""Options that several commands share. Every default comes from the configuration classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from blend.config import DEFAULT_MODEL, BlendConfig, CorpusConfig, DeviationOf, MaskMode, Norm

if TYPE_CHECKING:
    from blend.pipeline import Rag

F = TypeVar("F", bound=Callable[..., Any])

_BLEND = BlendConfig()
_CORPUS = CorpusConfig()


def common(function: F) -> F:
    """--model, --store, --device, --dtype, --store-budget."""
    for option in reversed(
        (
            click.option(
                "--model",
                default=DEFAULT_MODEL,
                show_default=True,
                help="Catalog name, HuggingFace id or model directory.",
            ),
            click.option(
                "--store",
                type=click.Path(path_type=Path),
                default=Path(".kvblend"),
                show_default=True,
                help="Directory of chunk caches and index.",
            ),
            click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
            click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
            click.option(
                "--store-budget", type=float, help="Most GB of chunk caches; the least recently used ones go."
            ),
        )
    ):
        function = option(function)
    return function


def corpus(function: F) -> F:
    """--chunk-tokens, --embedder, --codec."""
    for option in reversed(
        (
            click.option(
                "--chunk-tokens",
                type=int,
                default=_CORPUS.chunk_tokens,
                show_default=True,
                help="Longest chunk, in tokens.",
            ),
            click.option(
                "--embedder",
                default=_CORPUS.embedder,
                show_default=True,
                help="minilm, a sentence-transformers id or a directory.",
            ),
            click.option(
                "--codec",
                default=_CORPUS.codec,
                show_default=True,
                help="How caches are stored: bfloat16, float16, float32 or native.",
            ),
        )
    ):
        function = option(function)
    return function


def blending(function: F) -> F:
    """--selector, --ratio, --mask, --check-layer, --deviation-of, --norm, --first-k, --seed."""
    for option in reversed(
        (
            click.option(
                "--selector",
                default=_BLEND.selector,
                show_default=True,
                help="Which rows to recompute: hkvd, first_k, random, all or none.",
            ),
            click.option(
                "--ratio",
                type=float,
                default=_BLEND.ratio,
                show_default=True,
                help="Share of context rows to recompute.",
            ),
            click.option(
                "--mask",
                type=click.Choice(get_args(MaskMode)),
                default=_BLEND.mask,
                show_default=True,
                help="exact, or bottom-right as published systems do.",
            ),
            click.option(
                "--check-layer", type=int, default=_BLEND.check_layer, show_default=True, help="Where hkvd compares KV."
            ),
            click.option(
                "--deviation-of",
                type=click.Choice(get_args(DeviationOf)),
                default=_BLEND.deviation_of,
                show_default=True,
                help="What hkvd compares.",
            ),
            click.option(
                "--norm",
                type=click.Choice(get_args(Norm)),
                default=_BLEND.norm,
                show_default=True,
                help="How hkvd measures distance.",
            ),
            click.option(
                "--first-k", type=int, help="Most rows a chunk that first_k takes; all of the budget if not given."
            ),
            click.option(
                "--seed", type=int, default=_BLEND.seed, show_default=True, help="Seed of the random selector."
            ),
        )
    ):
        function = option(function)
    return function


def open_rag(options: dict[str, Any]) -> Rag:
    """A `Rag` from parsed options; entries that it does not know are left alone."""
    from blend.cli.console import show_fetch
    from blend.pipeline import Rag

    budget = options.get("store_budget")
    return Rag(
        options["store"],
        model=options["model"],
        device=options["device"],
        dtype=options["dtype"],
        blend=_pick(BlendConfig, options),
        corpus=_pick(CorpusConfig, options),
        budget_bytes=int(budget * 1e9) if budget is not None else None,
        on_fetch=show_fetch,
    )


def _pick(kind: type[Any], options: dict[str, Any]) -> Any:
    return kind(**{f.name: options[f.name] for f in fields(kind) if options.get(f.name) is not None})
