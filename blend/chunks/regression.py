"""Fit the map of one layer of a KV correction (`blend.chunks.correction`), and judge it on rows that were held out.

Each layer is fitted by ridge regression, reduced to the `RANK` directions that predict most (reduced-rank regression,
Izenman 1975), and judged in two ways. Whole chunks: no row of a chunk is on both sides, and no group of chunks may become much
worse. And prompts with the same chunks in another context, as a small corpus will produce them. Sums and solutions run in
float64 on the rows themselves, so no error is a difference of large moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blend.chunks.correction import POSITION_FEATURES, Bounds, LayerCorrection, shares

RANK = 32
JUDGED = 128  # rows of a group at most that are predicted
WIDEST = 2048  # wider KV is sketched to this many inputs before the regression
PENALTIES = (0.01, 0.1, 1.0, 10.0)
POSITION_PENALTY = 1e-3
LEAST_SCALE = 0.05  # of the typical spread: an input that hardly varied must not count for more later
NOISE = 0.1  # variance, of 1, that every direction of the inputs has at least when distances are measured
NO_HARM = 1.1  # times the error of no map, the most that any group of unseen chunks may have


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

    stored: Tensor
    gain: Tensor
    features: Tensor
    group: Tensor
    turn: Tensor
    keys: int
    covered: float

    @property
    def parts(self) -> tuple[slice, slice]:
        """Where the keys and the values lie among the inputs."""
        return slice(0, self.keys), slice(self.keys, None)

    def apart(self, states: Tensor) -> list[Tensor]:
        """Views of the keys and of the values of `[rows, inputs]`."""
        return [states[:, part] for part in self.parts]


def fit_layer(rows: LayerRows) -> LayerCorrection | None:
    """The map of these rows, of at least two groups, or None if none predicts held-out rows.

    Keys and values each have their best penalty.
    """
    design = _Design.of(rows)
    inputs = design.inputs(rows.stored)
    x = torch.cat((inputs, rows.features), dim=1).double()
    y = rows.gain.double()
    moments = _Moments.of(x, y)
    groups = sorted(set(rows.group.tolist()))
    unseen = [_HeldOut(rows, x, y, moments, rows.group == group) for group in groups]
    again = []
    last_turn = int(rows.turn.max())
    if last_turn:
        again.append(_HeldOut(rows, x, y, moments, rows.turn == last_turn))
    weights = torch.zeros_like(moments.xy)
    for index, part in enumerate(rows.parts):
        penalty = _best_penalty(unseen, again, rows.covered, index)
        if penalty is not None:
            weights[:, part] = moments.ridge(penalty, moments.xy)[:, part]
    return _reduced(rows, design, weights, moments) if weights.any() else None


def _best_penalty(unseen: list[_HeldOut], again: list[_HeldOut], covered: float, part: int) -> float | None:
    """The penalty that best predicts held-out rows; None if none helps, or if it harms a group of unseen chunks.

    Seen chunks count as much as a prompt is likely to consist of them: by the share of all chunks that was covered.
    """
    share = covered if again else 0.0
    best = None
    least = 1.0
    for index, penalty in enumerate(PENALTIES):
        worst = max(float(fold.errors[index, part]) for fold in unseen)
        error_unseen = _mean_error(unseen, index, part)
        error_again = _mean_error(again, index, part)
        error = (1 - share) * error_unseen + share * error_again
        if worst <= NO_HARM and error < least:
            best = penalty
            least = error
    return best


def _mean_error(folds: list[_HeldOut], penalty: int, part: int) -> float:
    """The share of the squared gain that is left over all folds."""
    error = 0.0
    gain = 0.0
    for fold in folds:
        error += float(fold.errors[penalty, part] * fold.gains[part])
        gain += float(fold.gains[part])
    return error / max(gain, 1e-300)


class _HeldOut:
    """Rows that are predicted from all others, with the bounds that those set.

    Attributes:
        gains: `[2]`, squared gain of keys and of values.
        errors: `[penalties, 2]`, the share of it that is left.

    """

    def __init__(self, rows: LayerRows, x: Tensor, y: Tensor, moments: _Moments, is_test: Tensor) -> None:
        test_rows = is_test.nonzero()[:, 0]
        train_rows = (~is_test).nonzero()[:, 0]
        train = moments.without(_Moments.of(x[test_rows], y[test_rows]))
        judged = _thinned(test_rows)
        whiten = torch.linalg.cholesky(train.covariance())
        sample = x[_thinned(train_rows)]
        reach = _whitened(whiten, sample).norm(dim=1).max()
        distance = _whitened(whiten, x[judged]).norm(dim=1)
        most = [gains.norm(dim=1).max() for gains in rows.apart(y[train_rows])]
        expected = y[judged]
        self.gains = _squares(rows.apart(expected))
        errors = []
        for penalty in PENALTIES:
            predicted = train.ridge(penalty, x[judged].T).T @ train.xy
            norms = [gains.norm(dim=1) for gains in rows.apart(predicted)]
            predicted *= shares(distance / reach, norms, most)[:, None]
            misses = rows.apart(predicted - expected)
            errors.append(_squares(misses))
        self.errors = torch.stack(errors) / self.gains.clamp_min(1e-300)


def _squares(parts: list[Tensor]) -> Tensor:
    """The sum of the squares of keys and of values, `[2]`."""
    return torch.stack([part.square().sum() for part in parts])


def _thinned(rows: Tensor) -> Tensor:
    """At most `JUDGED` of these row numbers, spread evenly."""
    step = max(1, -(-rows.shape[0] // JUDGED))
    return rows[step // 2 :: step]


class _Moments(NamedTuple):
    """Sums over rows, float64. size: how many rows. xx: X^T X. xy: X^T Y."""

    size: Tensor
    xx: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> _Moments:
        size = x.new_tensor(x.shape[0])
        return cls(size, x.T @ x, x.T @ y)

    def without(self, part: _Moments) -> _Moments:
        """The moments of the other rows."""
        size = self.size - part.size
        return _Moments(size, self.xx - part.xx, self.xy - part.xy)

    def ridge(self, penalty: float, right: Tensor) -> Tensor:
        """(X^T X + penalty n)^-1 right; the position features are hardly penalised."""
        weight = torch.full_like(self.xx[0], penalty) * self.size
        weight[-POSITION_FEATURES:] = POSITION_PENALTY * self.size
        factor = torch.linalg.cholesky(self.xx + weight.diag())
        solved: Tensor = torch.cholesky_solve(right, factor)
        return solved

    def covariance(self) -> Tensor:
        """The covariance that measures distance from the rows: their second moments, and `NOISE` in every direction."""
        identity = torch.eye(len(self.xx)).to(self.xx)
        return self.xx / self.size + NOISE * identity


def _whitened(factor: Tensor, x: Tensor) -> Tensor:
    """Rows whose norms are Mahalanobis distances, `[rows, inputs]`; factor: Cholesky's of the covariance."""
    solved: Tensor = torch.linalg.solve_triangular(factor, x.T, upper=False)
    return solved.T


class _Design(NamedTuple):
    """How stored rows become the regression's inputs: standardised, then sketched if they are wide."""

    centre: Tensor
    scale: Tensor
    basis: Tensor | None

    @classmethod
    def of(cls, rows: LayerRows) -> _Design:
        stored = rows.stored.double()
        centre = stored.mean(0)
        spread = stored.std(0, correction=0)
        typical = torch.empty_like(spread)
        for part in rows.parts:
            typical[part] = spread[part].square().mean().sqrt()
        scale = spread.maximum(LEAST_SCALE * typical) + 1e-6
        width = stored.shape[1]
        basis = _signs(width, WIDEST, stored.device) if width > WIDEST else None
        return cls(centre, scale, basis)

    def inputs(self, stored: Tensor) -> Tensor:
        standardised = self.standardised(stored)
        return standardised if self.basis is None else standardised @ self.basis

    def standardised(self, stored: Tensor) -> Tensor:
        return (stored.double() - self.centre) / self.scale

    def on_rows(self, weights: Tensor) -> Tensor:
        """Weights of `inputs` and the features as weights of standardised rows and the features."""
        if self.basis is None:
            return weights
        of_inputs = weights[:-POSITION_FEATURES]
        of_features = weights[-POSITION_FEATURES:]
        return torch.cat((self.basis @ of_inputs, of_features))

    def gauge(self, whiten: Tensor) -> Tensor:
        """`[width + POSITION_FEATURES, RANK]`; a standardised row's product with it is as long as its distance from those seen.

        whiten: Cholesky's factor of the covariance of `inputs`.
        """
        signs = _signs(whiten.shape[0], RANK, whiten.device)
        return self.on_rows(torch.linalg.solve_triangular(whiten.T, signs, upper=True))


def _reduced(rows: LayerRows, design: _Design, weights: Tensor, moments: _Moments) -> LayerCorrection:
    """The map nearest to X @ weights in `RANK` directions, keys and values weighing the same, with its bounds."""
    predicted = weights.T @ moments.xx @ weights
    weighing = torch.ones_like(predicted[0])
    for part in rows.parts:
        explained = predicted.diagonal()[part].sum()
        weighing[part] = explained.sqrt().clamp_min(1e-20)
    sizes, vectors = torch.linalg.eigh(predicted / weighing[:, None] / weighing)
    is_large = sizes[-RANK:] > 1e-9 * sizes[-1]
    best = vectors[:, -RANK:][:, is_large]
    down = design.on_rows((weights / weighing) @ best)
    up = best.T * weighing
    whiten = torch.linalg.cholesky(moments.covariance())
    gauge = design.gauge(whiten)
    stored = design.standardised(rows.stored)
    standardised = torch.cat((stored, rows.features), dim=1)
    most = [gains.norm(dim=1).max() for gains in rows.apart(rows.gain.double())]
    bounds = Bounds(reach=float((standardised @ gauge).norm(dim=1).max()), keys=float(most[0]), values=float(most[1]))
    return LayerCorrection(
        centre=design.centre.float(),
        scale=design.scale.float(),
        down=down.float().contiguous(),
        up=up.float().contiguous(),
        gauge=gauge.float().contiguous(),
        bounds=bounds,
        keys=rows.keys,
    )


def _signs(rows: int, columns: int, device: torch.device) -> Tensor:
    """Random signs `[rows, columns]` that keep distances (Johnson-Lindenstrauss; Achlioptas 2003)."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (rows, columns), generator=generator)
    signs = 2.0 * bits.to(device).double() - 1.0
    sketch: Tensor = signs / columns**0.5
    return sketch
