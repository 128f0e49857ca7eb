"""How a prompt edits an earlier one of its end user, and which rows of the text behind the edits are still right.

Rows behind an edit have read the text that it took out: a row of a table may say which entry "our team" is. Nothing in the
prompt tells which rows did, so by default the text behind an edit is computed. It moves only on evidence: when the same words
changed before, the rows behind them were computed for both versions and compared. A row that was the same in both is
*independent* of these words. It moves when they change again, if they are numbers, such as a clock's, and if its line does not
hold one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blend.layout import Place, PlaceOrigin, PromptLayout, Span, Tokens, common_length
from blend.serve.token_index import Flags, TextRun, TokenIndex, longest_first

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache, LayerRotation
    from blend.types import ChunkCache

LEAST_SHARE = 0.5  # of a prompt's places that another one must hold; else it is another conversation
MOST_CHANGED = 256  # tokens of an edit, before or after, that are compared token by token
MOST_RUNS = 512  # of equal text that are put in order
LEAST_INDEPENDENT = 0.5  # of the rows that could move; else all are computed, and compared anew
BOUND = 0.05  # relative change of a row's values up to which it counts as the same; measured in docs/study.md
_AROUND = 8  # tokens on each side of a change in which its words begin and end
LINE = 32  # tokens behind a word that belong to its line at most

UNKNOWN, INDEPENDENT, DEPENDENT = range(3)
"""What is known of a row: nothing, or whether it depends on the words that change."""

States = NDArray[np.int8]
Spell = Callable[[Sequence[int]], list[str]]
"""Gives what each token id spells."""


class EditEvidence(NamedTuple):
    """What the last edits of a conversation have shown, for each token of a prompt and its answer.

    Attributes:
        varied: bool `[tokens]`, the tokens that were others in an earlier prompt.
        rows: `[tokens]`, whether each row depends on the varied tokens in front of it.

    """

    varied: Flags
    rows: States

    @classmethod
    def nothing(cls, tokens: int) -> EditEvidence:
        """No edit was seen."""
        return cls(np.zeros(tokens, np.bool_), np.full(tokens, UNKNOWN, np.int8))

    def extended(self, tokens: int) -> EditEvidence:
        """The same for a text that goes on, with so many tokens in all; what follows is unknown."""
        length = min(tokens, len(self.rows))
        longer = EditEvidence.nothing(tokens)
        longer.varied[:length] = self.varied[:length]
        longer.rows[:length] = self.rows[:length]
        return longer


class Hunk(NamedTuple):
    """Tokens `old` of the earlier prompt that became tokens `new`; either may be empty."""

    old: slice
    new: slice

    @property
    def tokens(self) -> int:
        """The longer side."""
        longest: int = max(self.old.stop - self.old.start, self.new.stop - self.new.start)
        return longest


class Edit(NamedTuple):
    """A prompt that edits an earlier one.

    Attributes:
        layout: the prompt, behind the rows that are reused.
        earlier: the token ids of the earlier prompt and its answer.
        source: int64 `[rows]`, the row of the earlier prompt that each row was, or -1.
        in_order: the same of rows that stand in the same order in both prompts; -1 for others, such as a text that comes again.
        moving: each place that stands as a whole in the earlier prompt, with its first row there.

    """

    layout: PromptLayout
    earlier: Tokens
    source: NDArray[np.int64]
    in_order: NDArray[np.int64]
    moving: Mapping[int, int]

    @property
    def begin(self) -> int:
        """The first row of the earlier prompt that could move."""
        return min(self.moving.values())

    @property
    def end(self) -> int:
        """Behind the last one."""
        return max(first + len(self.layout.places[number].tokens) for number, first in self.moving.items())

    @property
    def spans(self) -> list[Span]:
        """Where the rows that could move stand in the prompt."""
        return [self.layout.chunk_spans[number] for number in self.moving]

    @property
    def rows(self) -> int:
        """How many rows could move."""
        lengths = [span.stop - span.start for span in self.spans]
        return sum(lengths)

    @property
    def same(self) -> int:
        """First rows that both prompts share."""
        return common_length(self.layout.token_ids, self.earlier)

    def is_of_history(self, history: int) -> bool:
        """Whether this is an earlier conversation with edits, and not new text that holds parts of it.

        history: first rows of the prompt, up to its last message; 0 in a new conversation. What is pasted anew is no history.
        """
        in_order = sum(self.layout.chunk_spans[number].length for number in self._ordered)
        return self.same < history and in_order >= LEAST_SHARE * self.layout.context.length

    @property
    def edited(self) -> float:
        """Tokens that one of the prompts has in front of moved rows and the other lacks, for each moved row."""
        matched = self.source[self.same : self.layout.chunk_spans[max(self.moving)].stop]
        inserted = int(np.count_nonzero(matched < 0))
        staying = int(np.count_nonzero((matched >= self.same) & (matched < self.end)))
        return (inserted + max(0, self.end - self.same - staying)) / self.rows

    def moved(self) -> PromptLayout:
        """The prompt with the places that move."""
        places = list(self.layout.places)
        for number, first in self.moving.items():
            places[number] = Place(places[number].tokens, PlaceOrigin.MOVED, first=first - self.begin)
        return self._with(places)

    def computed(self) -> PromptLayout:
        """The prompt with all text to compute, except chunks of a corpus: these have read nothing but their own text."""
        places = list(self.layout.places)
        for number, place in enumerate(places):
            if place.origin is not PlaceOrigin.CORPUS:
                places[number] = Place(place.tokens, PlaceOrigin.TEXT)
        return self._with(places)

    def proven(self) -> PromptLayout:
        """The prompt with the places that move in their order, and all other text to compute, except chunks of a corpus."""
        places = list(self.computed().places)
        moved = self.moved().places
        for number in self._ordered:
            places[number] = moved[number]
        return self._with(places)

    def _with(self, places: Sequence[Place]) -> PromptLayout:
        layout = self.layout
        return PromptLayout(layout.prefix, tuple(places), layout.suffix, layout.canonical_prefix)

    @property
    def _ordered(self) -> list[int]:
        """The places that move in their order."""
        spans = self.layout.chunk_spans
        return [number for number, first in self.moving.items() if self.in_order[spans[number].start] == first]

    def hunks(self, spell: Spell) -> list[Hunk]:
        """The words that changed in front of rows that move in their order."""
        hunks = list[Hunk]()
        old = new = self.same
        last = self.layout.chunk_spans[max(self._ordered, default=0)].stop
        for start, stop in _runs(self.in_order, self.same, last):
            first = int(self.in_order[start])
            if start > new or first != old:
                # A text that repeats itself may go on with rows that stand in front of `old`: they count as changed.
                between = Hunk(slice(min(old, first), max(old, first)), slice(new, start))
                hunk = _to_words(self.earlier, self.layout.token_ids, between, spell)
                hunks += _changed(self.earlier, self.layout.token_ids, hunk, spell)
            old, new = first + stop - start, stop
        return hunks

    def sound(self, evidence: EditEvidence, spell: Spell) -> Flags | None:
        """Which rows of the earlier prompt, from `begin` to `end`, are right in this prompt, bool `[rows]`.

        Args:
            evidence: what is known of the earlier prompt.
            spell: what tokens spell.

        Returns:
            The rows, or None if the evidence does not suffice: a word changes that did not change before or is no number,
            a sign changes, or too few rows are independent.

        """
        hunks = self.hunks(spell)
        if not all(_has_varied(hunk, evidence.varied) for hunk in hunks):
            return None
        words = set[str]()
        for hunk in hunks:
            before = "".join(spell(self.earlier[hunk.old]))
            after = "".join(spell(self.layout.token_ids[hunk.new]))
            if _WORD.sub("", before) != _WORD.sub("", after):  # a sign, or a blank: another number of words
                return None
            words |= _words(spell, self.earlier, hunk.old) | _words(spell, self.layout.token_ids, hunk.new)
        if not all(any(character.isdigit() for character in word) for word in words):
            return None
        sound: Flags = evidence.rows == INDEPENDENT
        sound[_lines_with(words, spell(self.earlier))] = False
        firsts = [(self.moving[number], len(self.layout.places[number].tokens)) for number in self._ordered]
        rows = [slice(first, first + length) for first, length in firsts]
        if sum(int(np.count_nonzero(sound[part])) for part in rows) < LEAST_INDEPENDENT * self.rows:
            return None
        return sound[self.begin : self.end]


def edit_of(layout: PromptLayout, earlier: Tokens) -> Edit | None:
    """How the prompt edits an earlier one; None if that holds too little of it.

    Chunks of a corpus do not count: their caches give the same answer whatever was asked before.
    """
    index = TokenIndex[int]()
    index.update((), {0: earlier})
    ids = np.array(layout.token_ids, np.int32)
    source = np.full(len(ids), -1)
    in_order = np.full(len(ids), -1)
    runs = longest_first(index.runs(ids), np.ones(len(ids), np.bool_))
    ordered = _longest_chain(runs)
    for number, run in enumerate(runs):
        source[run.rows] = np.arange(run.first, run.first + run.length)
        if number in ordered:
            in_order[run.rows] = source[run.rows]
    moving = dict[int, int]()
    for number, span in enumerate(layout.chunk_spans):
        was = source[span.start : span.stop]
        is_whole = len(was) and was[0] >= 0 and (np.diff(was) == 1).all()
        if is_whole and layout.places[number].origin is not PlaceOrigin.CORPUS:
            moving[number] = int(was[0])
    edit = Edit(layout, earlier, source, in_order, moving)
    if not moving or edit.rows < LEAST_SHARE * layout.context.length:
        return None
    return edit


def _longest_chain(runs: Sequence[TextRun[int]]) -> set[int]:
    """Which of these runs, in the order of the prompt, stand in the same order in the earlier prompt; most tokens together."""
    best = list[tuple[int, int]]()  # tokens of the best chain that ends with each run, and the run before it
    for number, run in enumerate(runs[:MOST_RUNS]):
        before = [
            (best[other][0], other) for other in range(number) if runs[other].first + runs[other].length <= run.first
        ]
        tokens, previous = max(before, default=(0, -1))
        best.append((tokens + run.length, previous))
    chain = set[int]()
    at = max(range(len(best)), key=lambda number: best[number][0], default=-1)
    while at >= 0:
        chain.add(at)
        at = best[at][1]
    return chain


def shown(
    edit: Edit, evidence: EditEvidence | None, computed: Flags, changes: NDArray[np.float32], tokens: int, spell: Spell
) -> EditEvidence:
    """What an edit shows of its prompt, once that was computed.

    Args:
        edit: the edit.
        evidence: by which rows moved; None if none did, and what was known counts no more.
        computed: bool `[rows]`, the rows that were computed.
        changes: `[rows]`, how much each row changed that stands in both prompts (see `value_changes`); NaN for the others.
        tokens: of the prompt and its answer.
        spell: what tokens spell.

    """
    after = EditEvidence.nothing(tokens)
    source = edit.in_order
    in_both = np.flatnonzero(source >= 0)
    if evidence is not None:
        after.varied[in_both] = evidence.varied[source[in_both]]
        after.rows[in_both] = evidence.rows[source[in_both]]
    for hunk in edit.hunks(spell):
        after.varied[hunk.new] = True
    compared = np.flatnonzero(computed & ~np.isnan(changes))
    return with_changes(after, compared, changes[compared])


def with_changes(evidence: EditEvidence, positions: NDArray[np.int64], changes: NDArray[np.float32]) -> EditEvidence:
    """The evidence with what is known now of these rows: how much each changed with the varied tokens.

    A row that once depended on them keeps to it: it may do so again.
    """
    rows = evidence.rows.copy()
    is_unknown = rows[positions] == UNKNOWN
    rows[positions[is_unknown]] = np.where(changes[is_unknown] <= BOUND, INDEPENDENT, DEPENDENT)
    return evidence._replace(rows=rows)


def value_changes(
    cache: BlendedCache,
    earlier: ChunkCache,
    positions: NDArray[np.int64],
    rows: NDArray[np.int64],
    rotations: Sequence[LayerRotation],
) -> NDArray[np.float32]:
    """How much the values of each row differ from those of an earlier prompt's row, float32 `[rows]`.

    In each layer the norm of the difference over all heads, as a share of the earlier norm; of these the largest.

    Args:
        cache: of the prompt.
        earlier: rows of the earlier prompt.
        positions: int64 `[rows]`, where the rows stand in `cache`.
        rows: int64 `[rows]`, where they stand in `earlier`.
        rotations: of the decoder; dimensions that turn with the position are left out.

    """
    import torch

    at = torch.from_numpy(positions).to(earlier.values[0].device)
    from_ = torch.from_numpy(rows).to(earlier.values[0].device)
    largest = torch.zeros(len(positions), device=at.device)
    for layer, rotation in enumerate(rotations):
        if not rotation.width:
            continue
        fresh = cache.view(layer)[1][0].index_select(1, at).float()
        before = earlier.values[layer].index_select(1, from_).float()
        if rotation.values is not None:
            still = rotation.values.layout.still
            fresh, before = (torch.cat([*still(part)], -1) for part in (fresh, before))
        if not before.shape[-1]:
            continue
        difference = torch.linalg.vector_norm(fresh - before, dim=(0, 2))
        size = torch.linalg.vector_norm(before, dim=(0, 2)).clamp_min(1e-6)
        largest = torch.maximum(largest, difference / size)
    return largest.cpu().numpy()


class Spelling:
    """What token ids spell, one by one; it remembers what it was asked. tokenizer: None spells nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[list[int]], str] = (lambda ids: "") if tokenizer is None else tokenizer.decode
        # Some tokenizers drop the blank in front of a text's first token, so each is spelled behind another one.
        self._before = [] if tokenizer is None else tokenizer.encode("a", add_special_tokens=False)[:1]
        self._left_out = len(self._decode(self._before))
        self._spelled: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The text of each id."""
        spelled = self._spelled
        for token in {*ids} - spelled.keys():
            spelled[token] = self._decode([*self._before, token])[self._left_out :]
        return [spelled[token] for token in ids]


def _runs(source: NDArray[np.int64], start: int, stop: int) -> Iterator[Span]:
    """The rows from `start` to `stop - 1` that stand in the earlier prompt one after another."""
    begin = start
    for at in range(start, stop + 1):
        goes_on = at < stop and source[at] >= 0 and at > begin and source[at] == source[at - 1] + 1
        if goes_on:
            continue
        if at > begin and source[begin] >= 0:
            yield Span(begin, at)
        begin = at


def _to_words(old: Tokens, new: Tokens, hunk: Hunk, spell: Spell) -> Hunk:
    """The hunk with all of the words that it begins and ends in; what is added is the same on both sides."""

    def before(count: int) -> bool:
        return any(_is_inside(spell, ids, part.start - count) for ids, part in ((old, hunk.old), (new, hunk.new)))

    def behind(count: int) -> bool:
        return any(_is_inside(spell, ids, part.stop + count) for ids, part in ((old, hunk.old), (new, hunk.new)))

    left = next(count for count in range(_AROUND + 1) if count == _AROUND or not before(count))
    right = next(count for count in range(_AROUND + 1) if count == _AROUND or not behind(count))
    return Hunk(
        slice(max(0, hunk.old.start - left), hunk.old.stop + right),
        slice(max(0, hunk.new.start - left), hunk.new.stop + right),
    )


def _is_inside(spell: Spell, ids: Tokens, at: int) -> bool:
    """Whether the boundary in front of the token at `at` is inside a word."""
    if not 0 < at < len(ids):
        return False
    before, behind = spell(ids[at - 1 : at + 1])
    return before[-1:].isalnum() and behind[:1].isalnum()


def _changed(old: Tokens, new: Tokens, hunk: Hunk, spell: Spell) -> Iterator[Hunk]:
    """The words of a hunk that differ; all of a long one."""
    if hunk.tokens > MOST_CHANGED:
        yield hunk
        return
    words_before = _word_spans(spell(old[hunk.old]), hunk.old.start)
    words_after = _word_spans(spell(new[hunk.new]), hunk.new.start)
    texts_before = [old[slice(*word)] for word in words_before]
    texts_after = [new[slice(*word)] for word in words_after]
    if len(texts_before) == len(texts_after):  # a clock: each number in its place
        for before, after, *texts in zip(words_before, words_after, texts_before, texts_after, strict=True):
            if texts[0] != texts[1]:
                yield Hunk(slice(*before), slice(*after))
        return
    ends_before = [*(word.start for word in words_before), hunk.old.stop]
    ends_after = [*(word.start for word in words_after), hunk.new.stop]
    matcher = SequenceMatcher(None, texts_before, texts_after, autojunk=False)
    for kind, first, last, to_first, to_last in matcher.get_opcodes():
        if kind != "equal":
            yield Hunk(slice(ends_before[first], ends_before[last]), slice(ends_after[to_first], ends_after[to_last]))


def _word_spans(pieces: Sequence[str], start: int) -> list[Span]:
    """Tokens that spell a word together, and single ones between words. start: position of the first token."""
    spans = list[Span]()
    for number, piece in enumerate(pieces):
        goes_on = number > 0 and piece[:1].isalnum() and pieces[number - 1][-1:].isalnum()
        if goes_on:
            spans[-1] = Span(spans[-1].start, start + number + 1)
        else:
            spans.append(Span(start + number, start + number + 1))
    return spans


def _has_varied(hunk: Hunk, varied: Flags) -> bool:
    """Whether every token of the change was varied before. Inserted tokens must stand beside a varied one."""
    if hunk.tokens > MOST_CHANGED:
        return False
    start, stop = hunk.old.start, hunk.old.stop
    if start == stop:
        return bool(varied[max(0, start - 1) : start + 1].any())
    return bool(varied[start:stop].all())


def _words(spell: Spell, ids: Tokens, changed: slice) -> set[str]:
    """The words that a change is part of."""
    begin = max(0, changed.start - _AROUND)
    pieces = spell(ids[begin : changed.stop + _AROUND])
    start = sum(map(len, pieces[: changed.start - begin]))
    stop = start + sum(map(len, pieces[changed.start - begin : changed.stop - begin]))
    text = "".join(pieces)
    return {word.group() for word in _WORD.finditer(text) if word.start() < stop and word.end() > start}


_WORD = re.compile(r"\w+")


def _lines_with(words: set[str], pieces: Sequence[str]) -> NDArray[np.int64]:
    """The tokens of each line from one of the words on."""
    if not words:
        return np.empty(0, np.int64)
    ends = np.cumsum([len(piece) for piece in pieces])
    text = "".join(pieces)
    breaks = np.flatnonzero(["\n" in piece for piece in pieces])
    tokens = set[int]()
    pattern = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    for match in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", text):
        start = int(np.searchsorted(ends, match.start(), side="right"))
        last = int(np.searchsorted(ends, match.end(), side="left"))
        at = int(np.searchsorted(breaks, last))
        stop = int(breaks[at]) + 1 if at < len(breaks) else len(pieces)
        tokens.update(range(start, min(stop, last + LINE)))
    return np.array(sorted(tokens), np.int64)
