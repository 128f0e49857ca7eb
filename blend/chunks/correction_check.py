"""Whether the KV correction predicts a prompt at hand: the rows that are recomputed show it for nothing.

The map was judged on chunks of the corpus before; a prompt may still be unlike them. Every recomputed row that held
stored KV has fresh KV in every layer, to be compared with what was stored and with what the map made of it. Which rows
are recomputed is no fair sample: the first of every chunk always are. So each of them speaks for the rows of its chunk
that are nearest to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from blend.chunks.correction import Added, rows_of

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.row_decoder import RowDecoder
    from blend.types import PromptLayout

_Many = TypeVar("_Many", torch.Tensor, list[int])
MOST_ROWS = 64  # compared in a layer
MOST_LAYERS = 12  # compared of a map


class CorrectionCheck:
    """Compares while a prompt's rows are recomputed; pass `see` to `BlendedCache.watched`.

    added: what the maps did to the prompt.
    """

    def __init__(self, decoder: RowDecoder, layout: PromptLayout, added: Sequence[Added]) -> None:
        self._decoder, self._layout, self._added = decoder, layout, added
        self._scores: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # behind the first chunk, and of it
        self._first = [int(one.rows[0]) < layout.chunk_spans[0].stop for one in added]
        self._sampled: tuple[torch.Tensor | None, list[_Sample]] = (None, [])
        self._layers = [_spread([i for i, part in enumerate(one.map.layers) if part], MOST_LAYERS) for one in added]

    def see(
        self, index: int, positions: torch.Tensor, cache: BlendedCache, fresh: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Take in a layer's fresh KV `[1, kv_heads, rows, head_dim]` at `positions`, before it is written over the old."""
        if not any(index in layers for layers in self._layers):
            return
        of_maps = zip(self._added, self._first, self._layers, self._samples(positions), strict=True)
        for added, first, layers, sample in of_maps:
            part, hidden = added.map.layers[index], added.hidden(index)
            if part is None or hidden is None or index not in layers or sample.rows.shape[0] == 0:
                continue
            keys, values = (
                new[:, :, sample.here] - old[:, :, sample.rows]
                for new, old in zip(fresh, cache.view(index), strict=True)
            )
            left = rows_of(keys, values, self._decoder.rotations[index], sample.rows)
            gain = hidden[sample.there] @ part.up
            self._scores[first].extend(
                _score(left[:, mine], gain[:, mine], sample.weight)
                for mine in (slice(0, part.keys), slice(part.keys, None))
            )

    def _samples(self, positions: torch.Tensor) -> list[_Sample]:
        """For each map, which of these positions it added to; the same for most layers."""
        if self._sampled[0] is not positions:
            self._sampled = (positions, [_Sample.of(self._layout, positions, added.rows) for added in self._added])
        return self._sampled[1]

    def score(self) -> float:
        """From -1, everything further from the truth for the map, to 1, everything there; 0 where nothing could be seen.

        Keys and values and all layers count alike. The first chunk is judged apart, by a map of its own that does well or ill
        whatever the others do, and the worse of both counts.
        """
        return min((float(torch.stack(some).nanmean().nan_to_num()) for some in self._scores if some), default=0.0)


def _score(left: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Squared distances from fresh of stored less those of mapped, over both together; left: fresh less mapped.

    Nan for a part that the map leaves alone: it says nothing. Rows are not judged one by one, because many gain nothing (those
    further from their chunk's start than a window), and what little is added to them does no harm.
    """
    mapped, stored = left.square().sum(1) @ weight, (left + gain).square().sum(1) @ weight
    return torch.where((gain != 0).any(), (stored - mapped) / (stored + mapped).clamp_min(1e-20), torch.nan)


class _Sample(NamedTuple):
    """Recomputed rows that a map added to.

    rows: their positions. here, there: indices of them among the recomputed, and among those the map added to. weight: for how
    many rows each speaks, fp32.
    """

    rows: torch.Tensor
    here: torch.Tensor
    there: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, layout: PromptLayout, recomputed: torch.Tensor, added: torch.Tensor) -> _Sample:
        """Both sorted int64 positions."""
        at = torch.searchsorted(added, recomputed).clamp_max(added.shape[0] - 1)
        here = _spread((added[at] == recomputed).nonzero()[:, 0], MOST_ROWS)
        rows = recomputed[here]
        return cls(rows, here, at[here], _nearest(layout, rows))


def _spread(many: _Many, most: int) -> _Many:
    """At most so many of them, at even distances."""
    return many[:: max(1, -(-len(many) // most))]


def _nearest(layout: PromptLayout, rows: torch.Tensor) -> torch.Tensor:
    """How many rows of its chunk are nearest to each of these sorted context rows, fp32 `[rows]`."""
    if rows.shape[0] == 0:
        return rows.float()
    first = layout.chunk_starts(rows).float()
    stops = rows.new_tensor([span.stop for span in layout.chunk_spans])
    last = stops[torch.bucketize(rows, stops, right=True)].float()
    middle, same = (rows[1:] + rows[:-1] + 1) / 2, first[1:] == first[:-1]
    below = torch.cat((first[:1], torch.where(same, middle, first[1:])))
    return torch.cat((torch.where(same, middle, last[:-1]), last[-1:])) - below
