"""Whether the KV correction predicts a prompt at hand: the rows that are recomputed show it for nothing.

The map was judged on chunks of the corpus before; a prompt may still be unlike them. Every recomputed row that held stored KV
has fresh KV in every layer, to be compared with what was stored and with what the map made of it. Rows count alike, whatever
the size of their difference, and so do layers: the first rows of chunks, which are recomputed more often than others and differ
most, must not speak for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blend.chunks.correction import Added, rows_of

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder


class CorrectionCheck:
    """Compares while a prompt's rows are recomputed; pass `see` to `BlendedCache.watched`.

    added: what the maps did to the prompt.
    """

    def __init__(self, decoder: Decoder, added: Sequence[Added]) -> None:
        self._decoder, self._added = decoder, added
        self._scores: list[torch.Tensor] = []
        self._found: tuple[torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]] = (None, [])

    def see(
        self, index: int, positions: torch.Tensor, cache: BlendedCache, fresh: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Take in a layer's fresh KV `[1, kv_heads, rows, head_dim]` at `positions`, before it is written over the old."""
        for added, (here, there) in zip(self._added, self._places(positions), strict=True):
            part, hidden = added.map.layers[index], added.hidden[index]
            if part is None or hidden is None or here.shape[0] == 0:
                continue
            rows = positions[here]
            keys, values = (
                new[:, :, here] - old[:, :, rows] for new, old in zip(fresh, cache.view(index), strict=True)
            )
            left = rows_of(keys, values, self._decoder.rotations[index], rows)
            gain = hidden[there] @ part.up
            for mine in (slice(0, part.keys), slice(part.keys, None)):
                with_map, without = (x[:, mine].square().sum(1) for x in (left, left + gain))
                score = (without - with_map) / (without + with_map).clamp_min(1e-20)
                # A part that the map leaves alone says nothing.
                self._scores.append(torch.where((gain[:, mine] != 0).any(), score.mean(), torch.nan))

    def _places(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each map, which of these positions it added to, and where it holds them; the same for most layers."""
        if self._found[0] is not positions:
            self._found = (positions, [_common(positions, added.rows) for added in self._added])
        return self._found[1]

    def score(self) -> float:
        """From -1, everything further from the truth for the map, to 1, everything there; 0 where nothing could be seen."""
        return float(torch.stack(self._scores).nanmean().nan_to_num()) if self._scores else 0.0


def _common(positions: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into both, sorted, of what they have in common."""
    at = torch.searchsorted(rows, positions).clamp_max(rows.shape[0] - 1)
    here = (rows[at] == positions).nonzero()[:, 0]
    return here, at[here]
