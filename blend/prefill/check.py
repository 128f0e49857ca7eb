"""Checks a KV correction on the rows of a prompt that are recomputed anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from blend.chunks.correction import nearest, rows_of

if TYPE_CHECKING:
    from blend.chunks.assemble import Assembly
    from blend.model.cache import KV
    from blend.model.decoder import RowDecoder
    from blend.types import PromptLayout

MOST_ROWS = 64  # compared in a layer
MOST_LAYERS = 12  # compared of a map
_Many = TypeVar("_Many", torch.Tensor, list[int])


class _StoredRows(NamedTuple):
    """What a layer held at sampled positions before they were recomputed."""

    rows: torch.Tensor
    kv: KV


class CorrectionCheck:
    """Compares stored, corrected and fresh KV of recomputed rows.

    A prompt may be unlike the chunks that the map was fitted on. Every recomputed row with stored KV has fresh KV in every
    layer, to compare with the stored and the corrected KV. Recomputed rows are no fair sample, so each one counts for the rows
    of its chunk that are nearest to it. Sums run in float64. Nothing is read from the device.

    Args:
        decoder: the model.
        layout: the prompt.
        assembly: places the stored KV; the check looks at each layer once it is there.
        last_layer: the last layer that is compared. It should be in place when the rows are chosen, so that no later pass is
            held up.

    """

    def __init__(self, decoder: RowDecoder, layout: PromptLayout, assembly: Assembly, last_layer: int) -> None:
        self._decoder, self._layout, self._assembly = decoder, layout, assembly
        self._gains = [(placement, gain) for placement in assembly.placements for gain in placement.gains]
        mapped = [[index for index in sorted(gain.maps.number) if index <= last_layer] for _, gain in self._gains]
        self._checked = [set(_spread(layers, MOST_LAYERS)) for layers in mapped]
        self._layers = sorted(set[int]().union(*self._checked))
        self._stored: dict[int, _StoredRows] = {}
        self._sample: torch.Tensor | None = None
        assembly.on_placed = self._on_placed

    def choose(self, rows: torch.Tensor, layer: int = 0) -> None:
        """Take the sorted positions `[rows]` with stored KV that are recomputed from this layer on."""
        if not self._gains or not rows.shape[0]:
            self._sample = None
            return
        self._sample = _spread(rows, MOST_ROWS).contiguous()
        for index in self._layers:
            if layer <= index < self._assembly.pending.start:
                self._on_placed(index)

    def _on_placed(self, layer: int) -> None:
        if self._sample is None or layer not in self._layers:
            return
        keys, values = self._assembly.cache.view(layer)
        self._stored[layer] = _StoredRows(self._sample, _at((keys, values), self._sample))

    def score(self) -> torch.Tensor:
        """From -1 (the maps made everything worse) to 1 (they made it exact); 0 if nothing could be compared.

        Keys, values and layers count alike; parts without a map do not count. A map that adds to the first chunk is scored
        separately, and the worse score counts. Single rows are not judged: many gain nothing, and get next to nothing.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=self._decoder.device)
        sums = torch.zeros((2, len(self._layers), 2, 3), dtype=torch.float64, device=self._decoder.device)
        for number, layer in enumerate(self._layers):
            stored = self._stored.get(layer)
            if stored is not None and stored.rows.shape[0]:
                self._compare(layer, stored, sums[:, number])
        before, after, gained = sums.unbind(-1)
        scores = (before - after) / (before + after).clamp_min(1e-20)
        means = scores.masked_fill(gained == 0, torch.nan).flatten(1).nanmean(1)
        worst = torch.where(means.isnan(), torch.inf, means).min()
        return torch.where(worst.isinf(), nothing, worst)

    def _compare(self, layer: int, stored: _StoredRows, sums: torch.Tensor) -> None:
        """Add the squared norms of one layer to `[first chunk or not, keys or values, 3]`."""
        rows = stored.rows
        fresh = _at(self._assembly.cache.view(layer), rows)
        keys, values = (new - old for new, old in zip(fresh, stored.kv, strict=True))
        left = rows_of(keys, values, self._decoder.rotations[layer], rows)
        weight = nearest(self._layout, rows).double()
        for (placement, gain), checked in zip(self._gains, self._checked, strict=True):
            hidden = gain.hidden(layer)
            if hidden is None or layer not in checked:
                continue
            added = hidden[placement.order_of(rows)] @ gain.maps.up[gain.maps.number[layer]]
            share = weight * gain.covers(rows)
            keys_width = gain.keys_width(layer)
            for into, part in zip(
                sums[int(gain.adds_to_first)], (slice(keys_width), slice(keys_width, None)), strict=True
            ):
                into += _norms(left[:, part].double(), added[:, part].double()) @ share


def _norms(left: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Squared norms of fresh - stored, fresh - corrected (`left`) and the gain, for each row, `[3, rows]`."""
    return torch.stack([part.square().sum(1) for part in (left + gain, left, gain)])


def _at(kv: KV, rows: torch.Tensor) -> KV:
    return kv[0].index_select(2, rows), kv[1].index_select(2, rows)


def _spread(many: _Many, most: int) -> _Many:
    """At most so many of them, at even distances."""
    return many[:: max(1, -(-len(many) // most))]
