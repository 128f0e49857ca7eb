"""`blend plan`: what a corpus of caches costs, before any is computed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from blend.cli import opening, options
from blend.cli.console import counted, note, output, print_json, print_wide, say
from blend.cli.options import PLACE, number
from blend.config import BlendConfig, CorpusConfig
from blend.errors import ConfigError, StoreError
from blend.limits import shown
from blend.store import codec_names, read_words
from blend.weights import lasting_name

if TYPE_CHECKING:
    from blend.model.outline import ModelOutline
    from blend.plan import CodecCost, CostPlan, PromptSize, Rates, Terms, Tier, TierCost

_STEPS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_WIDEST = 1000
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
    from blend.model.decoder import pick_device, pick_dtype
    from blend.model.outline import outline, read_config, read_tokenizer
    from blend.plan import USD_HOUR, PromptSize, Terms, counted, make_plan
    from blend.plan import given as stated
    from blend.prompt import PromptTemplate
    from blend.weights import resolve_model
    from blend_retrieval import load_documents

    config = opening.corpus_config(given)
    _check(paths, given)
    name = opening.model_of(given)
    location = str(resolve_model(name))
    model = outline(read_config(location, name), name)
    if paths:
        template = PromptTemplate(read_tokenizer(location, name))
        corpus = counted(load_documents(paths), template, config, model.context)
    else:
        corpus = stated(given["chunks"], given["tokens"], config)
    terms = Terms(
        dtype=str(pick_dtype(given["dtype"], pick_device(given["device"]))).removeprefix("torch."),
        codecs=tuple(dict.fromkeys(given["codecs"] or (one for one in codec_names() if one != "native"))),
        tiers=given["tiers"],
        machines=given["machines"],
        usd_hour=USD_HOUR if given["hour_price"] is None else given["hour_price"],
        ratio=given["ratio"],
    )
    mean = max(1, round(corpus.tokens / corpus.chunks))
    prompt = PromptSize(corpus.prefix, corpus.surrogate, mean, given["top_k"])
    rates = _rates(model, prompt, terms, given, (location, config.batch_tokens))
    note(f"Rates: {rates.source}")
    plan = make_plan(corpus, model, prompt, rates, terms)
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


def _rates(
    model: ModelOutline, prompt: PromptSize, terms: Terms, given: dict[str, Any], weights: tuple[str, int]
) -> Rates:
    """Rates as measured, as given, or as an earlier precompute noted them. weights: their location, and batch tokens."""
    from blend.model.decoder import Decoder
    from blend.plan import measure, operations_of_precompute, rates_of_prefill

    load = given["load_rate"] and given["load_rate"] * 1e6
    if given["measure"]:
        location, batch_tokens = weights
        decoder = Decoder.load(location, name=model.name, device=given["device"], dtype=terms.dtype)
        return measure(decoder, model, prompt, terms.codecs, batch_tokens)
    if given["prefill_rate"]:
        operations = given["prefill_rate"] * model.operations(prompt.rows) / prompt.rows
        source = f"full prefill at {given['prefill_rate']:,.0f} tokens/s, as given"
        return rates_of_prefill(operations, terms.codecs, load, source)
    rate = _noted_rate(given["store"], model.name, terms.dtype)
    source = f"a precompute into {given['store']} at {rate:,.0f} tokens/s"
    return rates_of_prefill(operations_of_precompute(rate, model, prompt), terms.codecs, load, source)


def _noted_rate(store: Path, model: str, dtype: str) -> float:
    """Tokens a second of the last long precompute into a store. Raises `ConfigError` if there was none."""
    from blend.corpus import RATE, RATE_TOKENS

    with suppress(StoreError):
        described = read_words(store / "kv").values() if (store / "kv").is_dir() else ()
        mine = [one for one in described if (one.get("model"), one.get("dtype")) == (lasting_name(model), dtype)]
        for words in mine:
            if words.get(RATE, "").replace(".", "", 1).isdigit():
                return float(words[RATE])
    raise ConfigError(
        "nothing says how fast this model is here: measure it with --measure, give --prefill-rate, "
        f"or name a --store into which it precomputed {RATE_TOKENS:,} tokens or more at once"
    )


def plan_document(plan: CostPlan) -> dict[str, object]:
    """What `--json` prints: bytes, seconds, USD, bytes a second."""
    corpus, model = plan.corpus, plan.model
    return {
        "corpus": {
            "chunks": corpus.chunks,
            "tokens": corpus.tokens,
            "isolated": sum(corpus.isolated.values()),
            "contextual": sum(corpus.contextual.values()),
            "prefix_tokens": corpus.prefix,
            "surrogate_tokens": corpus.surrogate,
        },
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "layers": len(model.keys),
            "kv_numbers_per_token": model.kv_numbers,
        },
        "dtype": plan.terms.dtype,
        "machines": plan.terms.machines,
        "usd_hour": plan.terms.usd_hour,
        "rates": {**plan.rates._asdict(), "codecs": {name: one._asdict() for name, one in plan.rates.codecs.items()}},
        "prompt": {"tokens": plan.prompt.rows, "chunks": plan.prompt.chunks, "full_prefill_s": plan.full_s},
        "compute_s": plan.compute_s,
        "codecs": [{**one._asdict(), "tiers": [tier._asdict() for tier in one.tiers]} for one in plan.codecs],
    }


def show(plan: CostPlan) -> None:
    """Sentences, a table a codec and tier, and what all of it rests on."""
    corpus, prompt, terms = plan.corpus, plan.prompt, plan.terms
    copies = "one cache a chunk" if not corpus.contextual or not corpus.isolated else "two caches a chunk"
    say(
        f"{counted(corpus.chunks, 'chunk')}, {counted(corpus.tokens, 'token')}; {plan.model.name} in {terms.dtype}, {copies}."
    )
    first = plan.codecs[0]
    say(
        f"Precompute: {duration(first.precompute_s)} of machine time, {duration(first.precompute_hours * 3600)} on "
        f"{counted(terms.machines, 'machine')}, {money(first.precompute_usd)} once. Indexing comes on top."
    )
    say(
        f"A prompt of {counted(prompt.chunks, 'chunk')}, {prompt.rows:,} tokens: "
        f"first token after {duration(plan.full_s)} of full prefill."
    )
    say()
    table = _table(plan)
    whole = output.measure(table, options=output.options.update(max_width=_WIDEST)).maximum
    print_wide(output, table, whole)
    say()
    say("beats computing: from that bandwidth on, loading a prompt's chunks takes less time than computing them.")
    say("hidden: from that bandwidth on, loading takes no longer than recomputing.")
    say(
        "first token: at the tier's bandwidth, one reader alone, at least. pays from: prompts a month, see docs/plan.md."
    )
    if any(rates.load is None for rates in plan.rates.codecs.values()):
        say("Decoding is taken to be no limit: give --load-rate, or --measure.")
    say(f"Prices are assumptions unless you give yours: {money(terms.usd_hour)} an hour; --tier, --hour-price.")


def _table(plan: CostPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("codec", "a chunk", "in all", "beats computing", "hidden"):
        table.add_column(name, justify="left" if name == "codec" else "right", no_wrap=True)
    for name in ("tier", "a month", "load", "first token", "gain", "pays from"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for codec in plan.codecs:
        for place, tier in enumerate(codec.tiers):
            table.add_row(*(_codec_cells(codec) if not place else [""] * 5), *_tier_cells(tier))
    return table


def _codec_cells(codec: CodecCost) -> list[str]:
    edges = [f"{size(edge)}/s" if edge else "never" for edge in (codec.break_even, codec.hidden)]
    return [codec.codec, size(codec.chunk_bytes), size(codec.total_bytes), *edges]


def _tier_cells(tier: TierCost) -> list[str]:
    pays = "never" if tier.pays_from is None else f"{tier.pays_from:,.0f}"
    times = [duration(tier.load_s), duration(tier.blended_s), f"{tier.gain:.1f}x"]
    return [f"{tier.tier}, {tier.bandwidth / 1e6:,.0f} MB/s", money(tier.usd_month), *times, pays]


def size(value: float) -> str:
    """Bytes with three digits: 5.93 MB, 12.0 TB."""
    step = 0
    while value >= 999.5 and step < len(_STEPS) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.{0 if value >= 99.95 or not step else 1 if value >= 9.995 else 2}f} {_STEPS[step]}"


def duration(value: float) -> str:
    """Seconds in the unit that people would say: 12 ms, 3.4 s, 25 min, 7.1 h, 40 days."""
    for limit, unit, words in ((1.0, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / unit:.{1 if value / unit < 10 else 0}f} {words}"
    return f"{value / 86_400:,.0f} days"


def money(value: float) -> str:
    """USD, cents only where they matter."""
    return f"{value:,.2f} USD" if value < 100 else f"{value:,.0f} USD"
