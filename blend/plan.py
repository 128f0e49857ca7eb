"""What a corpus of caches costs before any is computed: bytes, time and money by codec and tier.

Bytes are exact: the store encodes entries of the right shapes. Time follows from floating-point operations and a measured or
given rate. Prices are assumptions that the user replaces.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.assemble import assemble
from blend.chunks.library import LARGEST_SHARE, ChunkLibrary, choose, with_given_surrogate
from blend.corpus import divided
from blend.errors import ConfigError
from blend.model.decoder import full_prefill
from blend.store import open_store
from blend.store.codecs import get_codec
from blend.store.format import encode_entry
from blend.store.seal import make_seal
from blend.types import CacheIdentity, ChunkCache, PromptLayout

if TYPE_CHECKING:
    from blend.config import CorpusConfig
    from blend.model.decoder import Decoder
    from blend.model.outline import ModelOutline
    from blend.prompt import PromptTemplate
    from blend_retrieval import LoadedDocuments

PREFIX, QUESTION = 40, 64  # tokens before the first chunk, if no tokenizer counts them, and after the last one
STORED_SHARE = 0.86  # rate of computing and storing caches over that of a plain forward pass (scripts/bench_precompute)
SAMPLE_CHUNKS, ROUNDS = 8, 3  # of a measurement


class Tier(NamedTuple):
    """A place for caches: bytes a second for one reader, USD a month for a GB."""

    name: str
    bandwidth: float
    usd_gb_month: float


# Assumptions: rounded list prices of large clouds in 2025, and what one machine reads from each.
TIERS = (Tier("memory", 2e9, 4.0), Tier("disk", 2e9, 0.08), Tier("objects", 5e8, 0.023))
USD_HOUR = 2.0  # of one machine


class CorpusSize(NamedTuple):
    """A corpus by chunk lengths: tokens -> number of chunks, of all, and of those with an isolated or a contextual cache.

    prefix, surrogate: tokens before an isolated cache, and additional ones before a contextual cache.
    """

    lengths: Mapping[int, int]
    isolated: Mapping[int, int]
    contextual: Mapping[int, int]
    prefix: int
    surrogate: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return sum(self.lengths.values())

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(length * number for length, number in self.lengths.items())

    @property
    def caches(self) -> list[tuple[int, int, int]]:
        """Length, start and number of caches of the same size."""
        kinds = ((self.isolated, self.prefix), (self.contextual, self.prefix + self.surrogate))
        return [(length, start, number) for lengths, start in kinds for length, number in lengths.items()]


class PromptSize(NamedTuple):
    """A typical prompt: tokens of prefix, surrogate context and each chunk, and the number of chunks."""

    prefix: int
    surrogate: int
    chunk: int
    chunks: int

    @property
    def rows(self) -> int:
        """Tokens of a prompt."""
        return self.prefix + self.chunk * self.chunks + QUESTION


class CodecRates(NamedTuple):
    """stored: operations a second of computing and storing. load: bytes a second of reading and decoding, or None: no limit."""

    stored: float
    load: float | None


class Rates(NamedTuple):
    """operations: a second, in full prefill. source: where the rates come from, in words."""

    operations: float
    codecs: dict[str, CodecRates]
    source: str


class Terms(NamedTuple):
    """What to plan for. machines: that precompute together. ratio: share of stored rows that an answer recomputes."""

    dtype: str
    codecs: Sequence[str]
    tiers: Sequence[Tier]
    machines: int
    usd_hour: float
    ratio: float


class TierCost(NamedTuple):
    """One codec in one tier. blended_s: to the first token, at least. gain: full prefill over that.

    pays_from: prompts a month whose saved machine time pays for storage; None if nothing is saved.
    """

    tier: str
    bandwidth: float
    usd_month: float
    load_s: float
    blended_s: float
    gain: float
    pays_from: float | None


class CodecCost(NamedTuple):
    """One codec. chunk_bytes: of a chunk's caches together. precompute_s: machine time; precompute_hours: elapsed.

    break_even: bytes a second from which loading beats computing; hidden: from which loading takes no longer than recomputing.
    Both are None if this machine decodes too slowly for any bandwidth.
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


class CostPlan(NamedTuple):
    """The whole plan. compute_s: seconds to compute a prompt's chunks; full_s: to its first token after full prefill."""

    corpus: CorpusSize
    model: ModelOutline
    prompt: PromptSize
    rates: Rates
    terms: Terms
    compute_s: float
    full_s: float
    codecs: tuple[CodecCost, ...]


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
    return _sized(Counter(map(len, ids)), Counter(map(len, fits)) if behind else Counter(), prefix, behind, config)


def given(chunks: int | None, tokens: int | None, config: CorpusConfig) -> CorpusSize:
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
    contextual = Counter({mean: count - taken}) if behind else Counter[int]()
    return _sized(Counter({mean: count}), contextual, PREFIX, behind, config)


def _sized(all_: Counter[int], contextual: Counter[int], prefix: int, behind: int, config: CorpusConfig) -> CorpusSize:
    return CorpusSize(all_, all_, contextual, prefix, behind)


def corpus_bytes(corpus: CorpusSize, model: ModelOutline, codec: str, dtype: str) -> int:
    """Bytes of all entries, exactly as `ChunkStore.stats` counts them."""
    return sum(number * entry_bytes(model, length, start, codec, dtype) for length, start, number in corpus.caches)


@lru_cache(maxsize=4096)
def entry_bytes(model: ModelOutline, tokens: int, start: int, codec: str, dtype: str) -> int:
    """Bytes of one entry: `tokens` tokens computed behind `start` others. No codec's size depends on the values."""
    import torch

    how = get_codec(codec)
    kind = torch.float32 if how.unrotated else getattr(torch, dtype)  # taking positions out makes float32
    made = {shape: torch.randn(shape[0], tokens, shape[1]).to(kind) for shape in {*model.keys, *model.values}}
    keys, values = (tuple(made[one] for one in shapes) for shapes in (model.keys, model.values))
    cache = ChunkCache(keys, values, start, unrotated=how.unrotated)
    return encode_entry(CacheIdentity(model.name, dtype, (0,)).key((0,)), cache, how, make_seal(None)).nbytes


def rates_of_prefill(operations: float, codecs: Sequence[str], load: float | None, source: str) -> Rates:
    """Rates that follow from the operations a second of full prefill."""
    return Rates(operations, dict.fromkeys(codecs, CodecRates(STORED_SHARE * operations, load)), source)


def operations_of_precompute(tokens_per_s: float, model: ModelOutline, like: PromptSize) -> float:
    """Operations a second of full prefill, from the tokens a second of an earlier precompute."""
    places = [like.prefix, like.prefix + like.surrogate] if like.surrogate else [like.prefix]
    of_token = sum(model.operations(like.chunk, before) for before in places) / (len(places) * like.chunk)
    return tokens_per_s * of_token / STORED_SHARE


def measure(decoder: Decoder, model: ModelOutline, like: PromptSize, codecs: Sequence[str], batch_tokens: int) -> Rates:
    """Measure here: prefill a prompt of random tokens, then compute, store and load a few chunks with each codec."""
    random = partial(random_ids, decoder.vocabulary)
    chunks = tuple(random(like.chunk, seed) for seed in range(like.chunks))
    layout = PromptLayout(random(like.prefix, -1), chunks, random(QUESTION, -2))
    seconds = _timed(lambda: full_prefill(decoder, layout), decoder)

    def of_codec(codec: str, folder: str) -> CodecRates:
        library = ChunkLibrary(decoder, open_store(folder, codec=codec), layout.prefix, batch_tokens)
        if like.surrogate:
            library = with_given_surrogate(library, random(like.surrogate, -3))
        variants = library.variants(chunks[:SAMPLE_CHUNKS])
        starts = [like.prefix + like.surrogate * one.contextual for one in variants]
        done = sum(model.operations(like.chunk, start) for start in starts)
        stored = done / _timed(lambda: library.compute(variants), decoder)
        library.compute(library.missing(chunks))
        of_prompt = library.store.stats().nbytes / len(library.variants(chunks)) * len(chunks)
        return CodecRates(stored, of_prompt / _timed(lambda: _load(library, layout), decoder))

    found = {}
    for codec in codecs:
        with tempfile.TemporaryDirectory() as folder:
            found[codec] = of_codec(codec, folder)
    return Rates(model.operations(layout.rows) / seconds, found, "measured here")


def _load(library: ChunkLibrary, layout: PromptLayout) -> None:
    """Read, verify, decode and place a prompt's chunks."""
    opened = library.open(layout.chunks)
    assembled = assemble(library.decoder, layout, library.isolated.prefix, opened.readers)
    for index in range(len(library.decoder.layers)):
        assembled.cache.view(index)


def _timed(run: Callable[[], object], decoder: Decoder) -> float:
    """Median seconds of a few runs, after one to warm up."""
    import torch

    found = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        run()
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        found.append(time.perf_counter() - begin)
    return median(found[1:])


def random_ids(vocabulary: int, count: int, seed: int) -> tuple[int, ...]:
    """Token ids, the same for the same arguments."""
    import torch

    return tuple(torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def make_plan(corpus: CorpusSize, model: ModelOutline, prompt: PromptSize, rates: Rates, terms: Terms) -> CostPlan:
    """Work the plan out."""
    compute_s = model.operations(prompt.chunk * prompt.chunks, prompt.prefix) / rates.operations
    full_s = model.operations(prompt.rows) / rates.operations
    blend_s = _recompute_s(model, prompt, rates, terms.ratio)
    starts = {start for _, start, _ in corpus.caches}
    once_s = sum(map(model.operations, starts)) / rates.operations  # a machine's KV of prefix and surrogate context
    work = sum(number * model.operations(length, start) for length, start, number in corpus.caches)

    def of_codec(codec: str) -> CodecCost:
        mine, total = rates.codecs[codec], corpus_bytes(corpus, model, codec, terms.dtype)
        precompute_s = work / mine.stored + once_s * terms.machines
        prompt_bytes = total / sum(number for *_, number in corpus.caches) * prompt.chunks
        own_s = prompt_bytes / mine.load if mine.load else 0.0

        def in_tier(tier: Tier) -> TierCost:
            load_s, usd_month = max(prompt_bytes / tier.bandwidth, own_s), total / 1e9 * tier.usd_gb_month
            blended = max(load_s, blend_s)
            saved = (full_s - blended) / 3600 * terms.usd_hour
            pays_from = usd_month / saved if saved > 0 else None
            return TierCost(tier.name, tier.bandwidth, usd_month, load_s, blended, full_s / blended, pays_from)

        return CodecCost(
            codec=codec,
            chunk_bytes=total / corpus.chunks,
            total_bytes=total,
            precompute_s=precompute_s,
            precompute_hours=precompute_s / 3600 / terms.machines,
            precompute_usd=precompute_s / 3600 * terms.usd_hour,
            prompt_bytes=prompt_bytes,
            break_even=prompt_bytes / compute_s if own_s < compute_s else None,
            hidden=prompt_bytes / blend_s if own_s < blend_s else None,
            tiers=tuple(map(in_tier, terms.tiers)),
        )

    return CostPlan(corpus, model, prompt, rates, terms, compute_s, full_s, tuple(map(of_codec, terms.codecs)))


def _recompute_s(model: ModelOutline, prompt: PromptSize, rates: Rates, ratio: float) -> float:
    """Seconds to recompute a share of a prompt's rows, and its question."""
    context = prompt.chunk * prompt.chunks
    rows = ratio * context * (model.row_operations + model.pair_operations * (prompt.prefix + context / 2))
    return (rows + model.operations(QUESTION, prompt.prefix + context)) / rates.operations
