"""`blend plan`: the cost of a corpus of caches, before any is computed."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from blend.cli import opening, options
from blend.cli.console import counted, note, output, print_json, print_wide, say, seconds
from blend.cli.options import PLACE, Parsed, number
from blend.config import BlendConfig, CorpusConfig
from blend.errors import ConfigError, StoreError
from blend.limits import shown
from blend.store import codec_names, read_words
from blend.weights import lasting_name

if TYPE_CHECKING:
    from blend.model.outline import ModelOutline
    from blend.plan import CorpusSize, CostPlan, Terms, Tier

_WIDEST = 1000
_TIER = "NAME=MB/S,USD"


def _tier(value: str) -> Tier:
    from blend.plan import Tier

    name, _, rest = value.partition("=")
    try:
        rate, usd = (float(part) for part in rest.split(","))
        if not (name.isprintable() and 0 < len(name) <= 32 and 0 < rate < 1e9 and 0 <= usd < 1e9):
            raise ValueError
    except ValueError:
        raise ConfigError(f"{shown(value)} is not {_TIER}, such as objects=500,0.023") from None
    return Tier(name, rate * 1e6, usd)


@click.command("plan")
@click.argument("paths", nargs=-1, type=PLACE)
@options.model_option
@number("chunks", "Chunks of the corpus, where there are no PATHS to count them in.")
@number("tokens", "Tokens of the corpus, where there are no PATHS.")
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
@number("top_k", "Chunks of a prompt.", CorpusConfig().top_k)
@number("ratio", "Share of context rows to recompute.", BlendConfig().ratio)
@click.option("--measure", is_flag=True, help="Measure full prefill on this machine, with the model's weights.")
@number(
    "prefill_rate",
    "Tokens a second of full prefill on one machine, if known from elsewhere.",
    metavar="TOKENS/S",
)
@number("hour_price", "USD an hour of one machine.  [default: 2, an assumption]", metavar="USD")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=Parsed("tier", _tier),
    metavar=_TIER,
    help="A place for caches: what one machine reads from it, and the price of a GB and month. "
    "[default: memory=2000,4 disk=2000,0.08 objects=500,0.023, assumptions]",
)
@options.store_option
@options.json_option
def command(paths: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Say what a corpus costs in time, bytes and money by codec and tier, and from which bandwidth loading beats computing.

    The corpus is counted in PATHS, or given by --chunks, --tokens or both. Of the model only the configuration is read. The
    rate of full prefill is measured here (--measure), given (--prefill-rate), or that of an earlier `blend precompute` into
    --store.
    """
    from blend import plan as costs
    from blend.model.decoder import pick_device
    from blend.model.outline import outline, read_config, read_tokenizer
    from blend.model.precision import dtype_name, pick_dtype
    from blend.prompt import PromptTemplate
    from blend.weights import resolve_model
    from blend_retrieval import load_documents

    config = opening.corpus_config(given)
    if paths and (given["chunks"] or given["tokens"]):
        raise ConfigError("the corpus is counted in PATHS: leave out --chunks and --tokens, or PATHS")
    if given["measure"] and given["prefill_rate"]:
        raise ConfigError("--measure and --prefill-rate say the same thing: leave one of them out")
    name = opening.model_of(given)
    location = str(resolve_model(name))
    config_of_model = read_config(location, name)
    model = outline(config_of_model, name)
    if paths:
        template = PromptTemplate(read_tokenizer(location, name))
        corpus = costs.counted(load_documents(paths), template, config, model.context)
    else:
        corpus = costs.stated(given["chunks"], given["tokens"], config)
    dtype = dtype_name(pick_dtype(given["dtype"], pick_device(given["device"]), config_of_model))
    rate, source = _rate(model, corpus, location, {**given, "dtype": dtype})
    note(f"Rate: {source}")
    terms = costs.Terms(
        dtype=dtype,
        codecs=tuple(dict.fromkeys(given["codecs"] or (one for one in codec_names() if one != "native"))),
        tiers=tuple({tier.name: tier for tier in (*costs.TIERS, *given["tiers"])}.values()),
        usd_hour=costs.USD_HOUR if given["hour_price"] is None else given["hour_price"],
        top_k=given["top_k"],
        ratio=given["ratio"],
        rate=rate,
    )
    found = costs.make_plan(corpus, model, terms)
    operators = model.operator_bytes(2 if dtype in ("bfloat16", "float16") else 4)
    if as_json:
        size = {"chunks": corpus.chunks, "tokens": corpus.tokens, "prompt_tokens": corpus.rows(terms.top_k)}
        copies = {"isolated": sum(corpus.isolated.values()), "contextual": sum(corpus.contextual.values())}
        rows = [row._asdict() for row in found.rows]
        print_json(
            {
                **size,
                **copies,
                "operator_bytes": operators,
                "model": name,
                "dtype": dtype,
                "rate": source,
                **found._asdict(),
                "rows": rows,
            }
        )
    else:
        _show(found, corpus, name, terms)
        if operators:
            _show_operators(found, corpus, operators)


def _rate(model: ModelOutline, corpus: CorpusSize, location: str, given: dict[str, Any]) -> tuple[float, str]:
    """Operations a second of full prefill, and its source: measured, given, or noted by an earlier precompute."""
    from blend import plan as costs
    from blend.corpus import RATE, RATE_TOKENS
    from blend.model.decoder import Decoder

    rows, store = corpus.rows(given["top_k"]), given["store"]
    if given["measure"]:
        decoder = Decoder.load(location, name=model.name, device=given["device"], dtype=given["dtype"])
        return costs.measured_rate(decoder, model, rows), "measured here"
    if tokens := given["prefill_rate"]:
        return tokens * model.operations(rows) / rows, f"full prefill at {tokens:,.0f} tokens/s, as given"
    with suppress(StoreError):
        for words in read_words(store / "kv").values() if (store / "kv").is_dir() else ():
            if (words.get("model"), words.get("dtype")) == (lasting_name(model.name), given["dtype"]) and RATE in words:
                try:
                    tokens = float(words[RATE])
                except ValueError:  # other writers of the store can write this
                    continue
                if not 0 < tokens < inf:
                    continue
                source = f"a precompute into {store} at {tokens:,.0f} tokens/s"
                return costs.rate_of_precompute(tokens, model, corpus), source
    raise ConfigError(
        "nothing says how fast this model is here: measure it with --measure, give --prefill-rate, "
        f"or name a --store into which it precomputed {RATE_TOKENS:,} tokens or more at once"
    )


def _show(plan: CostPlan, corpus: CorpusSize, model: str, terms: Terms) -> None:
    """Print sentences, the table, and the assumptions."""
    copies = "two caches a chunk" if corpus.contextual else "one cache a chunk"
    say(f"{counted(corpus.chunks, 'chunk')}, {counted(corpus.tokens, 'token')}; {model} in {terms.dtype}, {copies}.")
    usd = _money(plan.precompute_s / 3600 * terms.usd_hour)
    say(f"Precompute: {seconds(plan.precompute_s)} of machine time, {usd} once. Indexing comes on top.")
    say(
        f"A prompt of {counted(terms.top_k, 'chunk')}, {corpus.rows(terms.top_k):,} tokens: "
        f"first token after {seconds(plan.full_s)} of full prefill."
    )
    say()
    table = _table(plan)
    print_wide(output, table, output.measure(table, options=output.options.update(max_width=_WIDEST)).maximum)
    say()
    say("beats computing: from that bandwidth on, loading a prompt's chunks takes less time than computing them.")
    say("hidden: from that bandwidth on, loading takes no longer than recomputing.")
    say(
        "first token: at the tier's bandwidth, one reader alone, at least. pays from: prompts a month, see docs/plan.md."
    )
    say(f"Prices are assumptions unless you give yours: {_money(terms.usd_hour)} an hour; --tier, --hour-price.")


def _show_operators(plan: CostPlan, corpus: CorpusSize, nbytes: int) -> None:
    """Say what recurrent layers add, and from which length of chunks reuse pays."""
    say(f"Recurrent layers: {decimal(nbytes)} of operators a cache, in every codec, however short the chunk.")
    for tier in dict.fromkeys(row.tier for row in plan.rows):
        found = [row.least_chunk for row in plan.rows if row.tier == tier and row.least_chunk is not None]
        if not found:
            say(f"From {escape(tier)} reuse never pays: loading a chunk takes longer than computing it.")
            continue
        short = "; those of this corpus are shorter: give --chunk-tokens" if min(found) > corpus.chunk else ""
        say(f"From {escape(tier)} reuse pays for chunks of {counted(min(found), 'token')} or more{short}.")


def _table(plan: CostPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("codec", "a chunk", "in all", "beats computing", "hidden"):
        table.add_column(name, justify="left" if name == "codec" else "right", no_wrap=True)
    for name in ("tier", "a month", "load", "first token", "gain", "pays from"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    before = ""
    for row in plan.rows:
        sizes = [
            decimal(round(row.chunk_bytes)),
            decimal(row.total_bytes),
            *(f"{decimal(round(e))}/s" for e in (row.break_even, row.hidden)),
        ]
        codec = [row.codec, *sizes] if row.codec != before else [""] * 5
        tier = [f"{escape(row.tier)}, {row.bandwidth / 1e6:,.0f} MB/s", _money(row.usd_month), seconds(row.load_s)]
        pays = "never" if row.pays_from is None else f"{row.pays_from:,.0f}"
        table.add_row(*codec, *tier, seconds(row.first_token_s), f"{row.gain:.1f}x", pays)
        before = row.codec
    return table


def _money(value: float) -> str:
    """USD, cents only where they matter."""
    return f"{value:,.2f} USD" if value < 100 else f"{value:,.0f} USD"
