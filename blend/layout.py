"""The layout of a prompt: token ids in places, and where each lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter, eq, index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from blend.errors import PromptError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


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


Tokens = tuple[int, ...]
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor"
"""Token ids as tokenizers return them."""


def token_ids_of(ids: TokenIds, name: str) -> Tokens:
    """Token ids as a tuple of Python's own numbers. name: what they are, for an error.

    Raises `PromptError` for anything else, such as text, or a batch with one row.
    """
    if isinstance(ids, tuple) and set(map(type, ids)) <= {int}:
        tokens: Tokens = ids
    elif isinstance(ids, (str, bytes)):
        raise PromptError(f"{name} is text: tokenize it first, tokenizer(text, add_special_tokens=False).input_ids")
    else:
        tokens = _indices(ids.tolist() if hasattr(ids, "tolist") else ids, name)
    if min(tokens, default=0) < 0:
        raise PromptError(f"{name} holds a number below 0, which is no token id")
    return tokens


def _indices(numbers: Any, name: str) -> Tokens:
    try:
        ids = list(numbers)
        if bool in map(type, ids):
            raise TypeError
        return tuple(map(index, ids))
    except TypeError:
        raise PromptError(f"{name} is no list of token ids, such as [5, 6, 7]; of a batch, take one row") from None


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
        cls, prefix: TokenIds, chunks: Iterable[TokenIds], suffix: TokenIds, canonical_prefix: TokenIds | None = None
    ) -> PromptLayout:
        """A prompt whose places are whole chunks of a corpus.

        Token ids come as tokenizers return them: lists, tuples, and numpy arrays or torch tensors `[tokens]`. Raises
        `PromptError` for text that was not tokenised, for batches, and for numbers that are no token ids.

        >>> PromptLayout.of_chunks([1, 2], [[5, 6], [7]], [3]).token_ids
        (1, 2, 5, 6, 7, 3)
        """
        canonical = None if canonical_prefix is None else token_ids_of(canonical_prefix, "canonical_prefix")
        places = [Place(token_ids_of(chunk, f"chunk {number}")) for number, chunk in enumerate(chunks)]
        return cls(token_ids_of(prefix, "prefix"), tuple(places), token_ids_of(suffix, "suffix"), canonical)

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
