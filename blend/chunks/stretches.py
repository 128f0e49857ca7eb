"""Put stored KV in its place: neighbouring chunks of a prompt, moved to their positions, with what a correction adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.correction import Added, KVCorrection, position_features
from blend.chunks.loader import LayerSource, StagedLayer
from blend.model.admission import Rotation, moves
from blend.model.cache import BlendedLayer
from blend.types import PromptLayout, Span

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation
    from blend_kernels import Deltas


class _Shift(NamedTuple):
    """A chunk's rows in the prompt, and by how much all of them move; None: each to its position, from none at all."""

    span: Span
    by: int | None

    def moved(self, there: torch.Tensor) -> torch.Tensor:
        """By how much each row moves, `[rows]`; there: the positions of the rows."""
        return there if self.by is None else there.new_full((self.span.length,), self.by)


class Stretch:
    """Neighbouring chunks of a prompt to which the same is added."""

    def __init__(self, shifts: Sequence[_Shift], device: torch.device) -> None:
        self.span = Span(shifts[0].span.start, shifts[-1].span.stop)
        self._shifts = [
            (span, moves(torch.arange(*span, device=device)) if delta is None else delta) for span, delta in shifts
        ]

    def put(self, layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, index: int, base: int) -> None:
        """Write the layer's KV at its positions; base: the prompt's row that is the first of `staged`."""
        for span, delta in self._shifts:
            for turn, states, buffer in _parts(layer, staged, rotation, span, base):
                _move(turn, states, delta, buffer)


class CorrectedStretch(Stretch):
    """Chunks to which a KV correction adds; added: what it adds to the prompt, taken down layer by layer."""

    def __init__(self, layout: PromptLayout, shifts: Sequence[_Shift], added: Added) -> None:
        super().__init__(shifts, added.rows.device)
        there = torch.arange(*self.span, device=added.rows.device)
        rows = torch.split(there, [shift.span.length for shift in shifts])
        moved = torch.cat([shift.moved(mine) for shift, mine in zip(shifts, rows, strict=True)])
        # What has no position needs none taken out; where that holds of all, nothing turns twice.
        self._back = None if torch.equal(moved, there) else moves(moved - there)
        self._there, self._added = moves(there), added
        self._features = position_features(layout, there, added.map.before, added.map.length)

    def put(self, layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, index: int, base: int) -> None:
        """Take positions out, add what the correction predicts, and turn to the prompt's positions."""
        part = self._added.map.layers[index]
        if part is None:
            super().put(layer, staged, rotation, index, base)
            return
        parts = _parts(layer, staged, rotation, self.span, base)
        keys, values = (_still(turn, states, self._back)[0] for turn, states, _ in parts)
        self._added.parts[index].append(part.add(keys, values, self._features))
        for (turn, _, buffer), states in zip(parts, (keys, values), strict=True):
            turn.apply(states[None], self._there, out=buffer)


def _still(turn: Rotation, states: torch.Tensor, back: Deltas | None) -> torch.Tensor:
    """Positions taken out, fp32; of states that have none the same tensor, if it is fp32 already."""
    if turn.inv_freq is None or back is None:
        return states.float()
    return turn.apply(states, back, out=torch.empty(states.shape, dtype=torch.float32, device=states.device))


def _parts(
    layer: BlendedLayer, staged: StagedLayer, rotation: LayerRotation, span: Span, base: int
) -> list[tuple[Rotation, torch.Tensor, torch.Tensor]]:
    """Of the keys, then the values, at these rows: how they turn, as stored, where they go; `[1, kv_heads, rows, head_dim]`."""
    here, there = slice(span.start - base, span.stop - base), slice(*span)
    return [
        (rotation.keys, staged.keys[None, :, here], layer.keys[:, :, there]),
        (rotation.values, staged.values[None, :, here], layer.values[:, :, there]),
    ]


def _move(turn: Rotation, states: torch.Tensor, delta: int | Deltas, out: torch.Tensor) -> None:
    if isinstance(delta, int) and delta == 0:
        out.copy_(states)
    else:
        turn.apply(states, delta, out=out)


def stretches_of(
    layout: PromptLayout,
    readers: Sequence[LayerSource | None],
    corrections: Sequence[KVCorrection | None],
    device: torch.device,
) -> tuple[list[Stretch], tuple[Added, ...]]:
    """The chunks that are there, neighbours with the same correction together; and what every correction will have added."""
    groups: list[tuple[KVCorrection | None, list[_Shift]]] = []
    for reader, span, correction in zip(readers, layout.chunk_spans, corrections, strict=True):
        if reader is None or not span.length:
            continue
        shift = _Shift(span, None if reader.still else span.start - reader.start)
        if groups and groups[-1][0] is correction and groups[-1][1][-1].span.stop == span.start:
            groups[-1][1].append(shift)
        else:
            groups.append((correction, [shift]))
    added: dict[int, Added] = {}
    for correction in {id(one): one for one, _ in groups if one is not None}.values():
        rows = [torch.arange(*span, device=device) for one, shifts in groups if one is correction for span, _ in shifts]
        added[id(correction)] = Added(correction, torch.cat(rows))
    stretches = [
        Stretch(shifts, device) if one is None else CorrectedStretch(layout, shifts, added[id(one)])
        for one, shifts in groups
    ]
    return stretches, tuple(added.values())
