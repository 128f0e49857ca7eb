"""Fit KV corrections (`blend.chunks.correction`) on a few prompts made of the user's own chunks.

A prompt of chunks is prefilled in full once; the map predicts what its rows gain over their stored KV. The first chunk of a
prompt is exact and shows nothing, so every chunk of a small corpus stands behind another in one of the prompts.

`blend.chunks.regression` fits each layer.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blend.chunks.assemble import assemble
from blend.chunks.correction import POSITION_FEATURES, Bounds, KVCorrection, LayerCorrection, position_features, rows_of
from blend.chunks.library import ChunkLibrary
from blend.chunks.opened import caches_of
from blend.chunks.regression import RANK, LayerRows, fit_layer
from blend.chunks.unfinished import UnfinishedFit
from blend.layout import PromptLayout, Tokens
from blend.model import cpu
from blend.stopwatch import Progress, no_progress
from blend.types import CacheKind

if TYPE_CHECKING:
    from blend.chunks.encode import ChunkEncoder
    from blend.model.cache import KV, BlendedCache, LayerRotation
    from blend.model.row_decoder import RowDecoder


GROUPS = 4  # of chunks; each is predicted from the others
GROUP = 8  # chunks of a calibration prompt
PROMPT_TOKENS = 2560  # its tokens at most, unless two chunks are longer
TOKENS = 8_000  # of all calibration prompts, if the chunks have as many
MOST_PROMPTS = 32


def fit_corrections(
    library: ChunkLibrary, chunks: Sequence[Sequence[int]], kinds: Sequence[CacheKind], progress: Progress = no_progress
) -> list[KVCorrection | None]:
    """Fit a map for each kind of caches, on the same prompts made of these chunks.

    None when no prompt of two chunks can be made, or nothing helps. progress: of the stage "calibrate", in tokens, and "solve",
    in layers. Costs a full prefill of every prompt, and holds the KV of all of them in the host's memory meanwhile, in float32,
    once and once more for each kind. A store in a folder keeps the prompts that are finished, so that a fit that was
    interrupted goes on, with the same result.
    """
    encoder = library.isolated
    distinct = [tuple(chunk) for chunk in dict.fromkeys(map(tuple, chunks)) if chunk]
    prompts = deal_prompts(encoder, distinct)
    unfinished = UnfinishedFit(library, prompts)
    rows = _CalibrationRows(encoder.decoder, prompts)
    tokens = 0
    total = sum(prompt.rows for prompt in prompts)
    progress("calibrate", unfinished.tokens, total)
    for layout in prompts:
        rows.add(None, _in_full(encoder, layout, unfinished), layout)
        for kind in kinds:
            caches = caches_of(library, layout.chunks, contextual=kind is CacheKind.CONTEXTUAL)
            assembly = assemble(encoder.decoder, layout, encoder.prefix, caches)
            rows.add(kind, _kv_behind(assembly.cache, layout), layout)
        tokens += layout.rows
        progress("calibrate", max(tokens, unfinished.tokens), total)
    variants = library.variants(distinct)
    contextual = {key.chunk for key in variants if key.kind is CacheKind.CONTEXTUAL}
    eligible = {CacheKind.CONTEXTUAL: contextual, CacheKind.ISOLATED: set(distinct)}
    corrections = rows.solve_all({kind: eligible[kind] for kind in kinds}, progress)
    unfinished.clear()
    return corrections


class _CalibrationRows:
    """The rows behind the first chunks of the calibration prompts, layer by layer: in full prefill and by each kind of caches.

    They are some gigabytes with a large decoder, so they lie in the host's memory, and go back to the system all at once.
    """

    def __init__(self, decoder: RowDecoder, prompts: Sequence[PromptLayout]) -> None:
        self._decoder = decoder
        self._prompts = prompts
        self._prompt_layers = defaultdict[CacheKind | None, list[Sequence[Tensor]]](list)

    def add(self, kind: CacheKind | None, kv: Iterable[KV], layout: PromptLayout) -> None:
        """Copy a prompt's rows of every layer, positions taken out. kind: of its chunk caches; None for full prefill."""
        device = self._decoder.device
        rows = _rows_behind(layout, device)
        layers = []
        for (keys, values), rotation in zip(kv, self._decoder.rotations, strict=True):
            unrotated = rows_of(keys.to(device), values.to(device), rotation, rows)
            layers.append(unrotated[0].cpu())
        self._prompt_layers[kind].append(cpu.copies(layers))

    def _layer(self, kind: CacheKind | None, index: int) -> Tensor:
        """One layer's rows of all prompts, fp32 `[rows, inputs]`."""
        rows_of_prompts = [layers[index] for layers in self._prompt_layers[kind]]
        return torch.cat(rows_of_prompts).to(self._decoder.device)

    def solve_all(
        self, eligible: Mapping[CacheKind, Collection[Tokens]], progress: Progress
    ) -> list[KVCorrection | None]:
        """The maps for each kind of caches, or None if none helps in any layer.

        eligible: the chunks that have such a cache behind another chunk.
        """
        layers = sum(rotation.width > 0 for rotation in self._decoder.rotations[1:])
        total = layers * len(eligible)
        solved = itertools.count(1)
        progress("solve", 0, total)
        corrections = []
        for kind, chunks in eligible.items():
            corrections.append(self._solve(kind, chunks, lambda: progress("solve", next(solved), total)))
        progress("solve", total, total)  # a kind without a correction has no layers
        return corrections

    def _solve(
        self, kind: CacheKind, eligible: Collection[Tokens], on_layer: Callable[[], None]
    ) -> KVCorrection | None:
        chunks = _chunks_behind(self._prompts)
        behind = [chunk for chunk in chunks if chunk in eligible]
        if len(set(behind)) < 2:  # no chunk could be held out
            return None
        device = self._decoder.device
        eligible_rows: list[bool] = []
        for chunk in chunks:
            eligible_rows += [chunk in eligible] * len(chunk)
        is_eligible = torch.tensor(eligible_rows, device=device)
        features, group, turn = (column[is_eligible] for column in _places(self._prompts, device))
        fitted: list[LayerCorrection | None] = [None]  # layer 0 depends on token and position only
        for index, rotation in enumerate(self._decoder.rotations[1:], 1):
            if not rotation.width:  # a layer without KV
                fitted.append(None)
                continue
            fresh = self._layer(None, index)[is_eligible]
            stored = self._layer(kind, index)[is_eligible]
            rows = LayerRows(
                stored=stored,
                gain=fresh - stored,
                features=features,
                group=group,
                turn=turn,
                keys=math.prod(rotation.key_shape),
                covered=len(set(behind)) / len(eligible),
            )
            fitted.append(fit_layer(rows))
            on_layer()
        if not any(fitted):
            return None
        before = max(prompt.chunk_spans[-1].start - len(prompt.prefix) for prompt in self._prompts)
        longest = max(map(len, behind))
        return KVCorrection(tuple(fitted), before, longest)


def deal_prompts(encoder: ChunkEncoder, chunks: Sequence[Tokens]) -> list[PromptLayout]:
    """Calibration prompts of these different chunks, the same ones for the same chunks.

    Every chunk stands behind a chunk drawn at random, twice, within `TOKENS` and `MOST_PROMPTS`, if two chunks fit the
    model's context.
    """
    draw = random.Random(0)
    prefix = encoder.prefix_tokens
    context = encoder.decoder.context_length or PROMPT_TOKENS
    limit = min(PROMPT_TOKENS, context - len(prefix))
    pool = draw.sample(chunks, min(len(chunks), GROUP * MOST_PROMPTS))
    queue = [*pool, *reversed(pool)]  # a second turn elsewhere: the chunk that stood first behind the lead stands last
    prompts: list[PromptLayout] = []
    while queue and sum(prompt.rows for prompt in prompts) < TOKENS and len(prompts) < MOST_PROMPTS:
        room = context - len(prefix) - len(queue[0])
        leads = [chunk for chunk in pool if chunk != queue[0] and len(chunk) <= room]
        if not leads:  # no prompt can hold it together with another
            queue.pop(0)
            continue
        group = _taken(queue, draw.choice(leads), limit)
        prompts.append(PromptLayout.of_chunks(prefix, group, ()))
    return prompts


def _taken(queue: list[Tokens], lead: Tokens, limit: int) -> list[Tokens]:
    """A prompt's chunks: `lead`, the first of the queue, and those after it that fit; they leave the queue."""
    group = [lead, queue.pop(0)]
    tokens = sum(map(len, group))
    for chunk in tuple(queue):
        if len(group) == GROUP:
            break
        if chunk not in group and tokens + len(chunk) <= limit:
            queue.remove(chunk)
            group.append(chunk)
            tokens += len(chunk)
    return group


def _places(prompts: Sequence[PromptLayout], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Features, group and turn of every row behind a first chunk; see `LayerRows`."""
    group = _groups(prompts)
    turns = Counter[Tokens]()
    numbers: list[tuple[int, int]] = []
    for chunk in _chunks_behind(prompts):
        numbers += [(group[chunk], turns[chunk])] * len(chunk)
        turns[chunk] += 1
    columns = torch.tensor(numbers, device=device).T
    features = torch.cat([position_features(prompt, _rows_behind(prompt, device)) for prompt in prompts])
    return features, columns[0], columns[1]


def _chunks_behind(prompts: Sequence[PromptLayout]) -> list[Tokens]:
    """The chunks of the prompts but the first of each."""
    return [chunk for prompt in prompts for chunk in prompt.chunks[1:]]


def _groups(prompts: Sequence[PromptLayout]) -> dict[Tokens, int]:
    """A group for every chunk that stands behind another; as equal as whole chunks allow."""
    sizes = Counter[Tokens]()
    for chunk in _chunks_behind(prompts):
        sizes[chunk] += len(chunk)
    filled = [0] * min(GROUPS, len(sizes))
    group = {}
    for chunk, size in sizes.most_common():
        group[chunk] = filled.index(min(filled))
        filled[group[chunk]] += size
    return group


def _rows_behind(layout: PromptLayout, device: torch.device) -> Tensor:
    """Positions of the rows behind the first chunk."""
    return torch.arange(layout.chunk_spans[1].start, layout.rows, device=device)


def _kv_behind(cache: BlendedCache, layout: PromptLayout) -> Iterator[KV]:
    """The KV of the rows behind the first chunk, layer by layer."""
    for layer in cache.layers:
        keys, values = layer.view()
        rows = _rows_behind(layout, keys.device)
        yield keys[:, :, rows], values[:, :, rows]


def _in_full(encoder: ChunkEncoder, layout: PromptLayout, unfinished: UnfinishedFit) -> list[KV]:
    """The same of a prompt that is computed in one piece, now or before the fit was interrupted."""
    rows = unfinished.read(layout)
    if rows is None:
        begin = time.perf_counter()
        rows = list(_kv_behind(_together(encoder, layout), layout))
        unfinished.keep(layout, rows, time.perf_counter() - begin)
    return rows


def _together(encoder: ChunkEncoder, layout: PromptLayout) -> BlendedCache:
    """A prompt's KV computed in one piece."""
    decoder = encoder.decoder
    start = len(layout.prefix)
    cache = assemble(decoder, layout, encoder.prefix, [None] * len(layout.chunks)).cache
    ids = torch.tensor([layout.token_ids[start:]], device=decoder.device)
    decoder.encode_rows(ids, start, cache)
    return cache


def neutral_correction(rotations: Sequence[LayerRotation]) -> KVCorrection:
    """As wide and of the rank that fitting gives, in every layer but the first; it predicts no gain anywhere."""
    maps = [_neutral_layer(rotation) if rotation.width else None for rotation in rotations[1:]]
    return KVCorrection((None, *maps), before=1 << 20, length=1 << 20)


def _neutral_layer(rotation: LayerRotation) -> LayerCorrection:
    width = rotation.width
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(width + POSITION_FEATURES, RANK, generator=generator) / width**0.5
    return LayerCorrection(
        centre=torch.zeros(width),
        scale=torch.ones(width),
        down=down,
        up=torch.zeros(RANK, width),
        gauge=down.clone(),
        bounds=Bounds(reach=1e6, keys=1.0, values=1.0),
        keys=math.prod(rotation.key_shape),
    )
