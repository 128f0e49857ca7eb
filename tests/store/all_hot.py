"""A tier of memory that reads ahead whatever is opened, and waits for it: its entries come out of memory at once."""

from __future__ import annotations

from collections.abc import Sequence

from blend.errors import EntryDamagedError
from blend.store.backend import Blob
from blend.store.memory import HotBackend


class AllHot(HotBackend):
    def open(self, name: str, head: int) -> Blob | None:
        self._read_ahead([name])
        return super().open(name, head)

    def open_many(self, names: Sequence[str], head: int) -> list[Blob | EntryDamagedError | None]:
        self._read_ahead(names)
        return super().open_many(names, head)

    def _read_ahead(self, names: Sequence[str]) -> None:
        self.prefetch(names)
        assert self.wait(30)
