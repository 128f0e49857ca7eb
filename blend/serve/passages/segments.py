"""Splits messages into ordinary text, pasted chunks of one corpus, and long new passages worth a cache.

A passage to learn depends on its own text alone, wherever it is pasted.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from blend.serve.passages.known import FoundChunk, KnownTexts
from blend.serve.passages.rendered import Renderer
from blend.serve.types import Message
from blend_retrieval import Chunk

_MOST_OF_A_FENCE = 2048  # characters; longer code is divided at its blank lines
_MOST_OF_A_HEADING = 80
_HEADINGS = 2  # that may stand over a paragraph
_MOST_BETWEEN = 8  # characters between a heading and what it stands over

_GAP = re.compile(
    r"""(?:^|(?<=\n))  # at the start of a line:
    (?:
        # lines that are blank, a ruler, a tag or quotation marks; nothing is tried twice, lines may be long
        (?:[^\S\n]*+(?:(?:([-=*_])\1{2,}+|</?[A-Za-z][^<>\n]{0,80}+>|"{3}|'{3})[^\S\n]*+)?(?:\n|\Z))++
        | (?=\#{2,6}\ )  # or nothing, before a Markdown heading; a single # may as well open a comment
    )""",
    re.VERBOSE,
)
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)
_NAMES = "document|doc|passage|source|context|chunk|text|reference|result|snippet|excerpt|article"
_LABEL = re.compile(
    rf"(?:[-*+>]\s+)?(?:(?:{_NAMES})\s*[#(\[]?\d{{1,4}}[)\]]?[.:)]?|[(\[]\d{{1,4}}[)\]][.:]?|\d{{1,4}}[.:)])(?:\s+|\Z)",
    re.IGNORECASE,
)
_MARKDOWN_HEADING = re.compile(r"#{1,6}\s")
_ENDS = ".!?:;,…。！？：；，)]}>\"'`|"


class Block(NamedTuple):
    """Characters `start` to `stop - 1` of a text, blanks around them left out."""

    start: int
    stop: int


def paragraphs(text: str, start: int, stop: int) -> Iterator[Block]:
    """The paragraphs between two places of a text, in order, each with the headings over it.

    Blank lines, rulers, tags and Markdown headings divide; a short fence of code is not divided. A number in front, as chains
    give to what they paste ("[1] ", "Document 2:"), belongs to none, for it changes with the order.
    """
    above: deque[Block] = deque(maxlen=_HEADINGS)
    for block in _unlabelled(text, start, stop):
        if above and block.start - above[-1].stop > _MOST_BETWEEN:
            above.clear()
        if _is_heading(text, block):
            above.append(block)
            continue
        yield Block(above[0].start if above else block.start, block.stop)
        above.clear()


def _unlabelled(text: str, start: int, stop: int) -> Iterator[Block]:
    for block in _blocks(text, start, stop):
        label = _LABEL.match(text, block.start, block.stop)
        bare = stripped(text, label.end() if label else block.start, block.stop)
        if bare.stop > bare.start:
            yield bare


def _blocks(text: str, start: int, stop: int) -> Iterator[Block]:
    """What stands between the gaps, those in short fences of code apart."""
    fences, fence, begin = _fences(text, start, stop), Block(start, start), start
    for gap in _GAP.finditer(text, start, stop):
        while fence.stop <= gap.start() and fence.stop < stop:
            fence = next(fences, Block(stop, stop))
        if gap.start() <= fence.start:
            yield stripped(text, begin, gap.start())
            begin = gap.end()
    yield stripped(text, begin, stop)


def _fences(text: str, start: int, stop: int) -> Iterator[Block]:
    """Code between two lines of the same marks, as far as it is short: an opening line without an end spoils little."""
    opening: re.Match[str] | None = None
    for line in _FENCE.finditer(text, start, stop):
        if opening is None or line.end() - opening.start() > _MOST_OF_A_FENCE:
            opening = line
        elif line[1] == opening[1] and not line[2].strip():
            yield Block(opening.start(), line.end())
            opening = None


def stripped(text: str, start: int, stop: int) -> Block:
    """A stretch of a text without blanks at its ends; it copies its characters once."""
    inside = text[start:stop]
    bare = inside.lstrip()
    start += len(inside) - len(bare)
    return Block(start, start + len(bare.rstrip()))


def _is_heading(text: str, block: Block) -> bool:
    """Whether it is one short line that opens as a Markdown heading or does not end as a sentence does."""
    if block.stop - block.start > _MOST_OF_A_HEADING:
        return False
    line = text[block.start : block.stop]
    return "\n" not in line and (_MARKDOWN_HEADING.match(line) is not None or line[-1] not in _ENDS)


LONG_TOKENS = 256  # shorter messages are talk, of which nothing is learned
LEAST_PASSAGE = 48  # tokens
MOST_PASSAGE = 512
_FILLED = 448  # tokens that a piece of a long paragraph aims at
_GLANCE = 2048  # characters by which the density of a long paragraph is judged
_LONG_CHARACTERS = 8 * MOST_PASSAGE  # a paragraph beyond is not tokenised in one piece
_WINDOW = 16  # pieces that the splitter is shown at a time: for each it reads all that it is shown
_LONGEST_LEARNED = 1 << 20  # of a message; what is longer takes more time to divide than it is worth


def is_long(text: str, renderer: Renderer) -> bool:
    """Whether passages of a message are to be learned: it is neither talk nor out of all proportion."""
    if not LONG_TOKENS // 4 < len(text) <= _LONGEST_LEARNED:
        return False
    glance = text[: 16 * LONG_TOKENS]
    return len(glance) < len(text) or renderer.template.count(glance) > LONG_TOKENS


def passages(text: str, start: int, stop: int, renderer: Renderer) -> Iterator[Block]:
    """Stretches of a text between two places that are passages, in order; all else is too short to be one.

    Each is a paragraph or, of one longer than `MOST_PASSAGE` tokens, a piece of it; where it starts and ends depends on nothing
    outside of the paragraph.
    """
    for block in paragraphs(text, start, stop):
        yield from _fitting(text, block, renderer)


def _fitting(text: str, block: Block, renderer: Renderer) -> Iterator[Block]:
    """The block, or its pieces, piece by piece until they fit."""
    waiting = [block]
    while waiting:
        one = waiting.pop()
        inside = text[one.start : one.stop]
        if len(inside.encode(errors="replace")) < LEAST_PASSAGE:  # no token is less than a byte
            continue
        glance = inside if len(inside) <= _LONG_CHARACTERS else inside[:_GLANCE]
        tokens = len(renderer.render("", glance).ids)
        if len(glance) < len(inside) or tokens > MOST_PASSAGE:
            capacity = min(_GLANCE, len(glance) * _FILLED // max(tokens, 1), len(inside) - 1)
            waiting.extend(reversed(list(_pieces(text, one, max(capacity, 1)))))
        elif tokens >= LEAST_PASSAGE:
            yield one


def _pieces(text: str, block: Block, capacity: int) -> Iterator[Block]:
    """Cut at the ends of lines and sentences, from the block's own start on."""
    from semantic_text_splitter import MarkdownSplitter

    split, start, window = MarkdownSplitter(capacity).chunk_indices, block.start, _WINDOW * capacity
    while start < block.stop:
        found = split(text[start : min(start + window, block.stop)])
        if start + window < block.stop:  # the last piece may go on behind the window; there the next one begins
            found, rest = found[:-1], found[-1:]
            following = start + rest[0][0] if found else start + window
        else:
            following = block.stop
        # What Python calls blank, such as a unit separator, the splitter need not; a chunk's text has none at its ends.
        yield from (stripped(text, start + at, start + at + len(piece)) for at, piece in found)
        start = following


_LONGEST_MESSAGE = 1 << 22  # what is longer fits into no model's context

Kind = Literal["text", "pasted", "learned"]


class Segment(NamedTuple):
    """A piece of a message.

    kind: "text" is ordinary, and has neither ids nor a chunk: it is tokenised together with what stands beside it. "pasted" is
    a known chunk, "learned" a passage that has been or is to be learned. ids: what it is in the prompt. whole: ids of the chunk
    whose cache it is in, of which it is tokens `first` to `first + len(ids) - 1`. chunk: the known one.
    """

    text: str
    ids: tuple[int, ...] = ()
    kind: Kind = "text"
    whole: tuple[int, ...] = ()
    first: int = 0
    chunk: Chunk | None = None


class _Placed(NamedTuple):
    """A segment that is no ordinary text, and where it stands."""

    start: int
    stop: int
    segment: Segment


def segments(text: str, known: KnownTexts, *, learned_on: bool) -> list[Segment]:
    """A message cut at the known chunks that were pasted into it and, in a long one, at passages to be learned.

    The segments' texts, one after another, are the message. A passage to be learned is kept as a chunk without a title is, so
    that it is the same one when it comes as a document. Takes time linear in the message's length, whatever it holds.
    """
    if len(text) > _LONGEST_MESSAGE:
        return [Segment(text)]
    found = list(_filled(text, [_pasted(text, one) for one in known.find(text)]))
    return with_learned(text, found, known.renderer) if learned_on else found


def with_learned(text: str, parts: Sequence[Segment], renderer: Renderer) -> list[Segment]:
    """The segments of a message, where it is a long one with passages to be learned out of its ordinary text."""
    if not is_long(text, renderer):
        return list(parts)
    pieces = list[_Placed]()
    for start, stop, part in placed(parts):
        pieces.extend(_learned(text, start, stop, renderer) if part.kind == "text" else [_Placed(start, stop, part)])
    return list(_filled(text, pieces))


def placed(parts: Sequence[Segment]) -> Iterator[tuple[int, int, Segment]]:
    """Segments of a message, each with the characters `start` to `stop - 1` that it is."""
    start = 0
    for part in parts:
        yield start, start + len(part.text), part
        start += len(part.text)


def _pasted(text: str, found: FoundChunk) -> _Placed:
    part = found.part
    segment = Segment(text[found.start : found.stop], part.ids, "pasted", part.whole, part.first, found.chunk)
    return _Placed(found.start, found.stop, segment)


def _learned(text: str, start: int, stop: int, renderer: Renderer) -> Iterator[_Placed]:
    """The passages of a run of ordinary text, each with as much of a chunk's closing blank line as follows it."""
    for block in passages(text, start, stop, renderer):
        inside, end = text[block.start : block.stop], block.stop
        while end < min(stop, block.stop + 2) and text[end] == "\n":
            end += 1
        part = renderer.part("", inside, 0, end - block.start)
        if part is not None:
            end = block.start + part.stop
            segment = Segment(text[block.start : end], part.ids, "learned", part.whole, part.first)
            yield _Placed(block.start, end, segment)


def _filled(text: str, pieces: list[_Placed]) -> Iterator[Segment]:
    """With the ordinary text between them."""
    reached = 0
    for piece in pieces:
        if piece.start > reached:
            yield Segment(text[reached : piece.start])
        yield piece.segment
        reached = piece.stop
    if reached < len(text):
        yield Segment(text[reached:])


class CutMessages(NamedTuple):
    """corpus: whose chunks the segments of the kind "pasted" are. messages: the segments of each message."""

    corpus: str
    messages: list[list[Segment]]


def cut(messages: Sequence[Message], known: Mapping[str, KnownTexts], *, learning: bool) -> CutMessages:
    """Messages cut at the chunks of the corpus of which they hold most tokens.

    known: the texts of corpora by name; of two with as many tokens the first is taken. What messages hold of the others is
    ordinary text and never learned: its KV would be kept for another corpus than its document's, and outlive that. learning:
    whether users' long texts are. What an assistant said is never cut, and what a system message says only at pasted chunks:
    it stays where it is, at the beginning, and is reused exactly.
    """
    pasted = {name: [_pasted_in(one, texts) for one in messages] for name, texts in known.items()}
    corpus = max(pasted, key=lambda name: sum(len(part.ids) for parts in pasted[name] for part in parts))
    found = pasted.pop(corpus)
    for number, message in enumerate(messages):
        if learning and message.role == "user":
            whole = with_learned(message.content, found[number], known[corpus].renderer)
            found[number] = _mine(whole, [parts[number] for parts in pasted.values()])
    return CutMessages(corpus, found)


def _pasted_in(message: Message, texts: KnownTexts) -> list[Segment]:
    if message.role == "assistant":
        return [Segment(message.content)]
    return segments(message.content, texts, learned_on=False)


def _mine(found: Sequence[Segment], others: Sequence[Sequence[Segment]]) -> list[Segment]:
    """Of the passages to be learned those that are. others: the same message cut at the chunks of other corpora."""
    foreign = bytearray(sum(len(part.text) for part in found))
    for parts in others:
        for start, stop, part in placed(parts):
            if part.kind == "pasted":
                foreign[start:stop] = b"\1" * (stop - start)
    kept = [
        Segment(part.text) if part.kind == "learned" and foreign.find(1, start, stop) >= 0 else part
        for start, stop, part in placed(found)
    ]
    if kept and kept[-1].kind == "learned":  # what a message ends with is what it asks, however long
        kept[-1] = Segment(kept[-1].text)
    return kept


def with_text_around(parts: Sequence[Segment], *, opened: bool) -> list[Segment]:
    """A text that is to be continued, cut so that ordinary text stands in front of its passages and behind them.

    A passage that it ends with, or begins with, is ordinary text then. opened: whether the model's own token stands in front.
    """
    said = [number for number, part in enumerate(parts) if part.text.strip()]
    ends = {*said[-1:], *(() if opened else said[:1])}
    return [Segment(part.text) if number in ends else part for number, part in enumerate(parts)]
