"""What rows gain by the map of a layer, in two ways: as it is added to KV, and by the formula."""

import torch

from blend.chunks.correction import PLACE_FEATURES, ROW_FEATURES, KVCorrection, LayerCorrection, row_features, shares
from blend.chunks.gain import StackedMaps

# The number in its chunk of a row so far from the start that of what follows from it the constant is left.
FAR = 1 << 20


def gained(
    part: LayerCorrection, rows: torch.Tensor, features: torch.Tensor, local: torch.Tensor | None = None
) -> torch.Tensor:
    """`[rows, inputs]`, of one head of keys and one of values, by what is added to them.

    local: numbers of the rows in their chunks, by default far from the start; `features` must be theirs.
    """
    local = torch.full((rows.shape[0],), FAR) if local is None else local
    assert torch.equal(features[:, ROW_FEATURES], row_features(local))
    maps = StackedMaps(KVCorrection((part,), before=1, length=2 * FAR))
    row_part = maps.row_part(0, rows[None, :, : part.keys], rows[None, :, part.keys :], local)
    return (maps.hidden(slice(1), row_part[None], features[:, PLACE_FEATURES]) @ maps.up[0])[0]


def by_formula(part: LayerCorrection, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The same from centred and scaled rows, with nothing folded into the factors."""
    x = torch.cat(((rows - part.centre) / part.scale, features), dim=1)
    gain = x @ part.down @ part.up
    norms = [gain[:, : part.keys].norm(dim=1), gain[:, part.keys :].norm(dim=1)]
    return gain * shares((x @ part.gauge).norm(dim=1) / part.bounds.reach, norms, part.bounds[1:])[:, None]
