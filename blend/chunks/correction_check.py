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
    from blend.model.decoder import RowDecoder
    from blend.types import PromptLayout

_Many = TypeVar("_Many", torch.Tensor, list[int])
MOST_ROWS = 64  # compared in a layer
MOST_LAYERS = 12  # compared of a map


class CorrectionCheck:
    """Compares while a prompt's rows are recomputed; pass `see` to `BlendedCache.watched`, and `choose` to `recompute`.

    The sample and its weights are those of all chosen rows. Distances are summed over the pieces in which these are computed,
    in float64, and divided once: the score does not depend on how the rows were cut.
    added: what the maps did to the prompt.
    """

    def __init__(self, decoder: RowDecoder, layout: PromptLayout, added: Sequence[Added]) -> None:
        self._decoder, self._layout, self._added = decoder, layout, added
        self._first = [int(one.rows[0]) < layout.chunk_spans[0].stop for one in added]
        self._layers = [_spread([i for i, part in enumerate(one.map.layers) if part], MOST_LAYERS) for one in added]
        self._samples: list[_Sample] = []
        self._piece: _Piece | None = None
        depth = len(decoder.layers)
        self._until = [-1] * depth  # the last position that each layer has seen
        # Behind the first chunk and of it; layers; keys and values; squared norms, see `_norms`.
        self._sums = torch.zeros((2, depth, 2, 3), dtype=torch.float64, device=decoder.device)

    def choose(self, rows: torch.Tensor) -> None:
        """All rows that are computed from here on, sorted positions `[rows]`; each layer then shows them to `see`."""
        self._samples = [_Sample.of(self._layout, rows, added.rows) for added in self._added]
        self._piece = None

    def see(
        self, index: int, positions: torch.Tensor, cache: BlendedCache, fresh: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Take in a layer's fresh KV `[1, kv_heads, rows, head_dim]` at `positions`, before it is written over the old.

        Pieces come in ascending order. What a layer writes twice, as the last one does with a piece's last row, counts once.
        """
        if not self._samples or not any(index in layers for layers in self._layers):
            return
        piece = self._piece_at(positions)
        if piece.last <= self._until[index]:
            return
        self._until[index] = piece.last
        for added, first, layers, sample in zip(self._added, self._first, self._layers, piece.samples, strict=True):
            part, hidden = added.map.layers[index], added.hidden(index)
            if part is None or hidden is None or index not in layers or sample.rows.shape[0] == 0:
                continue
            keys, values = (
                new[:, :, sample.here] - old[:, :, sample.rows]
                for new, old in zip(fresh, cache.view(index), strict=True)
            )
            left = rows_of(keys, values, self._decoder.rotations[index], sample.rows)
            gain = hidden[sample.there] @ part.up
            for sums, mine in zip(
                self._sums[int(first), index], (slice(part.keys), slice(part.keys, None)), strict=True
            ):
                sums += _norms(left[:, mine].double(), gain[:, mine].double()) @ sample.weight

    def _piece_at(self, positions: torch.Tensor) -> _Piece:
        """What of the samples is at these positions; the same for most layers."""
        if self._piece is None or self._piece.positions is not positions:
            samples = [sample.among(positions) for sample in self._samples]
            self._piece = _Piece(positions, int(positions[-1]), samples)
        return self._piece

    def score(self) -> float:
        """From -1, everything further from the truth for the map, to 1, everything there; 0 where nothing could be seen.

        Keys and values and all layers count alike. The first chunk is judged apart, by a map of its own that does well or ill
        whatever the others do, and the worse of both counts. Parts that the maps leave alone say nothing. Rows are not judged
        one by one, because many gain nothing (those further from their chunk's start than a window), and what little is added
        to them does no harm.
        """
        stored, mapped, gained = self._sums.unbind(-1)
        scores = (stored - mapped) / (stored + mapped).clamp_min(1e-20)
        means = scores.masked_fill(gained == 0, torch.nan).flatten(1).nanmean(1)
        return min((mean for mean in means.tolist() if mean == mean), default=0.0)


def _norms(left: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Of each row, fresh less stored, fresh less mapped, and the gain: squared, `[3, rows]`; left: fresh less mapped."""
    return torch.stack([one.square().sum(1) for one in (left + gain, left, gain)])


class _Sample(NamedTuple):
    """Recomputed rows that a map added to.

    rows: their positions. here, there: indices of them among the recomputed, and among those the map added to. weight: for how
    many rows each speaks, float64.
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
        return cls(rows, here, at[here], _nearest(layout, rows).double())

    def among(self, piece: torch.Tensor) -> _Sample:
        """Those of them at the sorted positions of a piece, `here` being indices of these."""
        at = torch.searchsorted(piece, self.rows).clamp_max(piece.shape[0] - 1)
        mine = (piece[at] == self.rows).nonzero()[:, 0]
        return _Sample(self.rows[mine], at[mine], self.there[mine], self.weight[mine])


class _Piece(NamedTuple):
    """Rows of one pass. last: the last of the positions. samples: those of them that are compared, for each map."""

    positions: torch.Tensor
    last: int
    samples: list[_Sample]


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
