"""Memory for the bytes of one layer, and its tensors in that same memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from blend.store.format import LayerLayout, PartLayout, as_bytes


class LayerBuffer(NamedTuple):
    """views: the layer's bytes, in a row. tensors: its parts by name."""

    parts: tuple[PartLayout, ...]
    views: tuple[memoryview, ...]
    tensors: dict[str, torch.Tensor]


def empty_buffer(layout: LayerLayout) -> LayerBuffer:
    """One piece of memory of its own. Raises RuntimeError for a layer of impossible size."""
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    tensors = {part.name: _tensor(buffer[part.offset : part.offset + part.nbytes], part) for part in layout.parts}
    return LayerBuffer(layout.parts, (as_bytes(buffer),), tensors)


def buffer_over(layout: LayerLayout, views: Sequence[memoryview]) -> LayerBuffer:
    """The memory that is there, a view a part."""
    pairs = zip(layout.parts, views, strict=True)
    tensors = {part.name: _tensor(torch.frombuffer(view, dtype=torch.uint8), part) for part, view in pairs}
    return LayerBuffer(layout.parts, tuple(views), tensors)


def _tensor(stored: torch.Tensor, part: PartLayout) -> torch.Tensor:
    return stored.view(getattr(torch, part.type.name)).view(part.shape)


class Scratch(threading.local):
    """One reusable buffer a thread: a layer read into it is still in the processor's cache when it is hashed."""

    buffer: LayerBuffer | None = None

    def take(self, layout: LayerLayout) -> LayerBuffer:
        """A buffer for that layout, valid until this thread takes again; made anew only when the layout changes."""
        if self.buffer is None or self.buffer.parts != layout.parts:
            self.buffer = empty_buffer(layout)
        return self.buffer
