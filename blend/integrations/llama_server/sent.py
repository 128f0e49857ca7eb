"""Prompts that went to llama-server lately: it holds their rows in a slot, or in its prompt cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from blend.layout import common_length

MOST_SENT = 64  # prompts; llama-server's cache of 8 GiB holds more of them


class SentPrompts:
    """The latest prompts. llama-server reuses the longest of its prompts' beginnings with which a new one begins.

    Args:
        slots: of llama-server, which certainly hold the last prompts.

    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._prompts = deque[Sequence[int]](maxlen=MOST_SENT)

    def add(self, ids: Sequence[int]) -> None:
        """Note a prompt that was sent."""
        self._prompts.append(ids)

    def reusable_rows(self, ids: Sequence[int]) -> int:
        """How many first rows of a prompt llama-server probably holds."""
        return max((common_length(ids, earlier) for earlier in self._prompts), default=0)

    def forget(self) -> None:
        """llama-server held less than was thought, so it has no prompt cache: from now on only its slots count."""
        self._prompts = deque(maxlen=self._slots)
