"""Checks a KV correction on the rows of a prompt that are recomputed anyway."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blend.chunks.correction import nearest, rows_of

if TYPE_CHECKING:
    from blend.chunks.assemble import Assembly
    from blend.layout import PromptLayout
    from blend.model.cache import KV
    from blend.model.row_decoder import RowDecoder

MOST_ROWS = 64  # compared in a layer
MOST_LAYERS = 12  # compared of a map
LayerNorms = dict[int, Tensor]
"""Squared norms of each layer, `[keys or values, 3]`."""


class _StoredRows(NamedTuple):
    """What a layer held at sampled positions before they were recomputed."""

    rows: Tensor
    kv: KV


class _Leads(NamedTuple):
    """What the layers held at these positions before the question's pass recomputed them."""

    rows: Tensor
    stored: dict[int, KV]

    def as_stored(self, rows: Tensor, kv: KV, layer: int) -> KV:
        """The KV at these sorted positions, at leads as it was before."""
        earlier = self.stored.get(layer)
        if earlier is None:
            return kv
        place = torch.searchsorted(self.rows, rows).clamp_max(self.rows.shape[0] - 1)
        is_lead = (self.rows[place] == rows)[:, None]
        keys, values = (torch.where(is_lead, old[:, :, place], new) for old, new in zip(earlier, kv, strict=True))
        return keys, values


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
        self._decoder = decoder
        self._layout = layout
        self._assembly = assembly
        self._gains = [(placement, gain) for placement in assembly.placements for gain in placement.gains]
        self._checked: list[set[int]] = []
        for _, gain in self._gains:
            mapped = [layer for layer in sorted(gain.maps.number) if layer <= last_layer]
            self._checked.append(set(_spread(mapped, MOST_LAYERS)))
        self._layers = sorted(set[int]().union(*self._checked))
        self._stored: dict[int, _StoredRows] = {}
        self._sample: Tensor | None = None
        self._leads: _Leads | None = None
        assembly.on_placed = self._on_placed

    def keep_leads(self, rows: Tensor) -> None:
        """Take the sorted positions `[rows]` with stored KV that the question's pass recomputes, before it does."""
        if self._gains and rows.shape[0]:
            self._leads = _Leads(_spread(rows, MOST_ROWS).contiguous(), {})
            placed = self._assembly.pending.start
            self._take_leads([index for index in self._layers if index < placed])

    def choose(self, rows: Tensor, layer: int = 0) -> None:
        """Take the sorted positions `[rows]` with stored KV that are recomputed from this layer on, besides kept leads."""
        if self._leads is not None:
            rows = torch.cat((rows, self._leads.rows)).sort().values
        if not self._gains or not rows.shape[0]:
            self._sample = None
            return
        self._sample = _spread(rows, MOST_ROWS).contiguous()
        placed = self._assembly.pending.start
        self._take([index for index in self._layers if layer <= index < placed])

    def _on_placed(self, layer: int) -> None:
        if layer not in self._layers:
            return
        if self._sample is None:  # the question's pass runs
            self._take_leads([layer])
        self._take([layer])

    def _take_leads(self, layers: list[int]) -> None:
        if self._leads is not None and layers:
            kvs = self._assembly.cache.gather(layers, self._leads.rows)
            self._leads.stored.update(zip(layers, kvs, strict=True))

    def _take(self, layers: list[int]) -> None:
        """Take the sample of these layers, which are placed."""
        if self._sample is None or not layers:
            return
        kvs = self._assembly.cache.gather(layers, self._sample)
        for layer, kv in zip(layers, kvs, strict=True):
            stored = kv if self._leads is None else self._leads.as_stored(self._sample, kv, layer)
            self._stored[layer] = _StoredRows(self._sample, stored)

    def is_passed_by(self, rows: int) -> bool:
        """Whether the maps improved those of the first rows that are recomputed so far, or there are none."""
        return not self._gains or float(self.score(rows)) > 0

    def score(self, until: int | None = None) -> Tensor:
        """From -1 (the maps made everything worse) to 1 (they made it exact); 0 if nothing could be compared.

        until: the first row that is left out.

        Keys, values and layers count alike; parts without a map do not count. A map that adds to the first chunk is scored
        separately, and the worse score counts. Single rows are not judged: many gain nothing, and get next to nothing.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=self._decoder.device)
        sums: defaultdict[bool, LayerNorms] = defaultdict(dict)
        for layers in self._alike():
            self._compare(layers, sums, until)
        worst = nothing + math.inf
        for norms in sums.values():
            together = torch.stack([*norms.values()])
            before, after, gained = together.unbind(-1)
            scores = (before - after) / (before + after).clamp_min(1e-20)
            mean = scores.masked_fill(gained == 0, torch.nan).nanmean()
            worst = torch.where(mean.isnan(), worst, torch.minimum(worst, mean))
        return torch.where(worst.isinf(), nothing, worst)

    def _alike(self) -> Iterator[list[int]]:
        """Layers that are compared at the same rows and rotate alike, which are compared together."""
        sampled = [layer for layer in self._layers if layer in self._stored]
        for _, layers in groupby(sampled, self._likeness):
            yield [*layers]

    def _likeness(self, layer: int) -> tuple[object, ...]:
        rows = self._stored[layer].rows
        return id(rows), self._decoder.rotations[layer].kind

    def _compare(self, layers: list[int], sums: Mapping[bool, LayerNorms], until: int | None) -> None:
        """Add these layers' squared norms, `[keys or values, 3]` under whether they are of the first chunk, and the layer."""
        rows = self._stored[layers[0]].rows
        fresh_keys, fresh_values = _together(self._assembly.cache.gather(layers, rows))
        stored_keys, stored_values = _together([self._stored[layer].kv for layer in layers])
        rotation = self._decoder.rotations[layers[0]]
        changes = rows_of(fresh_keys - stored_keys, fresh_values - stored_values, rotation, rows)
        change_of = dict(zip(layers, changes, strict=True))
        weight = nearest(self._layout, rows).double()
        if until is not None:
            weight = weight * (rows < until)
        for (placement, gain), checked in zip(self._gains, self._checked, strict=True):
            mapped = [layer for layer in layers if layer in checked]
            if not mapped:
                continue
            at, are_placed = placement.find(rows)
            hidden = torch.stack([gain.hidden(layer)[at] for layer in mapped])
            up = torch.stack([gain.maps.up[gain.maps.number[layer]] for layer in mapped])
            added = (hidden @ up).double()
            remainder = torch.stack([change_of[layer] for layer in mapped]).double()
            share = weight * (are_placed & gain.covered[at])
            keys_width = gain.maps.layers[gain.maps.number[mapped[0]]][1].keys
            norms = []
            for part in (slice(keys_width), slice(keys_width, None)):
                norms.append(_norms(remainder[..., part], added[..., part]) @ share)
            layer_sums = sums[gain.adds_to_first]
            norms_of_layers = torch.stack(norms).permute(2, 0, 1)
            for layer, layer_norms in zip(mapped, norms_of_layers, strict=True):
                earlier = layer_sums.get(layer)
                layer_sums[layer] = layer_norms if earlier is None else earlier + layer_norms


def _together(kvs: Sequence[KV]) -> KV:
    """The keys of several layers, and their values."""
    keys, values = zip(*kvs, strict=True)
    return torch.cat(keys), torch.cat(values)


def _norms(remainder: Tensor, gain: Tensor) -> Tensor:
    """Squared norms of fresh - stored, fresh - corrected (`remainder`) and the gain, for each row, `[3, layers, rows]`."""
    parts = (remainder + gain, remainder, gain)
    return torch.stack([part.square().sum(-1) for part in parts])


def _spread(many: Any, most: int) -> Any:
    """At most so many of them, at even distances."""
    return many[:: max(1, -(-len(many) // most))]
