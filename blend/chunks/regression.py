"""Fitting the KV correction of one layer: ridge regression, judged on rows that it has not seen.

The map has the rank `RANK`: of the fitted regression the directions that predict most (reduced-rank regression,
Izenman 1975). Rows are held out in two ways. Whole chunks: no row of a chunk is on both sides, and no group of them
may be predicted much worse than by nothing, with the bounds that the map will have. And prompts with the same chunks
in another context, because that is what a corpus small enough to be fitted whole will ask for. Everything that sums,
solves or subtracts runs in float64, and the rows themselves are kept, so that no error is a difference of large
moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from blend.chunks.correction import POSITION_FEATURES, Bounds, LayerCorrection, shares

RANK = 32
GROUPS = 4  # of chunks; each is predicted from the others
JUDGED = 128  # rows of a group at most that are predicted
WIDEST = 2048  # wider KV is sketched to this many inputs before the regression
PENALTIES = (0.01, 0.1, 1.0, 10.0)
POSITION_PENALTY = 1e-3
LEAST_SCALE = (
    0.05  # of the typical spread: an input that hardly varied among the rows seen must not count for more later
)
NOISE = 0.1  # variance, of 1, that any direction of the inputs is taken to have when distances are measured
NO_HARM = 1.1  # times the error of no map, the most that any group of unseen chunks may have


class RowPlaces(NamedTuple):
    """Where rows of calibration prompts stand.

    features: `[rows, POSITION_FEATURES]`. group, turn: int64 `[rows]`, the group of the row's chunk, and how often the chunk
    stood behind another before.
    """

    features: torch.Tensor
    group: torch.Tensor
    turn: torch.Tensor

    def at(self, mask: torch.Tensor) -> RowPlaces:
        """Of these rows only."""
        return RowPlaces(self.features[mask], self.group[mask], self.turn[mask])


class LayerRows(NamedTuple):
    """What one layer shows of the calibration prompts' rows behind their first chunks.

    stored, gain: `[rows, inputs]`, KV as stored (positions taken out) and what full prefill adds. keys: how many of the inputs
    are keys. covered: what share of the chunks there are these prompts show.
    """

    stored: torch.Tensor
    gain: torch.Tensor
    places: RowPlaces
    keys: int
    covered: float

    @property
    def parts(self) -> tuple[slice, slice]:
        """Where the keys and the values lie among the inputs."""
        return slice(0, self.keys), slice(self.keys, None)


def fit_layer(seen: LayerRows) -> LayerCorrection | None:
    """The map of these rows, of two groups at least, or None where none predicts rows held out.

    Keys and values have each its own penalty, the one that does best.
    """
    design = _Design.of(seen)
    x, y = torch.cat((design.inputs(seen.stored), seen.places.features), dim=1).double(), seen.gain.double()
    every = _moments(x, y)
    unseen = [
        _HeldOut(seen, x, y, every, seen.places.group == group) for group in sorted(set(seen.places.group.tolist()))
    ]
    last = int(seen.places.turn.max())
    again = [_HeldOut(seen, x, y, every, seen.places.turn == last)] if last else []
    weights = torch.zeros_like(every.xy)
    for index, part in enumerate(seen.parts):
        penalty = _best_penalty(seen, unseen, again, index)
        if penalty is not None:
            weights[:, part] = _ridge(every, penalty, every.xy)[:, part]
    return _reduced(seen, design, x, weights, every) if weights.any() else None


def _best_penalty(seen: LayerRows, unseen: list[_HeldOut], again: list[_HeldOut], part: int) -> float | None:
    """The penalty that predicts best what is held out, or None where none helps, or harms a group of unseen chunks.

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
    """By which a row's distance from the rows seen is measured: their second moments, and `NOISE` in every direction."""
    return moments.xx / moments.rows + NOISE * torch.eye(moments.xx.shape[0]).to(moments.xx)


def _whitened(factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows whose norms are Mahalanobis distances, `[rows, inputs]`; factor: Cholesky's of the covariance."""
    whitened: torch.Tensor = torch.linalg.solve_triangular(factor, x.T, upper=False).T
    return whitened


class _Design(NamedTuple):
    """How stored rows become the regression's inputs: standardised, then taken to a basis where that is smaller."""

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
    """The map of what is nearest to X @ weights in `RANK` directions, keys and values counting alike, with its bounds."""
    predicted = weights.T @ every.xx @ weights
    scale = torch.ones_like(predicted[0])
    for part in seen.parts:
        scale[part] = predicted.diagonal()[part].sum().sqrt().clamp_min(1e-20)
    sizes, vectors = torch.linalg.eigh(predicted / scale[:, None] / scale)
    best = vectors[:, -RANK:][:, sizes[-RANK:] > 1e-9 * sizes[-1]]
    down, up = design.on_rows((weights / scale) @ best), best.T * scale
    gauge = design.gauge(torch.linalg.cholesky(_covariance(every)))
    known = torch.cat((design.standardised(seen.stored), seen.places.features), dim=1)
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
