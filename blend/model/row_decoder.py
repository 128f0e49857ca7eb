"""What blended prefill asks of a decoder, be it `blend.model.decoder.Decoder` or an engine with a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

import torch

from blend.errors import ContextLengthError, PromptError
from blend.types import ChunkCache

if TYPE_CHECKING:
    from blend.model.admission import LayerRotation
    from blend.model.attention import AttentionCall
    from blend.model.cache import BlendedCache
    from blend.types import CacheIdentity


class RowDecoder(Protocol):
    """Computes KV of rows anywhere in a prompt. All of it stays the same while it lives.

    layers: as many as the decoder has. rotations: of each, how its keys and values turn. device,
    dtype: where and in what it computes. vocabulary: how many token ids there are. context_length: the longest prompt, or None.
    """

    @property
    def name(self) -> str:
        """How messages call it, and how a store remembers it."""

    @property
    def layers(self) -> Sized:
        """One item a layer."""

    @property
    def rotations(self) -> tuple[LayerRotation, ...]:
        """How cached keys and values turn with position, layer by layer."""

    @property
    def device(self) -> torch.device:
        """Where it computes, and where caches are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""

    @property
    def context_length(self) -> int | None:
        """The longest prompt; None where there is no limit."""

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What, besides a chunk's tokens, determines its cache."""

    def check_length(self, rows: int) -> None:
        """Raises `PromptError` for prompts that are too long."""

    def new_cache(self, capacity: int) -> BlendedCache:
        """An empty cache with room for `capacity` rows."""

    def no_rows(self) -> ChunkCache:
        """The KV of no tokens at all."""

    def encode_rows(self, token_ids: torch.Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""

    def watch_attention(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        last_layer: int | None = None,
    ) -> None:
        """Run rows only to look at their attention, layer by layer, up to and including `last_layer`; KV is written."""


def check_length(name: str, context_length: int | None, rows: int) -> None:
    """Refuse prompts beyond a decoder's context, with `ContextLengthError`."""
    if context_length is not None and rows > context_length:
        raise ContextLengthError(
            f"the prompt has {rows} tokens but {name} reads at most {context_length}; "
            "use fewer or smaller chunks (--top-k, --chunk-tokens)",
            context_length,
            rows,
        )


def check_ids(vocabulary: int, ids: Sequence[int]) -> None:
    """Refuse token ids that the decoder does not have, with `PromptError`: a GPU that is asked for one computes no more."""
    for wrong in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= wrong < vocabulary:
            raise PromptError(f"the prompt holds token id {wrong}; the model has those from 0 to {vocabulary - 1}")


def no_rows(rotations: Sequence[LayerRotation], dtype: torch.dtype, device: torch.device) -> ChunkCache:
    """The KV of no tokens at all, for layers like these."""
    shapes = [(layer.key_shape, layer.value_shape) for layer in rotations]
    keys, values = (
        tuple(torch.empty((heads, 0, width), dtype=dtype, device=device) for heads, width in kind)
        for kind in zip(*shapes, strict=True)
    )
    return ChunkCache(keys, values, 0)
