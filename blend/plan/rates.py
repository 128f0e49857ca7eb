"""What a machine does in a second: given, measured here in a short run, or worked out from one figure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.assemble import assemble
from blend.chunks.library import ChunkLibrary
from blend.chunks.surrogate import with_given_surrogate
from blend.model.decoder import full_prefill
from blend.store import open_store
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.model.outline import ModelOutline

# Computing and storing caches runs at so much of the rate of a plain forward pass (scripts/bench_precompute, README).
STORED_SHARE = 0.86
SAMPLE_CHUNKS, ROUNDS = 8, 3
Clock = Callable[[], float]
QUESTION = 64  # tokens of a question with what the chat template puts behind it


class CodecRates(NamedTuple):
    """Tokens a second of computing and storing isolated and contextual caches.

    load: bytes a second of stored caches that one machine reads, verifies, decodes and puts in place when they are at hand;
    None where that was not said, and is taken to be no limit.
    """

    isolated: float
    contextual: float
    load: float | None


@dataclass(frozen=True)
class Rates:
    """operations: a second, in full prefill. codecs: by codec. source: where all of it comes from, in words."""

    operations: float
    codecs: dict[str, CodecRates]
    source: str


class PromptSize(NamedTuple):
    """What prompts look like: tokens before the first chunk, in the surrogate context, and in a chunk; how many chunks."""

    prefix: int
    surrogate: int
    chunk: int
    chunks: int

    @property
    def rows(self) -> int:
        """Tokens of a prompt."""
        return self.prefix + self.chunk * self.chunks + QUESTION


def from_prefill(
    tokens_per_s: float, model: ModelOutline, like: PromptSize, codecs: Sequence[str], load: float | None, source: str
) -> Rates:
    """Rates out of that of full prefill of such prompts: the others follow from the operations that they take."""
    return _from_operations(tokens_per_s * model.operations(like.rows) / like.rows, model, like, codecs, load, source)


def from_profile(
    tokens_per_s: float, model: ModelOutline, like: PromptSize, codecs: Sequence[str], load: float | None, source: str
) -> Rates:
    """Rates out of that of an earlier precompute, isolated and contextual caches together."""
    places = [like.prefix, like.prefix + like.surrogate] if like.surrogate else [like.prefix]
    of_token = sum(model.operations(like.chunk, before) for before in places) / (len(places) * like.chunk)
    return _from_operations(tokens_per_s * of_token / STORED_SHARE, model, like, codecs, load, source)


def _from_operations(
    operations: float, model: ModelOutline, like: PromptSize, codecs: Sequence[str], load: float | None, source: str
) -> Rates:
    isolated, contextual = (
        STORED_SHARE * operations * like.chunk / model.operations(like.chunk, before)
        for before in (like.prefix, like.prefix + like.surrogate)
    )
    return Rates(operations, dict.fromkeys(codecs, CodecRates(isolated, contextual, load)), source)


def measure(
    decoder: Decoder,
    model: ModelOutline,
    like: PromptSize,
    codecs: Sequence[str],
    batch_tokens: int,
    *,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Prefill a prompt, compute and store a few chunks and load them again, with each codec: some thousands of tokens.

    clock: `time.process_time` where others work on the same cores, and one thread computes. Token ids are random: no cost
    depends on them. Files go to the folder for temporary files, and are removed.
    """
    layout = _random_layout(decoder.vocabulary, like)
    seconds = timed(lambda: full_prefill(decoder, layout), decoder, rounds, clock)
    found = {
        codec: _measure_codec(decoder, layout, codec, batch_tokens, like.surrogate, (rounds, clock)) for codec in codecs
    }
    return Rates(model.operations(layout.rows) / seconds, found, "measured here")


def _measure_codec(
    decoder: Decoder, layout: PromptLayout, codec: str, batch_tokens: int, surrogate: int, timing: tuple[int, Clock]
) -> CodecRates:
    chunks, total = layout.chunks[:SAMPLE_CHUNKS], sum(map(len, layout.chunks[:SAMPLE_CHUNKS]))
    with tempfile.TemporaryDirectory() as folder:
        library = ChunkLibrary(decoder, open_store(folder, codec=codec), layout.prefix, batch_tokens)
        if surrogate:
            library = with_given_surrogate(library, random_ids(decoder.vocabulary, surrogate, 3))
        variants = library.variants(chunks)

        def rate(*, contextual: bool) -> float:
            mine = [one for one in variants if one.contextual == contextual]
            return total / timed(partial(library.compute, mine), decoder, *timing) if mine else 1.0

        isolated, contextual = rate(contextual=False), rate(contextual=True)
        library.compute(library.missing(layout.chunks))
        stored = library.store.stats().nbytes / len(library.variants(layout.chunks)) * len(layout.chunks)
        return CodecRates(isolated, contextual, stored / timed(lambda: load(library, layout), decoder, *timing))


def load(library: ChunkLibrary, layout: PromptLayout) -> None:
    """Read the chunks of a prompt, verify and decode them, and put them in their places."""
    opened = library.open(layout.chunks)
    assembled = assemble(library.decoder, layout, library.isolated.prefix, opened.readers)
    for index in range(len(library.decoder.layers)):
        assembled.cache.view(index)


def timed(run: Callable[[], object], decoder: Decoder, rounds: int, clock: Clock = time.perf_counter) -> float:
    """Seconds, the median of a few after one to warm up."""
    found = []
    for _ in range(rounds + 1):
        begin = _now(decoder, clock)
        run()
        found.append(_now(decoder, clock) - begin)
    return median(found[1:])


def _now(decoder: Decoder, clock: Clock) -> float:
    if decoder.device.type == "cuda":
        import torch

        torch.cuda.synchronize(decoder.device)
    return clock()


def _random_layout(vocabulary: int, like: PromptSize) -> PromptLayout:
    context = random_ids(vocabulary, like.chunk * like.chunks, 2)
    chunks = tuple(context[at : at + like.chunk] for at in range(0, len(context), like.chunk))
    return PromptLayout(random_ids(vocabulary, like.prefix, 0), chunks, random_ids(vocabulary, QUESTION, 1))


def random_ids(vocabulary: int, count: int, seed: int) -> tuple[int, ...]:
    """Token ids, the same for the same arguments."""
    import torch

    return tuple(torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist())
