"""Fit KV corrections (`blend.chunks.correction`) on a few prompts made of the user's own chunks.

A prompt of chunks is prefilled in full once; the map predicts what its rows gain over their stored KV. The first chunk of a
prompt is exact and shows nothing, so every chunk of a small corpus stands behind another in one of the prompts.

Each layer is fitted by ridge regression, reduced to the `RANK` directions that predict most (reduced-rank regression,
Izenman 1975), and judged on held-out rows in two ways. Whole chunks: no row of a chunk is on both sides, and no group of chunks
may become much worse. And prompts with the same chunks in another context, as a small corpus will produce them. Sums and
solutions run in float64 on the rows themselves, so no error is a difference of large moments.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.assemble import assemble
from blend.chunks.correction import (
    CORRECTED,
    POSITION_FEATURES,
    Bounds,
    KVCorrection,
    LayerCorrection,
    StoredCorrections,
    position_features,
    rows_of,
    shares,
)
from blend.chunks.library import ChunkLibrary
from blend.model import cpu
from blend.types import CacheKind, Progress, PromptLayout, Tokens, no_progress

if TYPE_CHECKING:
    from blend.chunks.encode import ChunkEncoder
    from blend.model.cache import BlendedCache
    from blend.model.decoder import RowDecoder


RANK = 32
GROUPS = 4  # of chunks; each is predicted from the others
JUDGED = 128  # rows of a group at most that are predicted
WIDEST = 2048  # wider KV is sketched to this many inputs before the regression
PENALTIES = (0.01, 0.1, 1.0, 10.0)
POSITION_PENALTY = 1e-3
LEAST_SCALE = 0.05  # of the typical spread: an input that hardly varied must not count for more later
NOISE = 0.1  # variance, of 1, that every direction of the inputs has at least when distances are measured
NO_HARM = 1.1  # times the error of no map, the most that any group of unseen chunks may have


GROUP = 8  # chunks of a calibration prompt
PROMPT_TOKENS = 2560  # its tokens at most, unless two chunks are longer
TOKENS = 8_000  # of all calibration prompts, if the chunks have as many
MOST_PROMPTS = 32


def calibrate(
    stored: StoredCorrections,
    library: ChunkLibrary,
    chunks: Sequence[Tokens],
    *,
    anew: bool = False,
    progress: Progress = no_progress,
) -> bool:
    """Measure and store the KV corrections behind the library's prefix; see `Blender.calibrate`."""
    kinds = CORRECTED if library.contextual else CORRECTED[:1]
    if not anew and all(stored.held(library, kind).map for kind in kinds):
        return True
    fits = fit_corrections(library, chunks, kinds, progress)
    names = [library.encoder(kind).identity.correction_name for kind in kinds]
    _store(library, dict(zip(names, fits, strict=True)), anew=anew)
    return any(stored.held(library.renewed(), kind).map for kind in kinds)


def _store(library: ChunkLibrary, fits: Mapping[str, KVCorrection | None], *, anew: bool) -> None:
    """Store the fits by their names, unless another process chose another surrogate context meanwhile.

    The store's generation does not show this, because every corpus and every correction changes it.
    """
    if not (anew or any(fits.values())):
        return
    with library.store.writing():
        if library.reread().surrogate != library.surrogate:
            return
        for name, found in fits.items():
            if found is not None:
                library.store.write_artifact(name, found.to_bytes())
            elif anew:  # one of other chunks must not stay
                library.store.delete_artifact(name)


def fit_corrections(
    library: ChunkLibrary, chunks: Sequence[Sequence[int]], kinds: Sequence[CacheKind], progress: Progress = no_progress
) -> list[KVCorrection | None]:
    """Fit a map for each kind of caches, on the same prompts made of these chunks.

    None when no prompt of two chunks can be made, or nothing helps. progress: of the stage "calibrate", in tokens. Costs a full
    prefill of every prompt, and holds the KV of all of them in the host's memory meanwhile, in float32, once and once more for
    each kind.
    """
    encoder = library.isolated
    distinct = [tuple(chunk) for chunk in dict.fromkeys(map(tuple, chunks)) if chunk]
    prompts = deal_prompts(encoder, distinct)
    seen = _Seen(encoder.decoder, prompts, len(kinds))
    done, total = 0, sum(prompt.rows for prompt in prompts)
    progress("calibrate", 0, total)
    for layout in prompts:
        held = [seen.flat(_together(encoder, layout), layout)]
        for kind in kinds:
            caches = library.caches(layout.chunks, contextual=kind is CacheKind.CONTEXTUAL)
            held.append(seen.flat(assemble(encoder.decoder, layout, encoder.prefix, caches).cache, layout))
        seen.add(held)
        done += layout.rows
        progress("calibrate", done, total)
    together = {key.chunk for key in library.variants(distinct) if key.kind is CacheKind.CONTEXTUAL}
    eligible = [together if kind is CacheKind.CONTEXTUAL else set(distinct) for kind in kinds]
    return [seen.solve(number, some) for number, some in enumerate(eligible, 1)]


class _Seen:
    """The rows behind the first chunks of the calibration prompts, layer by layer: in full prefill and by each kind of caches.

    They are some gigabytes with a large decoder, so they lie in the host's memory, and go back to the system all at once.
    """

    def __init__(self, decoder: RowDecoder, prompts: Sequence[PromptLayout], kinds: int) -> None:
        self._decoder, self._prompts = decoder, prompts
        self._held: list[list[list[torch.Tensor]]] = [[[] for _ in decoder.rotations] for _ in range(kinds + 1)]

    def flat(self, cache: BlendedCache, layout: PromptLayout) -> Sequence[torch.Tensor]:
        """A prompt's rows of every layer, positions taken out, fp32 `[rows, inputs]` each."""
        rows = _behind(layout, self._decoder.device)
        pairs = (cache.view(index) for index in range(len(self._decoder.rotations)))
        unrotated = (
            rows_of(k[:, :, rows], v[:, :, rows], turn, rows)
            for (k, v), turn in zip(pairs, self._decoder.rotations, strict=True)
        )
        return cpu.copies([layer.cpu() for layer in unrotated])

    def add(self, found: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take in a prompt: its rows in full prefill, then by each kind of caches."""
        for held, layers in zip(self._held, found, strict=True):
            for parts, rows in zip(held, layers, strict=True):
                parts.append(rows)

    def solve(self, number: int, eligible: Collection[Tokens]) -> KVCorrection | None:
        """The map of the kind with this number, from 1, or None if none helps in any layer.

        eligible: the chunks that have such a cache behind another chunk.
        """
        every = [chunk for prompt in self._prompts for chunk in prompt.chunks[1:]]
        behind = [chunk for chunk in every if chunk in eligible]
        if len(set(behind)) < 2:  # no chunk could be held out
            return None
        device, places = self._decoder.device, _places(self._prompts, self._decoder.device)
        mine = torch.tensor([chunk in eligible for chunk in every for _ in chunk], device=device)
        features, group, turn = (column[mine] for column in places)
        fitted: list[LayerCorrection | None] = [None]  # layer 0 depends on token and position only
        for index, rotation in enumerate(self._decoder.rotations[1:], 1):
            if not rotation.width:  # a layer without KV
                fitted.append(None)
                continue
            both = (torch.cat(self._held[which][index]) for which in (0, number))
            fresh, stored = (rows.to(device)[mine] for rows in both)
            keys, covered = math.prod(rotation.key_shape), len(set(behind)) / len(eligible)
            fitted.append(fit_layer(LayerRows(stored, fresh - stored, features, group, turn, keys, covered)))
        before = max(p.chunk_spans[-1].start - len(p.prefix) for p in self._prompts)
        return KVCorrection(tuple(fitted), before, max(map(len, behind))) if any(fitted) else None


def deal_prompts(encoder: ChunkEncoder, chunks: Sequence[Tokens]) -> list[PromptLayout]:
    """Calibration prompts of these different chunks, the same ones for the same chunks.

    Every chunk stands behind a chunk drawn at random, twice, within `TOKENS` and `MOST_PROMPTS`, if two chunks fit the
    model's context.
    """
    draw, prefix = random.Random(0), encoder.prefix_tokens
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
        prompts.append(PromptLayout.of_chunks(prefix, _taken(queue, draw.choice(leads), limit), ()))
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


def _places(prompts: Sequence[PromptLayout], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, group and turn of every row behind a first chunk; see `LayerRows`."""
    group, turns = _groups(prompts), Counter[Tokens]()
    numbers: list[tuple[int, int]] = []
    for chunk in (chunk for prompt in prompts for chunk in prompt.chunks[1:]):
        numbers += [(group[chunk], turns[chunk])] * len(chunk)
        turns[chunk] += 1
    columns = torch.tensor(numbers, device=device).T
    features = torch.cat([position_features(prompt, _behind(prompt, device)) for prompt in prompts])
    return features, columns[0], columns[1]


def _groups(prompts: Sequence[PromptLayout]) -> dict[Tokens, int]:
    """A group for every chunk that stands behind another; as equal as whole chunks allow."""
    sizes = Counter[Tokens]()
    for chunk in (chunk for prompt in prompts for chunk in prompt.chunks[1:]):
        sizes[chunk] += len(chunk)
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


class LayerRows(NamedTuple):
    """One layer of the calibration prompts' rows behind their first chunks.

    Attributes:
        stored: `[rows, inputs]`, KV as stored, positions taken out.
        gain: `[rows, inputs]`, what full prefill adds to it.
        features: `[rows, POSITION_FEATURES]`.
        group: int64 `[rows]`, the group of the row's chunk.
        turn: int64 `[rows]`, how often the chunk stood behind another before.
        keys: how many of the inputs are keys.
        covered: the share of all chunks that these prompts show.

    """

    stored: torch.Tensor
    gain: torch.Tensor
    features: torch.Tensor
    group: torch.Tensor
    turn: torch.Tensor
    keys: int
    covered: float

    @property
    def parts(self) -> tuple[slice, slice]:
        """Where the keys and the values lie among the inputs."""
        return slice(0, self.keys), slice(self.keys, None)


def fit_layer(seen: LayerRows) -> LayerCorrection | None:
    """The map of these rows, of at least two groups, or None if none predicts held-out rows.

    Keys and values each have their best penalty.
    """
    design = _Design.of(seen)
    x, y = torch.cat((design.inputs(seen.stored), seen.features), dim=1).double(), seen.gain.double()
    every = _moments(x, y)
    unseen = [_HeldOut(seen, x, y, every, seen.group == group) for group in sorted(set(seen.group.tolist()))]
    last = int(seen.turn.max())
    again = [_HeldOut(seen, x, y, every, seen.turn == last)] if last else []
    weights = torch.zeros_like(every.xy)
    for index, part in enumerate(seen.parts):
        penalty = _best_penalty(seen, unseen, again, index)
        if penalty is not None:
            weights[:, part] = _ridge(every, penalty, every.xy)[:, part]
    return _reduced(seen, design, x, weights, every) if weights.any() else None


def _best_penalty(seen: LayerRows, unseen: list[_HeldOut], again: list[_HeldOut], part: int) -> float | None:
    """The penalty that best predicts held-out rows; None if none helps, or if it harms a group of unseen chunks.

    Seen chunks count as much as a prompt is likely to consist of them: by the share of all chunks that was covered.
    """
    covered = seen.covered if again else 0.0
    best, least = None, 1.0
    for index, penalty in enumerate(PENALTIES):
        left = [float(one.left[index, part]) for one in unseen]
        combined = (1 - covered) * _mean_left(unseen, index, part) + covered * _mean_left(again, index, part)
        if max(left) <= NO_HARM and combined < least:
            best, least = penalty, combined
    return best


def _mean_left(held: list[_HeldOut], penalty: int, part: int) -> float:
    """The share of the squared gain that is left over all of them."""
    error = sum(float(one.left[penalty, part] * one.nothing[part]) for one in held)
    return error / max(sum(float(one.nothing[part]) for one in held), 1e-300)


class _HeldOut:
    """Rows that are predicted from all others, with the bounds that those set.

    nothing: `[2]`, squared gain of keys and of values. left: `[penalties, 2]`, the share of it that is left.
    """

    def __init__(self, seen: LayerRows, x: torch.Tensor, y: torch.Tensor, every: _Moments, held: torch.Tensor) -> None:
        mine, others = held.nonzero()[:, 0], (~held).nonzero()[:, 0]
        rest = _Moments(*(a - b for a, b in zip(every, _moments(x[mine], y[mine]), strict=True)))
        test, known = _some(mine), _some(others)
        whiten = torch.linalg.cholesky(_covariance(rest))
        distance, reach = (_whitened(whiten, x[rows]).norm(dim=1) for rows in (test, known))
        most = [y[others][:, part].norm(dim=1).max() for part in seen.parts]
        self.nothing = torch.stack([y[test][:, part].square().sum() for part in seen.parts])
        left = []
        for penalty in PENALTIES:
            found = _ridge(rest, penalty, x[test].T).T @ rest.xy
            norms = [found[:, part].norm(dim=1) for part in seen.parts]
            found *= shares(distance / reach.max(), norms, most)[:, None]
            left.append(torch.stack([(found - y[test])[:, part].square().sum() for part in seen.parts]))
        self.left = torch.stack(left) / self.nothing.clamp_min(1e-300)


def _some(rows: torch.Tensor) -> torch.Tensor:
    """At most `JUDGED` of these row numbers, spread evenly."""
    step = max(1, -(-rows.shape[0] // JUDGED))
    return rows[step // 2 :: step]


class _Moments(NamedTuple):
    """rows: how many. xx: X^T X. xy: X^T Y; float64."""

    rows: torch.Tensor
    xx: torch.Tensor
    xy: torch.Tensor


def _moments(x: torch.Tensor, y: torch.Tensor) -> _Moments:
    return _Moments(x.new_tensor(x.shape[0]), x.T @ x, x.T @ y)


def _ridge(moments: _Moments, penalty: float, right: torch.Tensor) -> torch.Tensor:
    """(X^T X + penalty n)^-1 right; the position features are hardly penalised."""
    weight = torch.full_like(moments.xx[0], penalty) * moments.rows
    weight[-POSITION_FEATURES:] = POSITION_PENALTY * moments.rows
    solved: torch.Tensor = torch.cholesky_solve(right, torch.linalg.cholesky(moments.xx + weight.diag()))
    return solved


def _covariance(moments: _Moments) -> torch.Tensor:
    """The covariance that measures distance from the rows seen: their second moments, and `NOISE` in every direction."""
    return moments.xx / moments.rows + NOISE * torch.eye(moments.xx.shape[0]).to(moments.xx)


def _whitened(factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows whose norms are Mahalanobis distances, `[rows, inputs]`; factor: Cholesky's of the covariance."""
    whitened: torch.Tensor = torch.linalg.solve_triangular(factor, x.T, upper=False).T
    return whitened


class _Design(NamedTuple):
    """How stored rows become the regression's inputs: standardised, then projected to a basis if that is smaller."""

    centre: torch.Tensor
    scale: torch.Tensor
    basis: torch.Tensor | None

    @classmethod
    def of(cls, seen: LayerRows) -> _Design:
        stored = seen.stored.double()
        centre, spread = stored.mean(0), stored.std(0, correction=0)
        typical = torch.cat([spread[part].square().mean().sqrt().expand_as(spread[part]) for part in seen.parts])
        scale = spread.maximum(LEAST_SCALE * typical) + 1e-6
        rows, width = stored.shape
        # Fewer rows than inputs span a space of their own, and the ridge's answer lies in it: the same fit, solved faster.
        basis = torch.linalg.qr(((stored - centre) / scale).T).Q if rows < width else None
        if basis is None and width > WIDEST:
            basis = _signs(width, WIDEST, stored.device)
        return cls(centre, scale, basis)

    def inputs(self, stored: torch.Tensor) -> torch.Tensor:
        z = self.standardised(stored)
        return z if self.basis is None else z @ self.basis

    def standardised(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored.double() - self.centre) / self.scale

    def on_rows(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights of `inputs` and the features as weights of standardised rows and the features."""
        if self.basis is None:
            return weights
        return torch.cat((self.basis @ weights[:-POSITION_FEATURES], weights[-POSITION_FEATURES:]))

    def gauge(self, whiten: torch.Tensor) -> torch.Tensor:
        """`[width + POSITION_FEATURES, RANK]`; a standardised row's product with it is as long as its distance from those seen.

        whiten: Cholesky's factor of the covariance of `inputs`. What lies outside of the basis is all `NOISE`.
        """
        size, width = whiten.shape[0], self.centre.shape[0]
        inside = torch.linalg.solve_triangular(whiten.T, _signs(size, RANK, whiten.device), upper=True)
        gauge = self.on_rows(inside)
        if self.basis is not None and self.basis.shape[1] < min(width, WIDEST):
            outside = _signs(width + size, RANK, whiten.device)[size:]
            gauge[:width] += (outside - self.basis @ (self.basis.T @ outside)) / NOISE**0.5
        return gauge


def _reduced(
    seen: LayerRows, design: _Design, x: torch.Tensor, weights: torch.Tensor, every: _Moments
) -> LayerCorrection | None:
    """The map nearest to X @ weights in `RANK` directions, keys and values weighing the same, with its bounds."""
    predicted = weights.T @ every.xx @ weights
    scale = torch.ones_like(predicted[0])
    for part in seen.parts:
        scale[part] = predicted.diagonal()[part].sum().sqrt().clamp_min(1e-20)
    sizes, vectors = torch.linalg.eigh(predicted / scale[:, None] / scale)
    best = vectors[:, -RANK:][:, sizes[-RANK:] > 1e-9 * sizes[-1]]
    down, up = design.on_rows((weights / scale) @ best), best.T * scale
    gauge = design.gauge(torch.linalg.cholesky(_covariance(every)))
    known = torch.cat((design.standardised(seen.stored), seen.features), dim=1)
    most = [seen.gain[:, part].double().norm(dim=1).max() for part in seen.parts]
    bounds = Bounds(float((known @ gauge).norm(dim=1).max()), float(most[0]), float(most[1]))
    centre, scale = design.centre.float(), design.scale.float()
    down, up, gauge = (factor.float().contiguous() for factor in (down, up, gauge))
    return LayerCorrection(centre, scale, down, up, gauge, bounds, seen.keys)


def _signs(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Random signs `[rows, columns]` that keep distances (Johnson-Lindenstrauss; Achlioptas 2003)."""
    signs = torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(0)).to(device)
    sketch: torch.Tensor = (2.0 * signs.double() - 1.0) / columns**0.5
    return sketch
