"""`blend plan`: what a corpus of caches costs, before any is computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.options import PLACE, number
from blend.config import DEFAULT_MODEL, BlendConfig, CorpusConfig
from blend.errors import ConfigError
from blend.limits import shown
from blend.model.shapes import SHAPES
from blend.store import codec_names

if TYPE_CHECKING:
    from blend.plan import PromptSize, Rates, Subject, Terms, Tier

_TIER = "NAME=MB/S,USD"
_TIER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,31}")


def _tier(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[Tier, ...]:
    """Tiers as they are given, over those that there are."""
    from blend.plan import TIERS, Tier

    found = {tier.name: tier for tier in TIERS}
    for value in values:
        name, _, rest = value.partition("=")
        try:
            rate, usd = (float(part) for part in rest.split(","))
            if not (_TIER_NAME.fullmatch(name) and 0 < rate < 1e9 and 0 <= usd < 1e9):
                raise ValueError
        except ValueError:
            raise click.BadParameter(f"{shown(value)} is not {_TIER}, such as objects=500,0.023", ctx, option) from None
        found[name] = Tier(name, rate * 1e6, usd)
    return tuple(found.values())


@click.command("plan")
@click.argument("paths", nargs=-1, type=PLACE)
@options.model_option
@number("--chunks", "chunks", "Chunks of the corpus, where there are no PATHS to count them in.")
@number("--tokens", "tokens", "Tokens of the corpus, where there are no PATHS.")
@options.dividing
@click.option(
    "--shape",
    type=click.Choice(tuple(SHAPES)),
    help="Plan for a model of this size instead of --model.",
)
@options.device_option
@options.dtype_option
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    type=click.Choice(codec_names()),
    help="Plan for this codec; more than one may be given.  [default: all but native]",
)
@number("--top-k", "top_k", "Chunks of a prompt.", default=CorpusConfig().top_k, show_default=True)
@number("--ratio", "ratio", "Share of context rows to recompute.", default=BlendConfig().ratio, show_default=True)
@click.option(
    "--measure", is_flag=True, help="Measure rates on this machine, with the model's weights: a minute or so."
)
@number(
    "--prefill-rate",
    "prefill_rate",
    "Tokens a second of full prefill on one machine, if known from elsewhere.",
    metavar="TOKENS/S",
)
@number(
    "--load-rate",
    "load_rate",
    "MB a second of caches that one machine verifies and decodes.  [default: no limit]",
    metavar="MB/S",
)
@number("--machines", "machines", "Machines that precompute side by side.", default=1, show_default=True)
@number("--hour-price", "hour_price", "USD an hour of one machine.  [default: 2, an assumption]", metavar="USD")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    callback=_tier,
    metavar=_TIER,
    help="A place for caches: what one machine reads from it, and the price of a GB and month. "
    "[default: memory=2000,4 disk=2000,0.08 objects=500,0.023, assumptions]",
)
@options.store_option
@options.json_option
def command(paths: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Say what a corpus costs in time, bytes and money by codec and tier, and from which bandwidth loading beats computing.

    The corpus is counted in PATHS, or given by --chunks, --tokens or both. Of the model only the configuration is read. Rates
    are measured here (--measure), given (--prefill-rate), or those of an earlier `blend precompute` into --store.
    """
    from blend.cli.console import note, print_json
    from blend.cli.plan import plan_document, show
    from blend.plan import Subject, make_plan
    from blend_retrieval import load_documents

    config = opening.corpus_config(given)
    _check(paths, given)
    dtype = _dtype(given)
    subject = Subject(DEFAULT_MODEL if given["shape"] else opening.model_of(given), given["shape"], config, dtype)
    given_corpus = (given["chunks"], given["tokens"])
    corpus = subject.counted(load_documents(paths)) if paths else subject.given(*given_corpus)
    terms = _terms(given, dtype)
    prompt = subject.prompt(corpus, given["top_k"])
    rates = _rates(subject, prompt, terms, given)
    note(f"Rates: {rates.source}")
    plan = make_plan(corpus, subject.model, prompt, rates, terms)
    if as_json:
        print_json(plan_document(plan))
    else:
        show(plan)


def _check(paths: tuple[Path, ...], given: dict[str, Any]) -> None:
    """Raise `ConfigError` for two answers to one question."""
    if paths and (given["chunks"] or given["tokens"]):
        raise ConfigError("the corpus is counted in PATHS: leave out --chunks and --tokens, or PATHS")
    if given["measure"] and given["prefill_rate"]:
        raise ConfigError("--measure and --prefill-rate say the same thing: leave one of them out")


def _dtype(given: dict[str, Any]) -> str:
    from blend.model.decoder import pick_device, pick_dtype

    # A shape stands for a model on a fleet's accelerators, not on this machine.
    if given["dtype"] == "auto" and given["shape"]:
        return "bfloat16"
    return str(pick_dtype(given["dtype"], pick_device(given["device"]))).removeprefix("torch.")


def _terms(given: dict[str, Any], dtype: str) -> Terms:
    from blend.plan import USD_HOUR, Terms

    codecs = given["codecs"] or tuple(name for name in codec_names() if name != "native")
    usd_hour = USD_HOUR if given["hour_price"] is None else given["hour_price"]
    return Terms(dtype, tuple(dict.fromkeys(codecs)), given["tiers"], given["machines"], usd_hour, given["ratio"])


def _rates(subject: Subject, prompt: PromptSize, terms: Terms, given: dict[str, Any]) -> Rates:
    load = given["load_rate"] and given["load_rate"] * 1e6
    if given["measure"]:
        return subject.measured(prompt, terms.codecs, given["device"])
    if given["prefill_rate"]:
        return subject.of_prefill(given["prefill_rate"], prompt, terms.codecs, load)
    return subject.of_store(given["store"], prompt, terms.codecs, load)
