"""Cuts the arguments of decoder layers to the rows that are still computed."""

from __future__ import annotations

from typing import Any

import torch


class Narrower:
    """Cuts row-shaped arguments of a decoder layer (hidden states, cos and sin, position ids) to the kept rows.

    Arguments made before the first layer have all rows; hidden states have those that the last layer ran on. The number of rows
    of a tensor says which.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._index: dict[int, torch.Tensor] = {}
        self._done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, places: torch.Tensor) -> None:
        """From now on cut to the rows at these indices `[rows]` of the rows kept so far."""
        self._index = {rows: index[places] for rows, index in self._index.items()}
        self._index[self._rows] = places
        self._rows = places.shape[0]
        self._index.pop(self._rows, None)
        self._done.clear()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer's forward pass, cut to the kept rows."""
        return tuple(map(self._value, args)), {name: self._value(value) for name, value in kwargs.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        dim = max(value.ndim - 2, min(1, value.ndim - 1))  # [rows], [batch, rows], [..., batch, rows, width]
        index = self._index.get(value.shape[dim]) if value.ndim else None
        if index is None:
            return value
        # Every layer gets the same cos, sin and ids: cut them once. Keeping the original keeps its id unique.
        if id(value) not in self._done:
            self._done[id(value)] = (value, value.index_select(dim, index))
        return self._done[id(value)][1]
