"""Fitting KV corrections on a few prompts of the user's own chunks.

A prompt of chunks is prefilled in full once; what its rows gain over their stored KV is what `blend.chunks.correction`
predicts (`blend.chunks.regression` has the regression). The first chunk of a prompt is exact and shows nothing, so the prompts
are dealt such that every chunk of a small corpus stands behind another in one of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.assemble import HeldChunk, assemble
from blend.chunks.correction import KVCorrection, LayerCorrection, position_features, rows_of
from blend.chunks.regression import GROUPS, LayerRows, RowPlaces, fit_layer
from blend.model import cpu
from blend.timing import Progress, no_progress
from blend.types import ChunkCache, PromptLayout

if TYPE_CHECKING:
    from blend.chunks.encode import ChunkEncoder
    from blend.model.cache import BlendedCache
    from blend.model.decoder import RowDecoder

GROUP = 8  # chunks of a calibration prompt
PROMPT_TOKENS = 2560  # its tokens at most, where two chunks are not longer
TOKENS = 8_000  # of all calibration prompts, if the chunks have as many
MOST_PROMPTS = 32

Tokens = tuple[int, ...]


class Source(NamedTuple):
    """One kind of stored caches.

    caches: those of a prompt's chunks, the first computed right behind the prefix. holds: whether the cache of a chunk that
    stands behind another is of this kind.
    """

    caches: Callable[[Sequence[Tokens]], Sequence[ChunkCache]]
    holds: Callable[[Tokens], bool]


def fit_corrections(
    encoder: ChunkEncoder,
    chunks: Sequence[Sequence[int]],
    sources: Sequence[Source],
    progress: Progress = no_progress,
) -> list[KVCorrection | None]:
    """Fit a map for each source of caches, on the same prompts made of these chunks.

    None when no prompt of two chunks can be made, or nothing helps. progress: of the stage "calibrate", in tokens. Costs a full
    prefill of every prompt, and holds the KV of all of them in the host's memory meanwhile, in float32, once and once more for
    each source.
    """
    distinct = [tuple(chunk) for chunk in dict.fromkeys(map(tuple, chunks)) if chunk]
    prompts = deal_prompts(encoder, distinct)
    seen = _Seen(encoder.decoder, prompts, len(sources))
    done, total = 0, sum(prompt.rows for prompt in prompts)
    progress("calibrate", 0, total)
    for layout in prompts:
        held = [seen.flat(_together(encoder, layout), layout)]
        for source in sources:
            readers = [HeldChunk(cache) for cache in source.caches(layout.chunks)]
            held.append(seen.flat(assemble(encoder.decoder, layout, encoder.prefix, readers).cache, layout))
        seen.add(held)
        done += layout.rows
        progress("calibrate", done, total)
    return [seen.solve(number, source, distinct) for number, source in enumerate(sources, 1)]


class _Seen:
    """The rows behind the first chunks of the calibration prompts, layer by layer: in full prefill and from each source.

    They are some gigabytes with a large decoder, so they lie in the host's memory, and go back to the system all at once.
    """

    def __init__(self, decoder: RowDecoder, prompts: Sequence[PromptLayout], sources: int) -> None:
        self._decoder, self._prompts = decoder, prompts
        self._held: list[list[list[torch.Tensor]]] = [[[] for _ in decoder.rotations] for _ in range(sources + 1)]

    def flat(self, cache: BlendedCache, layout: PromptLayout) -> Sequence[torch.Tensor]:
        """A prompt's rows of every layer, positions taken out, fp32 `[rows, inputs]` each."""
        rows = _behind(layout, self._decoder.device)
        pairs = (cache.view(index) for index in range(len(self._decoder.rotations)))
        rotations = self._decoder.rotations
        still = (
            rows_of(k[:, :, rows], v[:, :, rows], turn, rows) for (k, v), turn in zip(pairs, rotations, strict=True)
        )
        return cpu.copies([layer.cpu() for layer in still])

    def add(self, found: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take in a prompt: its rows in full prefill, then from each source."""
        for held, layers in zip(self._held, found, strict=True):
            for parts, rows in zip(held, layers, strict=True):
                parts.append(rows)

    def solve(self, number: int, source: Source, chunks: Sequence[Tokens]) -> KVCorrection | None:
        """The map of the source with this number, from 1, or None where none helps in any layer; chunks: all there are."""
        behind = [chunk for prompt in self._prompts for chunk in prompt.chunks[1:] if source.holds(chunk)]
        if len(set(behind)) < 2:  # no chunk could be held out
            return None
        covered = len(set(behind)) / sum(map(source.holds, chunks))
        places = _places(self._prompts, self._decoder.device)
        mine = torch.tensor(
            [source.holds(c) for p in self._prompts for c in p.chunks[1:] for _ in c], device=self._decoder.device
        )
        fitted: list[LayerCorrection | None] = [None]  # layer 0 depends on token and position only
        for index, rotation in enumerate(self._decoder.rotations[1:], 1):
            both = (torch.cat(self._held[which][index]) for which in (0, number))
            fresh, stored = (rows.to(self._decoder.device)[mine] for rows in both)
            keys = math.prod(rotation.key_shape)
            fitted.append(fit_layer(LayerRows(stored, fresh - stored, places.at(mine), keys, covered)))
        before = max(p.chunk_spans[-1].start - len(p.prefix) for p in self._prompts)
        return KVCorrection(tuple(fitted), before, max(map(len, behind))) if any(fitted) else None


def deal_prompts(encoder: ChunkEncoder, chunks: Sequence[Tokens]) -> list[PromptLayout]:
    """Calibration prompts of these different chunks, the same ones for the same chunks.

    Every chunk has two turns behind a chunk drawn at random, as far as `TOKENS` and `MOST_PROMPTS` go and the model reads two
    chunks.
    """
    draw, prefix = random.Random(0), encoder.prefix_tokens
    context = encoder.decoder.context_length or PROMPT_TOKENS
    limit = min(PROMPT_TOKENS, context - len(prefix))
    pool = draw.sample(chunks, min(len(chunks), GROUP * MOST_PROMPTS))
    queue = [*pool, *reversed(pool)]  # a second turn elsewhere: what stood first behind the lead stands last
    prompts: list[PromptLayout] = []
    while queue and sum(prompt.rows for prompt in prompts) < TOKENS and len(prompts) < MOST_PROMPTS:
        room = context - len(prefix) - len(queue[0])
        leads = [chunk for chunk in pool if chunk != queue[0] and len(chunk) <= room]
        if not leads:  # no prompt can hold it together with another
            queue.pop(0)
            continue
        prompts.append(PromptLayout(prefix, tuple(_taken(queue, draw.choice(leads), limit)), ()))
    return prompts


def _taken(queue: list[Tokens], lead: Tokens, limit: int) -> list[Tokens]:
    """A prompt's chunks: `lead`, the first of the queue, and those after it that fit; they leave the queue."""
    group, tokens = [lead, queue[0]], len(lead) + len(queue.pop(0))
    for chunk in tuple(queue):
        if len(group) == GROUP:
            break
        if chunk not in group and tokens + len(chunk) <= limit:
            queue.remove(chunk)
            group.append(chunk)
            tokens += len(chunk)
    return group


def _places(prompts: Sequence[PromptLayout], device: torch.device) -> RowPlaces:
    """Of every row behind a first chunk."""
    group, turns = _groups(prompts), Counter[Tokens]()
    numbers: list[tuple[int, int]] = []
    for chunk in (chunk for prompt in prompts for chunk in prompt.chunks[1:]):
        numbers += [(group[chunk], turns[chunk])] * len(chunk)
        turns[chunk] += 1
    columns = torch.tensor(numbers, device=device).T
    features = torch.cat([position_features(prompt, _behind(prompt, device)) for prompt in prompts])
    return RowPlaces(features, columns[0], columns[1])


def _groups(prompts: Sequence[PromptLayout]) -> dict[Tokens, int]:
    """A group for every chunk that stands behind another."""
    return grouped((chunk, len(chunk)) for prompt in prompts for chunk in prompt.chunks[1:])


def grouped(rows: Iterable[tuple[Tokens, int]]) -> dict[Tokens, int]:
    """A group for every chunk, as equal as whole chunks allow. rows: of chunks, how many each time."""
    sizes = Counter[Tokens]()
    for chunk, count in rows:
        sizes[chunk] += count
    filled, group = [0] * min(GROUPS, len(sizes)), {}
    for chunk, size in sizes.most_common():
        group[chunk] = filled.index(min(filled))
        filled[group[chunk]] += size
    return group


def _behind(layout: PromptLayout, device: torch.device) -> torch.Tensor:
    """Positions of the rows behind the first chunk."""
    return torch.arange(layout.chunk_spans[1].start, layout.rows, device=device)


def _together(encoder: ChunkEncoder, layout: PromptLayout) -> BlendedCache:
    """A prompt's KV computed in one piece."""
    decoder, start = encoder.decoder, len(layout.prefix)
    cache = assemble(decoder, layout, encoder.prefix, [None] * len(layout.chunks)).cache
    decoder.encode_rows(torch.tensor([layout.token_ids[start:]], device=decoder.device), start, cache)
    return cache
