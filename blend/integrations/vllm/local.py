"""Prompts when there is nobody to blend them: documents become the same token ids, by vLLM's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.integrations.vllm.questions import asked
from blend.serve.door.hall import DoorLimits

if TYPE_CHECKING:
    from blend.serve.room import Room
    from blend.types import PromptLayout


class _Reader(NamedTuple):
    """What a room needs of a decoder to put documents into a prompt."""

    tokenizer: Any
    context_length: int | None = None


class LocalPrompts:
    """tokenizer: HuggingFace's, which vLLM has anyway."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._room: Room | None = None

    def layout(self, part: Mapping[str, Any]) -> PromptLayout:
        """A prompt with its documents; `part`: see `questions.part_of`.

        Raises `DoorError` or `BlendError` for what cannot be put into a prompt.
        """
        from blend.serve.service import put

        layout, _ = put(self._made(), asked(part, (), DoorLimits()))
        return layout

    def _made(self) -> Room:
        if self._room is None:
            from blend.rag import Rag
            from blend.serve.room import Room

            reader: Any = _Reader(self._tokenizer)
            self._room = Room(Rag("/nonexistent", decoder=reader), 0)
        return self._room
