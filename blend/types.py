"""What goes from step to step: keys and caches of chunks, and the rows that are chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from blend.layout import Tokens

if TYPE_CHECKING:
    import torch


FORMAT_VERSION = 1


class CacheKind(Enum):
    """How a chunk's cache was computed.

    ISOLATED: right behind the prefix. CONTEXTUAL: behind the prefix and a surrogate context.
    """

    ISOLATED = "isolated"
    CONTEXTUAL = "contextual"


class CacheKey(NamedTuple):
    """One cache of a chunk."""

    chunk: Tokens
    kind: CacheKind


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that determines a chunk's KV, except its tokens.

    Attributes:
        model: fingerprint of the weights and of the configuration that the forward pass depends on.
        dtype: of the computation, such as "float32".
        prefix: the token ids in front of the chunk.
        corpus: whose surrogate context and KV corrections go with it; changes their names, and no cache's.

    """

    model: str
    dtype: str
    prefix: tuple[int, ...]
    corpus: str = ""

    @cached_property
    def namespace(self) -> str:
        """Hex digest naming the group of entries that one model, dtype and prefix can use."""
        return _digest(f"kvblend/{FORMAT_VERSION}/{self.model}/{self.dtype}/", self.prefix)[:32]

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """Address of the chunk with these token ids."""
        return ChunkKey(self.namespace, _digest(f"{self.namespace}/", token_ids))

    @property
    def correction_name(self) -> str:
        """Name of the artifact that holds the corpus's KV correction of this model, dtype and prefix."""
        return self._artifact("correction")

    @property
    def quality_name(self) -> str:
        """Name of the artifact that holds the corpus's estimator (`blend.quality`)."""
        return self._artifact("quality")

    @property
    def surrogate_name(self) -> str:
        """Name of the artifact that holds the corpus's surrogate context behind this prefix (`blend.chunks.library`)."""
        return self._artifact("surrogate")

    def fit_name(self, digest: str) -> str:
        """Name of the artifact that holds a prompt of an unfinished fit (`blend.chunks.unfinished`)."""
        return self._artifact(f"fit_{digest}")

    def _artifact(self, kind: str) -> str:
        return f"{kind}-{self.namespace}" + (f"-{self.corpus}" if self.corpus else "")


def _digest(salt: str, token_ids: Sequence[int]) -> str:
    return hashlib.sha256((salt + ",".join(map(str, token_ids))).encode()).hexdigest()


class ChunkKey(NamedTuple):
    """Content address of a chunk cache.

    Attributes:
        namespace: hex digest of the `CacheIdentity`.
        digest: hex digest of the namespace and the chunk's token ids.

    """

    namespace: str
    digest: str


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ChunkCache:
    """KV cache of one chunk, computed behind the shared prefix or a longer one, without the KV of the text before it.

    Attributes:
        keys: for each layer `[kv_heads, tokens, head_dim]`; head_dim may differ between layers.
        values: the same; head_dim may differ from that of the keys.
        start: position of the first token when the keys were computed.
        unrotated: whether positions are taken out of the keys, and of values that turn, as if every token stood at position 0.
        lead: of a chunk of a model with recurrent layers, how many first tokens must be computed anew.
        operators: what the other tokens do to each layer's recurrent state (`blend.model.recurrent`); none for most layers.
        states: of the beginning of a prompt, each layer's recurrent state behind the last token.

    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    start: int
    unrotated: bool = False
    lead: int = 0
    operators: tuple[tuple[torch.Tensor, ...], ...] = ()
    states: tuple[tuple[torch.Tensor, ...], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return int(self.keys[0].shape[1])

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        carried = chain.from_iterable((*self.operators, *self.states))
        return sum(part.nbytes for part in (*self.keys, *self.values, *carried))

    def rows(self, start: int, stop: int) -> ChunkCache:
        """A view of some of its rows; recurrent states stay with the last one."""
        if (start, stop) == (0, self.tokens):
            return self
        keys = tuple(layer[:, start:stop] for layer in self.keys)
        values = tuple(layer[:, start:stop] for layer in self.values)
        states = self.states if stop == self.tokens else ()
        return ChunkCache(keys, values, self.start + start, self.unrotated, states=states)


@dataclass(frozen=True)
class Selection:
    """Which rows a blended prefill computed.

    Attributes:
        rows: sorted int64 positions that were computed in every layer, `[rows]`, with all suffix rows and all uncached rows.
        rows_per_layer: how many rows each layer ran on; more than `rows` if a selector looks before it decides.
        scores: the question's attention to each row of the prompt, fp32 `[prompt rows]`, if the selector asked for it.

    """

    rows: torch.Tensor
    rows_per_layer: tuple[int, ...]
    scores: torch.Tensor | None = None

    def share(self, prompt_rows: int) -> float:
        """Computed rows, summed over layers, as a share of the full prefill of `prompt_rows` rows."""
        return sum(self.rows_per_layer) / (len(self.rows_per_layer) * prompt_rows)
