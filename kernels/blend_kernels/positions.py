"""The positions of a pass's rows, and what attention on a CPU makes of them once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

_Shared = TypeVar("_Shared")


class Positions:
    """Positions of rows, ascending int64 or int32 `[rows]`.

    Calls with the same object share blocks and masks, because all layers of a pass attend from the same rows. Do not change the
    numbers meanwhile.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._shared: dict[tuple[object, ...], object] = {}

    @cached_property
    def ends(self) -> list[int]:
        """The positions on the host. Reading them on a GPU stalls the stream."""
        ends: list[int] = self.values.tolist()
        return ends

    @cached_property
    def ascend(self) -> bool:
        """Whether they are sorted."""
        return self.ends == sorted(self.ends)

    def last(self, count: int) -> Positions:
        """The last of them, the same object in later calls."""
        rows = self.values.shape[0]
        if count == rows:
            return self
        return self.shared(("last", count), lambda: Positions(self.values[rows - count :]))

    def shared(self, key: tuple[object, ...], make: Callable[[], _Shared]) -> _Shared:
        """What an earlier call made under this key, or what `make` gives."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[return-value]

    def hidden(self, rows: slice, keys: slice, window: int | None) -> Tensor:
        """Which of these keys each row does not see, bool `[rows, keys]`; kept for later calls."""
        key = ("hidden", rows.start, rows.stop, keys.start, keys.stop, window)
        return self.shared(key, lambda: self._hidden(rows, keys, window))

    def mask(self, rows: slice, keys: slice, window: int | None, dtype: torch.dtype, group: int) -> Tensor:
        """Additive mask `[group * rows, keys]`: 0 for visible keys, else minus infinity; kept for later calls."""

        def make() -> Tensor:
            hidden = self._hidden(rows, keys, window)
            mask = hidden.new_zeros(hidden.shape, dtype=dtype)
            mask.masked_fill_(hidden, float("-inf"))
            return mask.repeat(group, 1)

        key = ("mask", rows.start, rows.stop, keys.start, keys.stop, window, dtype, group)
        return self.shared(key, make)

    def _hidden(self, rows: slice, keys: slice, window: int | None) -> Tensor:
        last = self.values[rows, None]
        key = torch.arange(keys.start, keys.stop, device=last.device)
        hidden = key > last
        if window is not None:
            hidden |= key <= last - window
        return hidden
