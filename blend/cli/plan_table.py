"""How a plan is shown: a table for people, one JSON object for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from blend.cli.console import counted, output, print_wide, say

if TYPE_CHECKING:
    from blend.plan import CodecCost, Plan, TierCost

_STEPS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_WIDEST = 1000


def plan_document(plan: Plan) -> dict[str, object]:
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
        "rates": asdict(plan.rates),
        "prompt": {"tokens": plan.prompt.rows, "chunks": plan.prompt.chunks, "full_prefill_s": plan.full_s},
        "compute_s": plan.compute_s,
        "codecs": [asdict(codec) for codec in plan.codecs],
    }


def show(plan: Plan) -> None:
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
    say("hidden: from that bandwidth on, loading takes no longer than what is recomputed anyway.")
    say(
        "first token: at the tier's bandwidth, one reader alone, at least. pays from: prompts a month, see docs/plan.md."
    )
    if any(rates.load is None for rates in plan.rates.codecs.values()):
        say("Decoding is taken to be no limit: give --load-rate, or --measure.")
    say(f"Prices are assumptions unless you give yours: {money(terms.usd_hour)} an hour; --tier, --hour-price.")


def _table(plan: Plan) -> Table:
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
