"""The values that travel between the stages of a blended prefill.

PromptLayout (token ids of one prompt) -> ChunkKey (where a chunk's KV lives) -> ChunkCache (the KV itself) -> Selection
(which rows are computed) -> BlendedCache (see `blended_cache`). All of them are immutable; shapes are in the docstrings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1


class Span(NamedTuple):
    """Rows `start` to `stop - 1` of a prompt."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(some, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


class Part(NamedTuple):
    """Rows of a stored chunk: those of `whole` from `first` on, as many as the prompt has of it."""

    whole: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class PromptLayout:
    """Token ids of one prompt, segment by segment: `prefix`, then `chunks` in order, then `suffix`.

    Segments are tokenised one by one and joined as ids, so that a chunk has the same ids in every prompt.

    plain: places among `chunks` of ordinary text between them, which is computed always and stored never. parts: places that
    hold only a part of a stored chunk. canonical_prefix: the one behind which the chunks' caches are computed and kept, where
    that is not `prefix` itself: many prompts with prefixes of their own then share them.
    """

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    suffix: tuple[int, ...]
    plain: frozenset[int] = frozenset()
    parts: Mapping[int, Part] = field(default_factory=dict)
    canonical_prefix: tuple[int, ...] | None = None

    @property
    def kept_behind(self) -> tuple[int, ...]:
        """The prefix that the chunks' caches are kept behind."""
        return self.prefix if self.canonical_prefix is None else self.canonical_prefix

    @cached_property
    def shared_prefix_rows(self) -> int:
        """How many of the prefix's first tokens are those of the canonical one too, so that its KV serves for them."""
        return common_length(self.prefix, self.kept_behind)

    @property
    def stored(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each place the chunk whose cache is used there, or None for ordinary text."""
        return tuple(
            None if place in self.plain else self.parts[place].whole if place in self.parts else chunk
            for place, chunk in enumerate(self.chunks)
        )

    @property
    def exact_first(self) -> bool:
        """Whether a chunk's isolated cache is exact in the first place: it was computed behind these very tokens."""
        return self.canonical_prefix in (None, self.prefix) and 0 not in self.plain and 0 not in self.parts

    def all_plain(self) -> PromptLayout:
        """The same prompt with nothing to be taken from the store."""
        return replace(self, plain=frozenset(range(len(self.chunks))), parts={})

    def behind(self, rows: int) -> PromptLayout:
        """The same prompt with its first rows, more than the prefix and less than all, as the prefix: their KV is there."""
        suffix = self.suffix[max(0, rows - self.context.stop) :]
        chunks, plain, parts = list[tuple[int, ...]](), set[int](), dict[int, Part]()
        for place, (chunk, span) in enumerate(zip(self.chunks, self.chunk_spans, strict=True)):
            if span.stop <= rows:
                continue
            cut = max(0, rows - span.start)
            if place in self.plain:
                plain.add(len(chunks))
            elif cut or place in self.parts:
                whole, first = self.parts.get(place, Part(chunk, 0))
                parts[len(chunks)] = Part(whole, first + cut)
            chunks.append(chunk[cut:])
        prefix = self.token_ids[:rows]
        return PromptLayout(prefix, tuple(chunks), suffix, frozenset(plain), parts, self.kept_behind)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in prompt order."""
        return (*self.prefix, *(token for chunk in self.chunks for token in chunk), *self.suffix)

    @cached_property
    def chunk_spans(self) -> tuple[Span, ...]:
        """Where each chunk lies in the prompt."""
        spans, start = [], len(self.prefix)
        for chunk in self.chunks:
            spans.append(Span(start, start + len(chunk)))
            start += len(chunk)
        return tuple(spans)

    @property
    def context(self) -> Span:
        """All chunks together."""
        start = len(self.prefix)
        return Span(start, start + sum(map(len, self.chunks)))

    @property
    def rows(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.token_ids)

    def chunk_starts(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the chunk of each context row, int64 positions `[rows]`, starts in the prompt, int64 `[rows]`."""
        import torch

        starts = rows.new_tensor([span.start for span in self.chunk_spans])
        return starts[torch.bucketize(rows, starts, right=True) - 1]


@dataclass(frozen=True)
class CacheIdentity:
    """Everything besides a chunk's own tokens that changes the values of its KV cache.

    model: fingerprint of the weights and of the configuration that the forward pass depends on (RoPE included).
    dtype: dtype the cache was computed in, such as "float32".
    prefix: the token ids in front of the chunk when it was computed.
    corpus: whose surrogate context and KV corrections go with it; it changes their names, and no cache's.
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
    def surrogate_name(self) -> str:
        """Name of the artifact that holds the corpus's surrogate context behind this prefix (`blend.chunks.library`)."""
        return self._artifact("surrogate")

    def _artifact(self, kind: str) -> str:
        return f"{kind}-{self.namespace}" + (f"-{self.corpus}" if self.corpus else "")


def _digest(salt: str, token_ids: Sequence[int]) -> str:
    return hashlib.sha256((salt + ",".join(map(str, token_ids))).encode()).hexdigest()


class ChunkKey(NamedTuple):
    """Content address of a chunk cache: hex digests of the `CacheIdentity` and of it together with the token ids."""

    namespace: str
    digest: str


@dataclass(frozen=True)
class ChunkCache:
    """KV cache of one chunk, computed right behind the shared prefix or a longer one, the KV before the chunk dropped.

    keys[layer], values[layer]: `[kv_heads, tokens, head_dim]`; head_dim may differ between the two and between layers.
    start: position of the chunk's first token when the keys were computed (the length of what stood before).
    still: whether positions have been taken out of the keys (and of values that turn), as if every token stood at position 0.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    start: int
    still: bool = False

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
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def rows(self, start: int, stop: int) -> ChunkCache:
        """A view of some of its rows."""
        keys, values = (tuple(part[:, start:stop] for part in kind) for kind in (self.keys, self.values))
        return replace(self, keys=keys, values=values, start=self.start + start)


@dataclass(frozen=True)
class Selection:
    """Which rows a blended prefill computed.

    rows: sorted int64 positions that were computed in every layer, `[rows]`; always contains every suffix row and every
    uncached row. rows_per_layer: how many rows each layer ran on; more than `rows` where a selector looks before it decides.
    scores: what the question's attention gives each row of the prompt, fp32 `[rows]`, where the selector asked for it.
    """

    rows: torch.Tensor
    rows_per_layer: tuple[int, ...]
    scores: torch.Tensor | None = None

    def share(self, prompt_rows: int) -> float:
        """Rows computed, summed over layers, over those of full prefill of a prompt of that length."""
        return sum(self.rows_per_layer) / (len(self.rows_per_layer) * prompt_rows)
