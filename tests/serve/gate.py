"""Calls that wait until a test lets them go on."""

import threading
from typing import Any

import pytest


class Gate:
    """What goes through waits until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(120)

    def before(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Have calls of this method go through."""
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: (self(), plain(*given, **more))[1])

    def wait(self) -> None:
        """Wait until somebody stands before it."""
        assert self.reached.wait(120)

    def open(self) -> None:
        self._open.set()
