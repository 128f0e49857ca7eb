"""The values that travel between the steps of a blended prefill, all of them immutable, and the stopwatch of its stages.

PromptLayout (token ids of a prompt) -> ChunkKey (where a chunk's KV lives) -> ChunkCache (the KV) -> Selection (which rows are
computed).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter, eq
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

FORMAT_VERSION = 1
_TOKENS = attrgetter("tokens")


class Span(NamedTuple):
    """Rows `start` to `stop - 1` of a prompt."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many tokens, or other things, both begin with."""
    different = (place for place, same in enumerate(map(eq, first, second)) if not same)
    return next(different, min(len(first), len(second)))


LEAD_SHARE = 0.15  # measured on a small model only, see docs/study.md
LEAST_LEAD = 4  # rows: convolutions of most models look back three, which then are the prompt's


def lead_of(tokens: int) -> int:
    """How many first rows of a chunk of so many tokens are computed anew in every prompt, for models with recurrent layers."""
    return min(max(round(LEAD_SHARE * tokens), LEAST_LEAD), tokens)


def is_composable(first: int, rows: int, whole: int) -> bool:
    """Whether models with recurrent layers can reuse `rows` rows of a chunk of `whole` tokens, from row `first` on.

    A chunk's operator is that of all its rows behind the lead. So they must end with the chunk, and have the rows of the lead
    that the operator's convolutions saw.
    """
    return first + LEAST_LEAD <= lead_of(whole) and first + rows == whole


class CacheKind(Enum):
    """How a chunk's cache was computed.

    ISOLATED: right behind the prefix. CONTEXTUAL: behind the prefix and a surrogate context.
    """

    ISOLATED = "isolated"
    CONTEXTUAL = "contextual"


Tokens = tuple[int, ...]


class CacheKey(NamedTuple):
    """One cache of a chunk."""

    chunk: Tokens
    kind: CacheKind


class PlaceOrigin(Enum):
    """Where the text of a place comes from.

    CORPUS: a chunk of a corpus. LEARNED: text of earlier requests. Both have caches, computed apart from every prompt.
    MOVED: text of an earlier prompt, which has the rows that it had there. NEW: text of this request, computed in it; its
    caches serve later prompts. TEXT: ordinary text, which is always computed and never stored.
    """

    CORPUS = "corpus"
    LEARNED = "learned"
    MOVED = "moved"
    NEW = "new"
    TEXT = "text"


class Place(NamedTuple):
    """Text between a prompt's prefix and its suffix.

    Attributes:
        tokens: its token ids.
        origin: see `PlaceOrigin`.
        part_of: the stored chunk of which it is a part; None if it is all of it.
        first: the row of that chunk with which it begins; of a moved place that of the rows which it is taken from.

    """

    tokens: tuple[int, ...]
    origin: PlaceOrigin = PlaceOrigin.CORPUS
    part_of: tuple[int, ...] | None = None
    first: int = 0

    @property
    def is_chunk(self) -> bool:
        """Whether it is all of a stored chunk."""
        return self.stored is not None and self.part_of is None

    @property
    def whole(self) -> tuple[int, ...]:
        """The text that it is, or of which it is a part."""
        return self.tokens if self.part_of is None else self.part_of

    @property
    def is_brought(self) -> bool:
        """Whether this request or an earlier one brought the text."""
        return self.origin in (PlaceOrigin.LEARNED, PlaceOrigin.NEW)

    @property
    def stored(self) -> tuple[int, ...] | None:
        """The chunk whose cache is used here, or None for text that is computed or moved."""
        if self.origin in (PlaceOrigin.CORPUS, PlaceOrigin.LEARNED):
            return self.whole
        return None

    def behind(self, rows: int) -> Place:
        """The place without its first rows."""
        if not rows:
            return self
        first = self.first + rows if self.stored or self.origin is PlaceOrigin.MOVED else 0
        return Place(self.tokens[rows:], self.origin, self.stored, first)

    def composable(self) -> Place:
        """The same place as models with recurrent layers take it; see `is_composable`."""
        fits = self.part_of is None or is_composable(self.first, len(self.tokens), len(self.part_of))
        return self if fits else Place(self.tokens, PlaceOrigin.TEXT)


@dataclass(frozen=True)
class PromptLayout:
    """Token ids of one prompt: `prefix`, then `places` in order, then `suffix`.

    Segments are tokenised one by one and joined as ids, so a chunk has the same ids in every prompt.

    >>> from blend import PromptLayout
    >>> layout = PromptLayout.of_chunks(prefix=(1, 2), chunks=[(5, 6, 7), (8, 9)], suffix=(3,))
    >>> layout.token_ids, [tuple(span) for span in layout.chunk_spans]
    ((1, 2, 5, 6, 7, 8, 9, 3), [(2, 5), (5, 7)])

    Attributes:
        prefix: the exact, shared beginning; at least one token.
        places: chunks, and the text between them.
        suffix: the question and the generation prompt; at least one token.
        canonical_prefix: the prefix behind which the chunks' caches are kept, if that is not `prefix`. Prompts with different
            prefixes then share caches.

    """

    prefix: tuple[int, ...]
    places: tuple[Place, ...]
    suffix: tuple[int, ...]
    canonical_prefix: tuple[int, ...] | None = None

    @classmethod
    def of_chunks(
        cls,
        prefix: tuple[int, ...],
        chunks: Iterable[tuple[int, ...]],
        suffix: tuple[int, ...],
        canonical_prefix: tuple[int, ...] | None = None,
    ) -> PromptLayout:
        """A prompt whose places are whole chunks of a corpus."""
        return cls(prefix, tuple(map(Place, chunks)), suffix, canonical_prefix)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each place."""
        return tuple(map(_TOKENS, self.places))

    @property
    def kept_behind(self) -> tuple[int, ...]:
        """The prefix behind which the chunks' caches are kept."""
        return self.prefix if self.canonical_prefix is None else self.canonical_prefix

    @cached_property
    def shared_prefix_rows(self) -> int:
        """How many tokens the prefix shares with the canonical one, whose KV serves for them."""
        return common_length(self.prefix, self.kept_behind)

    @cached_property
    def stored(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each place the chunk whose cache is used there, or None for text that is computed."""
        return tuple([place.stored for place in self.places])

    @property
    def exact_first(self) -> bool:
        """Whether an isolated cache is exact in the first place: it was computed behind this very prefix."""
        if self.canonical_prefix not in (None, self.prefix):
            return False
        return not self.places or self.places[0].is_chunk

    def composable(self) -> PromptLayout:
        """The same prompt as models with recurrent layers take it."""
        return replace(self, places=tuple([place.composable() for place in self.places]))

    def all_plain(self) -> PromptLayout:
        """The same prompt, with nothing taken from the store."""
        return replace(self, places=tuple([Place(tokens, PlaceOrigin.TEXT) for tokens in self.chunks]))

    def behind(self, rows: int) -> PromptLayout:
        """The same prompt with its first `rows` rows as the prefix; they cover more than the prefix and less than all."""
        places = list[Place]()
        for place, span in zip(self.places, self.chunk_spans, strict=True):
            if span.stop > rows:
                places.append(place.behind(max(0, rows - span.start)))
        suffix = self.suffix[max(0, rows - self.context.stop) :]
        return PromptLayout(self.token_ids[:rows], tuple(places), suffix, self.kept_behind)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in prompt order."""
        return (*self.prefix, *chain.from_iterable(self.chunks), *self.suffix)

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """`token_ids` as numbers, int64 `[rows]`."""
        import numpy as np

        return np.fromiter(self.token_ids, np.int64, self.rows)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the places begin in the prompt, and where the last one ends."""
        return tuple(accumulate(map(len, self.chunks), initial=len(self.prefix)))

    @cached_property
    def chunk_spans(self) -> tuple[Span, ...]:
        """Where each place lies in the prompt."""
        return tuple(map(Span, self.bounds, self.bounds[1:]))

    @property
    def context(self) -> Span:
        """All places together."""
        return Span(self.bounds[0], self.bounds[-1])

    @property
    def rows(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.token_ids)

    def chunk_starts(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the chunk of each context row, int64 positions `[rows]`, starts in the prompt, int64 `[rows]`."""
        import torch

        starts = torch.tensor(self.bounds[:-1]).to(rows.device, non_blocking=True)
        return starts[torch.bucketize(rows, starts, right=True) - 1]


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


STAGES = ("retrieve", "load", "reposition", "select", "recompute", "first_token")

Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount done, and the total.

Of a precompute: "chunk" in documents, "embed" in chunks, "restore" in caches, "encode" and "calibrate" in tokens, "solve" in
layers, "questions".
Of a fetch of weights: "download" in parts, and "wait", "verify", "convert" and "load", one step each.
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


class Stopwatch:
    """Seconds per stage, each exclusive of the stages nested in it, and in total since construction.

    On a GPU a stage ends when the device reaches its end; the host does not wait for that. clock: gives seconds.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._clock = clock
        self._running: list[str] = []
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._begin = clock()
        self._last = self._mark()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`; an enclosing stage pauses meanwhile."""
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def switch(self, name: str) -> None:
        """Charge the rest of the running stage to `name`."""
        self._charge()
        self._running[-1] = name

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage that has ended; waits for the device to get there."""
        seconds: dict[str, float] = {}
        for name, start, stop in self._spans:
            seconds[name] = seconds.get(name, 0.0) + _between(start, stop)
        return seconds

    def total(self) -> float:
        """Seconds since construction; waits for the device."""
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
        return self._clock() - self._begin

    def _charge(self) -> None:
        now = self._mark()
        if self._running:
            self._spans.append((self._running[-1], self._last, now))
        self._last = now

    def _mark(self) -> Mark:
        if self._device is None:
            return self._clock()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


Mark: TypeAlias = "float | torch.cuda.Event"


def _between(start: Mark, stop: Mark) -> float:
    """Seconds between two marks of one stopwatch."""
    if isinstance(start, float) and isinstance(stop, float):
        return stop - start
    assert not isinstance(start, float | int)
    assert not isinstance(stop, float | int)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
