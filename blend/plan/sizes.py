"""How many bytes a corpus takes in a store: entries of the right shapes are encoded by the store itself, and weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from blend.store.codecs import get_codec
from blend.store.format import encode_entry
from blend.store.seal import make_seal
from blend.types import CacheIdentity, ChunkCache

if TYPE_CHECKING:
    from blend.model.outline import ModelOutline


@dataclass(frozen=True)
class CorpusSize:
    """A corpus by the lengths of its chunks: length in tokens -> how many there are.

    lengths: of all chunks. isolated, contextual: of those that have such a cache. prefix, surrogate: tokens that stand before
    either, and besides before the latter.
    """

    lengths: Mapping[int, int]
    isolated: Mapping[int, int]
    contextual: Mapping[int, int]
    prefix: int
    surrogate: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return sum(self.lengths.values())

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(length * count for length, count in self.lengths.items())


def corpus_bytes(corpus: CorpusSize, model: ModelOutline, codec: str, dtype: str) -> int:
    """Of all entries, to the byte, as `ChunkStore.stats` counts them."""
    kinds = ((corpus.isolated, corpus.prefix), (corpus.contextual, corpus.prefix + corpus.surrogate))
    return sum(
        count * entry_bytes(model, length, start, codec, dtype)
        for lengths, start in kinds
        for length, count in lengths.items()
    )


@lru_cache(maxsize=4096)
def entry_bytes(model: ModelOutline, tokens: int, start: int, codec: str, dtype: str) -> int:
    """Of one entry: KV of so many tokens, computed behind `start` others in this dtype, kept with this codec.

    The numbers in it are random; no codec makes more or fewer bytes of others.
    """
    import torch

    how = get_codec(codec)
    kind = torch.float32 if how.still else getattr(torch, dtype)  # taking positions out makes float32
    made = {shape: torch.randn(shape[0], tokens, shape[1]).to(kind) for shape in {*model.keys, *model.values}}
    cache = ChunkCache(
        tuple(made[one] for one in model.keys), tuple(made[one] for one in model.values), start, still=how.still
    )
    key = CacheIdentity(model.name, dtype, (0,)).key((0,))
    return encode_entry(key, cache, how, make_seal(None)).nbytes
