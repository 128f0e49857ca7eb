"""Why text of a prompt was not reused, in a word for each part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from blend.layout import Span

Word = Literal["new", "edited", "too short", "evicted", "another model", "refused"]
NEW: Word = "new"
"""No prompt brought it before, or its cache is still to be computed."""
EDITED: Word = "edited"
"""It stands in known text that begins otherwise, or goes on otherwise; or behind an edit, and its rows may depend on that."""
TOO_SHORT: Word = "too short"
"""It is too short to be learned, or to save time."""
EVICTED: Word = "evicted"
"""It was known, and left for other text."""
OTHER_MODEL: Word = "another model"
"""Its caches are of another model."""
REFUSED: Word = "refused"
"""It is not learned: the budget has no room for it, the server learns nothing, or it is of another corpus."""


class ComputedPart(NamedTuple):
    """The tokens `start` to `stop - 1` of a prompt, and why they are computed."""

    start: int
    stop: int
    reason: Word


class PartsTokens(NamedTuple):
    """How many tokens were computed for this reason."""

    reason: Word
    tokens: int


def with_edited(parts: Iterable[ComputedPart], edited: Sequence[Span]) -> Iterator[ComputedPart]:
    """The parts, with text that was computed because of an edit in front of it. edited: this text; it is in order."""
    for part in parts:
        start = part.start
        for span in edited:
            if span.stop <= start or span.start >= part.stop:
                continue
            if span.start > start:
                yield part._replace(start=start, stop=span.start)
            start = span.stop
        if start < part.stop:
            yield part._replace(start=start)
    for span in edited:
        yield ComputedPart(*span, EDITED)


def tokens_by_reason(parts: Iterable[ComputedPart], reused: int) -> tuple[PartsTokens, ...]:
    """Tokens of the parts by reason, most first. reused: first rows of the prompt, which came from memory."""
    counts = Counter[Word]()
    for part in parts:
        counts[part.reason] += max(0, part.stop - max(part.start, reused))
    return tuple(PartsTokens(reason, tokens) for reason, tokens in counts.most_common() if tokens)
