"""What a corpus of caches costs before any is computed: bytes, time and money by codec and tier.

Bytes are exact: the store encodes entries of the right shapes. Time follows from floating-point operations and the rate of full
prefill. Prices are assumptions that the user replaces.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.surrogate import LARGEST_SHARE, choose
from blend.corpus import divided
from blend.errors import ConfigError
from blend.model.decoder import full_prefill
from blend.store.codecs import get_codec
from blend.store.format import encode_entry
from blend.store.seal import make_seal
from blend.types import CacheIdentity, ChunkCache, PromptLayout, lead_of

if TYPE_CHECKING:
    from blend.config import CorpusConfig
    from blend.model.decoder import Decoder
    from blend.model.outline import ModelOutline, Operator, Shape
    from blend.prompt import PromptTemplate
    from blend_retrieval import LoadedDocuments

PREFIX, QUESTION = 40, 64  # tokens before the first chunk, if no tokenizer counts them, and after the last one
STORED_SHARE = 0.86  # rate of computing and storing caches over that of a plain forward pass (scripts/bench_precompute)
ROUNDS = 3  # of a measurement


class Tier(NamedTuple):
    """A place for caches: bytes a second for one reader, USD a month for a GB."""

    name: str
    bandwidth: float
    usd_gb_month: float


# Assumptions: rounded list prices of large clouds in 2025, and what one machine reads from each.
TIERS = (Tier("memory", 2e9, 4.0), Tier("disk", 2e9, 0.08), Tier("objects", 5e8, 0.023))
USD_HOUR = 2.0  # of one machine


class CorpusSize(NamedTuple):
    """A corpus by chunk lengths: tokens -> number of chunks with an isolated and with a contextual cache.

    prefix, surrogate: tokens before an isolated cache, and additional ones before a contextual cache.
    """

    isolated: Mapping[int, int]
    contextual: Mapping[int, int]
    prefix: int
    surrogate: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return sum(self.isolated.values())

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(length * number for length, number in self.isolated.items())

    @property
    def chunk(self) -> int:
        """Tokens of a typical chunk."""
        return max(1, round(self.tokens / self.chunks))

    @property
    def caches(self) -> list[tuple[int, int, int]]:
        """Length, start and number of caches of the same size."""
        kinds = ((self.isolated, self.prefix), (self.contextual, self.prefix + self.surrogate))
        return [(length, start, number) for lengths, start in kinds for length, number in lengths.items()]

    def rows(self, top_k: int) -> int:
        """Tokens of a typical prompt of so many chunks."""
        return self.prefix + self.chunk * top_k + QUESTION


class Terms(NamedTuple):
    """What to plan for. rate: operations a second of full prefill. ratio: recomputed share of a prompt's `top_k` chunks."""

    dtype: str
    codecs: Sequence[str]
    tiers: Sequence[Tier]
    usd_hour: float
    top_k: int
    ratio: float
    rate: float


class PlanRow(NamedTuple):
    """One codec in one tier.

    chunk_bytes: of a chunk's caches together. break_even: bytes a second from which loading a prompt's chunks beats computing
    them; hidden: from which it takes no longer than recomputing. first_token_s: at least; gain: full prefill over that.
    pays_from: prompts a month whose saved machine time pays for storage; None if nothing is saved. least_chunk: tokens of a
    chunk from which loading it takes less time than computing what it saves; None if never.
    """

    codec: str
    chunk_bytes: float
    total_bytes: int
    prompt_bytes: float
    break_even: float
    hidden: float
    tier: str
    bandwidth: float
    usd_month: float
    load_s: float
    first_token_s: float
    gain: float
    pays_from: float | None
    least_chunk: int | None


class CostPlan(NamedTuple):
    """Seconds of one machine: to precompute all, to compute a prompt's chunks, to its first token after full prefill."""

    precompute_s: float
    compute_s: float
    full_s: float
    rows: list[PlanRow]


def counted(loaded: LoadedDocuments, template: PromptTemplate, config: CorpusConfig, context: int | None) -> CorpusSize:
    """The corpus that `blend precompute` would make of documents. context: the model's longest prompt."""
    ids = tuple(dict.fromkeys(map(template.chunk_ids, divided(loaded.documents, template, config))))
    longest, prefix = max(map(len, ids), default=0), len(template.prefix)
    if config.surrogate_text:
        surrogate = [tuple(template.encode(config.surrogate_text)[: config.surrogate_tokens])]
    else:
        room = min(config.surrogate_tokens, (context or 1 << 62) - prefix - longest)
        surrogate = list(choose([one for one in ids if len(one) <= room], config.surrogate_tokens, len(ids)))
    behind = sum(map(len, surrogate))
    fits = [one for one in ids if one not in surrogate and (context is None or prefix + behind + len(one) <= context)]
    return CorpusSize(Counter(map(len, ids)), Counter(map(len, fits if behind else ())), prefix, behind)


def stated(chunks: int | None, tokens: int | None, config: CorpusConfig) -> CorpusSize:
    """A corpus of so many chunks and tokens; if only one is given, all chunks are full. Raises `ConfigError`."""
    if chunks is None and tokens is None:
        raise ConfigError("no corpus to plan for: name its PATHS, or give --chunks, --tokens or both")
    mean = max(1, round(tokens / chunks)) if chunks and tokens else config.chunk_tokens
    if mean > config.chunk_tokens:
        raise ConfigError(
            f"chunks of {mean:,} tokens on average are longer than --chunk-tokens {config.chunk_tokens:,}: raise it"
        )
    count = chunks or -(-(tokens or 0) // mean)
    taken = 0 if config.surrogate_text else min(config.surrogate_tokens // mean, count // LARGEST_SHARE)
    behind = config.surrogate_tokens if config.surrogate_text else taken * mean
    return CorpusSize({mean: count}, {mean: count - taken} if behind else {}, PREFIX, behind)


def corpus_bytes(corpus: CorpusSize, model: ModelOutline, codec: str, dtype: str) -> int:
    """Bytes of all entries, exactly as `ChunkStore.stats` counts them."""
    shapes, operators = (model.keys, model.values), model.operators
    return sum(
        number * entry_bytes(*shapes, length, start, codec, dtype, operators) for length, start, number in corpus.caches
    )


@lru_cache(maxsize=4096)
def entry_bytes(
    keys: tuple[Shape, ...],
    values: tuple[Shape, ...],
    tokens: int,
    start: int,
    codec: str,
    dtype: str,
    operators: tuple[Operator, ...] = (),
) -> int:
    """Bytes of one entry: `tokens` tokens computed behind `start` others. No codec's size depends on the values.

    keys, values: KV heads and head dimension of each layer. operators: see `ModelOutline`.
    """
    import torch

    how = get_codec(codec)
    kind = torch.float32 if how.unrotated else getattr(torch, dtype)  # taking positions out makes float32
    made = {shape: torch.randn(shape[0], tokens, shape[1]).to(kind) for shape in {*keys, *values}}
    own = [tuple(made[one] for one in shapes) for shapes in (keys, values)]
    lead = lead_of(tokens) if operators else 0
    carried = tuple(
        (*(torch.empty(n, dtype=getattr(torch, dtype)) for n in conv), *map(torch.empty, rest)) if lead < tokens else ()
        for conv, rest in operators
    )
    cache = ChunkCache(own[0], own[1], start, unrotated=how.unrotated, lead=lead, operators=carried)
    return encode_entry(CacheIdentity("", dtype, (0,)).key((0,)), cache, how, make_seal(None)).nbytes


def measured_rate(decoder: Decoder, model: ModelOutline, rows: int) -> float:
    """Operations a second of full prefill on this machine: the median of a few random prompts, after one to warm up."""
    import torch

    ids = tuple(torch.randint(decoder.vocabulary, (rows,)).tolist())
    layout = PromptLayout.of_chunks(ids[:1], (ids[1:-1],), ids[-1:])
    times = [full_prefill(decoder, layout).ttft_s for _ in range(ROUNDS + 1)]
    return model.operations(rows) / median(times[1:])


def rate_of_precompute(tokens_per_s: float, model: ModelOutline, corpus: CorpusSize) -> float:
    """Operations a second of full prefill, from the tokens a second of an earlier precompute of both kinds of caches."""
    places = [corpus.prefix, corpus.prefix + corpus.surrogate] if corpus.surrogate else [corpus.prefix]
    of_token = sum(model.operations(corpus.chunk, before) for before in places) / (len(places) * corpus.chunk)
    return tokens_per_s * of_token / STORED_SHARE


def least_chunk(corpus: CorpusSize, model: ModelOutline, terms: Terms, codec: str, bandwidth: float) -> int | None:
    """Tokens of a chunk from which loading its cache takes less time than computing its rows but the recomputed ones."""
    itemsize = 2 if terms.dtype in ("bfloat16", "float16") else 4
    operators = model.operator_bytes(itemsize)
    with_kv = corpus_bytes(corpus, model, codec, terms.dtype) / sum(number for *_, number in corpus.caches)
    a_token = max(0.0, with_kv - operators) / corpus.chunk / bandwidth
    saved = (1 - terms.ratio) * model.row_operations / terms.rate - a_token
    return None if saved <= 0 else max(1, math.ceil(operators / bandwidth / saved))


def make_plan(corpus: CorpusSize, model: ModelOutline, terms: Terms) -> CostPlan:
    """Work the plan out."""
    context = corpus.chunk * terms.top_k
    compute_s = model.operations(context, corpus.prefix) / terms.rate
    full_s = model.operations(corpus.rows(terms.top_k)) / terms.rate
    rows = terms.ratio * context * (model.row_operations + model.pair_operations * (corpus.prefix + context / 2))
    blend_s = (rows + model.operations(QUESTION, corpus.prefix + context)) / terms.rate
    work = sum(number * model.operations(length, start) for length, start, number in corpus.caches)
    before = sum(
        model.operations(start) for start in {start for _, start, _ in corpus.caches}
    )  # prefix, surrogate context
    found = []
    for codec in terms.codecs:
        total = corpus_bytes(corpus, model, codec, terms.dtype)
        loaded = total / sum(number for *_, number in corpus.caches) * terms.top_k
        for tier in terms.tiers:
            load_s, usd_month = loaded / tier.bandwidth, total / 1e9 * tier.usd_gb_month
            first_s = max(load_s, blend_s)
            saved = (full_s - first_s) / 3600 * terms.usd_hour
            row = PlanRow(
                codec=codec,
                chunk_bytes=total / corpus.chunks,
                total_bytes=total,
                prompt_bytes=loaded,
                break_even=loaded / compute_s,
                hidden=loaded / blend_s,
                tier=tier.name,
                bandwidth=tier.bandwidth,
                usd_month=usd_month,
                load_s=load_s,
                first_token_s=first_s,
                gain=full_s / first_s,
                pays_from=usd_month / saved if saved > 0 else None,
                least_chunk=least_chunk(corpus, model, terms, codec, tier.bandwidth),
            )
            found.append(row)
    return CostPlan((work / STORED_SHARE + before) / terms.rate, compute_s, full_s, found)
