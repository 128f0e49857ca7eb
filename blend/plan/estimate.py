"""Time, bytes and money of a corpus, from its size, a model's outline, the rates of a machine, and prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blend.plan import CorpusSize, corpus_bytes

if TYPE_CHECKING:
    from blend.model.outline import ModelOutline
    from blend.plan import PromptSize, Rates

GB = 1e9


class Tier(NamedTuple):
    """Where caches may lie: bytes a second that one reader gets, USD a month for a GB."""

    name: str
    bandwidth: float
    usd_gb_month: float


# Assumptions to be replaced by one's own: list prices of large clouds in 2025, rounded, and what one machine reads from each.
TIERS = (Tier("memory", 2e9, 4.0), Tier("disk", 2e9, 0.08), Tier("objects", 5e8, 0.023))
USD_HOUR = 2.0  # of one machine that computes


@dataclass(frozen=True)
class Terms:
    """What is planned for. machines: that precompute. ratio: share of a prompt's stored rows that answering recomputes."""

    dtype: str
    codecs: Sequence[str]
    tiers: Sequence[Tier]
    machines: int
    usd_hour: float
    ratio: float


@dataclass(frozen=True)
class TierCost:
    """One codec in one tier.

    load_s: until the chunks of a prompt are in place, one reader alone. blended_s: until its first token, at least: loading and
    recomputing go on side by side. gain: seconds of full prefill over that. pays_from: prompts a month from which what they
    save in machine time pays for keeping the caches; None where nothing is saved.
    """

    tier: str
    bandwidth: float
    usd_month: float
    load_s: float
    blended_s: float
    gain: float
    pays_from: float | None


@dataclass(frozen=True)
class CodecCost:
    """One codec.

    chunk_bytes: of a chunk's caches together, on average. precompute_s: of all machines together; precompute_hours: until they
    are done, side by side. prompt_bytes: that a prompt's chunks take to load. break_even: bytes a second from which loading
    them is quicker than computing them, None where this machine decodes too slowly for any; hidden: from which loading takes
    no longer than what is recomputed anyway.
    """

    codec: str
    chunk_bytes: float
    total_bytes: int
    precompute_s: float
    precompute_hours: float
    precompute_usd: float
    prompt_bytes: float
    break_even: float | None
    hidden: float | None
    tiers: tuple[TierCost, ...]


@dataclass(frozen=True)
class Plan:
    """Everything together. compute_s: of a prompt's chunks in full prefill; full_s: until the first token after it."""

    corpus: CorpusSize
    model: ModelOutline
    prompt: PromptSize
    rates: Rates
    terms: Terms
    compute_s: float
    full_s: float
    codecs: tuple[CodecCost, ...]


def make_plan(corpus: CorpusSize, model: ModelOutline, prompt: PromptSize, rates: Rates, terms: Terms) -> Plan:
    """Pure arithmetic, apart from the weighing of entries."""
    compute_s = model.operations(prompt.chunk * prompt.chunks, prompt.prefix) / rates.operations
    full_s = model.operations(prompt.rows) / rates.operations
    found = tuple(_codec(corpus, model, prompt, rates, terms, codec, (compute_s, full_s)) for codec in terms.codecs)
    return Plan(corpus, model, prompt, rates, terms, compute_s, full_s, found)


def _codec(
    corpus: CorpusSize,
    model: ModelOutline,
    prompt: PromptSize,
    rates: Rates,
    terms: Terms,
    codec: str,
    seconds: tuple[float, float],
) -> CodecCost:
    compute_s, full_s = seconds
    mine = rates.codecs[codec]
    total = corpus_bytes(corpus, model, codec, terms.dtype)
    shared_s = _tokens(corpus.isolated) / mine.isolated + _tokens(corpus.contextual) / mine.contextual
    precompute_s = shared_s + once_s(corpus, model, rates) * terms.machines
    caches = sum(corpus.isolated.values()) + sum(corpus.contextual.values())
    prompt_bytes = total / caches * prompt.chunks
    own_s = prompt_bytes / mine.load if mine.load else 0.0
    blend_s = _recomputed_s(model, prompt, rates, terms.ratio)

    def in_tier(tier: Tier) -> TierCost:
        load_s = max(prompt_bytes / tier.bandwidth, own_s)
        usd_month, saved = total / GB * tier.usd_gb_month, full_s - max(load_s, blend_s)
        pays = usd_month / (saved / 3600 * terms.usd_hour) if saved > 0 and terms.usd_hour else None
        blended = max(load_s, blend_s)
        return TierCost(tier.name, tier.bandwidth, usd_month, load_s, blended, full_s / blended, pays)

    return CodecCost(
        codec,
        total / corpus.chunks,
        total,
        precompute_s,
        precompute_s / 3600 / terms.machines,
        precompute_s / 3600 * terms.usd_hour,
        prompt_bytes,
        prompt_bytes / compute_s if own_s < compute_s else None,
        prompt_bytes / blend_s if own_s < blend_s else None,
        tuple(map(in_tier, terms.tiers)),
    )


def once_s(corpus: CorpusSize, model: ModelOutline, rates: Rates) -> float:
    """Seconds that every machine takes once: for the KV of the prefix, and for that of prefix and surrogate context."""
    rows = [corpus.prefix, corpus.prefix + corpus.surrogate] if corpus.contextual else [corpus.prefix]
    return sum(map(model.operations, rows)) / rates.operations


def _recomputed_s(model: ModelOutline, prompt: PromptSize, rates: Rates, ratio: float) -> float:
    """Seconds of recomputing a share of the prompt's rows, and of its question."""
    context = prompt.chunk * prompt.chunks
    question = prompt.rows - prompt.prefix - context
    rows = ratio * context * (model.row_operations + model.pair_operations * (prompt.prefix + context / 2))
    return (rows + model.operations(question, prompt.prefix + context)) / rates.operations


def _tokens(lengths: object) -> int:
    return sum(length * count for length, count in dict(lengths).items())  # type: ignore[call-overload]
