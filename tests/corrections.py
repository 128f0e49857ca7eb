"""What rows gain by the map of a layer, in two ways: as it is added to KV, and by the formula."""

import torch

from blend.chunks.correction import LayerCorrection, shares


def gained(part: LayerCorrection, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`[rows, inputs]`, of one head of keys and one of values, by what is added to them."""
    after = rows.clone()
    part.add(after[None, :, : part.keys], after[None, :, part.keys :], features)
    return after - rows


def by_formula(part: LayerCorrection, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The same from centred and scaled rows, with nothing folded into the factors."""
    x = torch.cat(((rows - part.centre) / part.scale, features), dim=1)
    gain = x @ part.down @ part.up
    norms = [gain[:, : part.keys].norm(dim=1), gain[:, part.keys :].norm(dim=1)]
    return gain * shares((x @ part.gauge).norm(dim=1) / part.bounds.reach, norms, part.bounds[1:])[:, None]
