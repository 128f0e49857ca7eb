"""Sorts a prompt's tokens by what earlier requests held: prefix, shifted, near or new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.census.memory import Earlier, PromptText, TextMemory
from blend.census.reading import Segment
from blend.census.tokens import Tokenize
from blend.serve.token_index import LEAST_RUN, Flags, Ids, TextRun, longest_first, stretches

CLASSES = ("prefix", "shifted", "near", "new")
PREFIX, SHIFTED, NEAR, NEW = range(len(CLASSES))
NEAR_SHARE = 0.5  # a text is an edit of earlier text if so much of it is known
_ONE_TEXT = 0.8  # a text is an edit of one earlier text if so much of what is known of it stands there in order
_RECENT_PARTS = 4  # last known texts whose latest requests are compared

Classes = NDArray[np.int8]


class EditedText(NamedTuple):
    """What is known of a new text.

    counterpart: the earlier text that it is an edit of; "" if little is known, or if it stands in several texts.
    """

    is_known: Flags
    counterpart: str


class Match(NamedTuple):
    """A prompt, compared with what earlier requests held.

    Attributes:
        parts: its texts.
        starts: where each begins, and the end of the last one.
        classes: of each token, `[tokens]`.
        prefix: tokens of the longest shared prefix.
        earlier: the request that it resembles most, or None.
        edited: what is known of its new texts, by their numbers.

    """

    parts: Sequence[PromptText]
    starts: Sequence[int]
    classes: Classes
    prefix: int
    earlier: Earlier | None
    edited: dict[int, EditedText]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.classes)

    def lost(self, number: int) -> int:
        """Tokens of a text that are known, and in no prefix."""
        classes = self.classes[self.starts[number] : self.starts[number + 1]]
        return int(np.count_nonzero(classes == SHIFTED))


def parts_of(segments: Iterable[Segment], memory: TextMemory, tokenize: Tokenize) -> Iterator[PromptText]:
    """The texts of a request with their token ids; a known text is not tokenized again."""
    for role, text in segments:
        entry = memory.known(text)
        if entry is None:
            yield PromptText(role, text, tokenize(text), False)
        else:
            yield PromptText(role, entry.text, memory.index.tokens(text), True)


def match(parts: Sequence[PromptText], source: str, memory: TextMemory, prefix: int, prefix_of: int | None) -> Match:
    """Compare a prompt with earlier requests.

    Args:
        parts: Its texts.
        source: Its session.
        memory: The earlier requests.
        prefix: Tokens of the longest prefix in blocks.
        prefix_of: The number of the latest request that began with them.

    """
    lengths = [len(part.ids) for part in parts]
    starts = [0, *accumulate(lengths)]
    spans = [slice(start, stop) for start, stop in pairwise(starts)]
    earlier = _candidates(parts, memory, prefix_of)
    common = [_common_tokens(parts, request, memory) for request in earlier]
    prefix = max(prefix, *common, 0)
    is_known = np.zeros(starts[-1], np.bool_)
    edited = dict[int, EditedText]()
    for number, part in enumerate(parts):
        if part.is_known:
            is_known[spans[number]] = True
        elif starts[number + 1] > prefix:
            edited[number] = _edited(part.ids, memory)
            is_known[spans[number]] = edited[number].is_known
    is_known[:prefix] = True
    for start, stop in stretches(is_known):
        if stop - start < LEAST_RUN and start >= prefix:
            is_known[start:stop] = False
    classes = np.where(is_known, SHIFTED, NEW).astype(np.int8)
    classes[:prefix] = PREFIX
    for number in edited:
        _mark_gaps(classes[spans[number]], is_known[spans[number]])
    most_alike = _most_alike(parts, source, earlier)
    return Match(parts, starts, classes, prefix, most_alike, edited)


def _mark_gaps(classes: Classes, is_known: Flags) -> None:
    """Mark what is new in front of known tokens of an edited text; text that was added at its end stays new."""
    places = np.flatnonzero(is_known)
    if len(places) >= NEAR_SHARE * len(is_known):
        before = classes[: int(places.max(initial=0))]
        before[before == NEW] = NEAR


def _candidates(parts: Sequence[PromptText], memory: TextMemory, prefix_of: int | None) -> list[Earlier]:
    """Earlier requests that this one may go on from: with its prefix, its first and last texts, or its longest one."""
    entries = [(len(part.ids), entry) for part in parts if (entry := memory.known(part.text)) is not None]
    longest = sorted(entries, key=lambda entry: entry[0])[-1:]
    numbers = {prefix_of, *(entry.last for _, entry in (*entries[:1], *entries[-_RECENT_PARTS:], *longest))}
    return [request for number in numbers if (request := memory.request(number)) is not None]


def _common_tokens(parts: Sequence[PromptText], earlier: Earlier, memory: TextMemory) -> int:
    """Tokens that both requests begin with."""
    tokens = 0
    for part, text in zip(parts, earlier.texts, strict=False):
        if part.text != text:
            before = memory.index.tokens(text)
            least = min(len(part.ids), len(before))
            differs = np.append(part.ids[:least] != before[:least], True)
            return tokens + int(differs.argmax())
        tokens += len(part.ids)
    return tokens


def _most_alike(parts: Sequence[PromptText], source: str, earlier: Iterable[Earlier]) -> Earlier | None:
    """The request of the same session with most tokens of the same texts, else of any; of several the latest one."""

    def likeness(request: Earlier) -> tuple[bool, int, int]:
        texts = set(request.texts)
        tokens = sum(len(part.ids) for part in parts if part.text in texts)
        return request.source == source, tokens, request.number

    return max(earlier, key=likeness, default=None)


def _edited(ids: Ids, memory: TextMemory) -> EditedText:
    """Find the runs of a new text in earlier texts."""
    free = np.ones(len(ids), np.bool_)
    runs = memory.index.runs(ids) if len(ids) >= LEAST_RUN else []
    longest_first(runs, free)
    tokens = int(np.count_nonzero(~free))
    is_edit = tokens >= NEAR_SHARE * len(ids)
    counterpart = _counterpart(runs, tokens) if is_edit else ""
    return EditedText(~free, counterpart)


def _counterpart(runs: Sequence[TextRun[str]], known_tokens: int) -> str:
    """The earlier text in which nearly all known tokens stand in order, or ""."""
    lengths = Counter[str]()
    ends: dict[str, tuple[int, int]] = {}
    for run in sorted(runs, key=lambda run: run.start):
        stop, place = ends.get(run.name, (0, 0))
        overlap = max(0, stop - run.start)
        if run.first + overlap >= place and run.length > overlap:
            lengths[run.name] += run.length - overlap
            ends[run.name] = (run.stop, run.first + run.length)
    longest = lengths.most_common(1)
    return longest[0][0] if longest and longest[0][1] >= _ONE_TEXT * known_tokens else ""
