"""What may lie under each name of a store after all that was written to it: what it has acknowledged, and nothing else.

A write that failed may have been done all the same: the name then holds the old content or the new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from blend.errors import StoreError

Content = bytes | None


class Ledger:
    """By name. None stands for nothing. touched: names that were written or read since `settled` was called."""

    def __init__(self) -> None:
        self._may: dict[str, set[Content]] = {}
        self._ever: dict[str, set[Content]] = {}
        self.touched: dict[str, None] = {}

    @contextmanager
    def writing(self, contents: Mapping[str, Content], *, sure: bool = True) -> Iterator[None]:
        """Around a write of these; when it returns they are what the names hold, or may hold where that is not `sure`."""
        for name, content in contents.items():
            self.may(name).add(content)
            self._ever.setdefault(name, {None}).add(content)
        try:
            yield
        except StoreError:
            raise
        else:
            if sure:
                self._may |= {name: {content} for name, content in contents.items()}

    def may(self, name: str) -> set[Content]:
        """What it may hold; from now on it counts as touched."""
        self.touched[name] = None
        return self._may.setdefault(name, {None})

    def ever(self, name: str) -> set[Content]:
        """What it may have held at any time."""
        return self._ever.get(name, {None})

    def is_there(self, name: str) -> bool:
        """Whether it certainly holds something."""
        return None not in self.may(name)

    def certain(self, prefix: str) -> tuple[set[str], set[str]]:
        """Names below a folder that certainly hold something, and those that may."""
        held = {name: may for name, may in self._may.items() if name.startswith(prefix)}
        return {name for name in held if None not in held[name]}, {name for name in held if held[name] != {None}}

    def learn(self, name: str, content: Content) -> None:
        """It was looked at: that is what it holds."""
        self._may[name] = {content}

    def settled(self) -> list[str]:
        """Names that were touched; none is from now on."""
        names, self.touched = list(self.touched), {}
        return names

    @property
    def names(self) -> list[str]:
        """All that were written."""
        return sorted(self._may)
