"""A message as ordinary text and passages that may have caches of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from blend.serve.passages.divide import is_long, passages
from blend.serve.passages.known import FoundChunk, KnownChunk, KnownTexts
from blend.serve.passages.rendered import Renderer
from blend.serve.types import Message

_MOST_CHARACTERS = 1 << 22  # what is longer fits into no model's context

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
    chunk: KnownChunk | None = None


class _Piece(NamedTuple):
    """A segment that is no ordinary text, and where it stands."""

    start: int
    stop: int
    segment: Segment


def segments(text: str, known: KnownTexts, *, learned_on: bool) -> list[Segment]:
    """A message cut at the known chunks that were pasted into it and, in a long one, at passages to be learned.

    The segments' texts, one after another, are the message. A passage to be learned is kept as a chunk without a title is, so
    that it is the same one when it comes as a document. Takes time linear in the message's length, whatever it holds.
    """
    if len(text) > _MOST_CHARACTERS:
        return [Segment(text)]
    found = list(_filled(text, [_pasted(text, one) for one in known.find(text)]))
    return with_learned(text, found, known.renderer) if learned_on else found


def with_learned(text: str, parts: Sequence[Segment], renderer: Renderer) -> list[Segment]:
    """The segments of a message, where it is a long one with passages to be learned out of its ordinary text."""
    if not is_long(text, renderer):
        return list(parts)
    pieces = list[_Piece]()
    for start, stop, part in placed(parts):
        pieces.extend(_learned(text, start, stop, renderer) if part.kind == "text" else [_Piece(start, stop, part)])
    return list(_filled(text, pieces))


def placed(parts: Sequence[Segment]) -> Iterator[tuple[int, int, Segment]]:
    """Segments of a message, each with the characters `start` to `stop - 1` that it is."""
    start = 0
    for part in parts:
        yield start, start + len(part.text), part
        start += len(part.text)


def _pasted(text: str, found: FoundChunk) -> _Piece:
    part = found.part
    segment = Segment(text[found.start : found.stop], part.ids, "pasted", part.whole, part.first, found.chunk)
    return _Piece(found.start, found.stop, segment)


def _learned(text: str, start: int, stop: int, renderer: Renderer) -> Iterator[_Piece]:
    """The passages of a run of ordinary text, each with as much of a chunk's closing blank line as follows it."""
    for block in passages(text, start, stop, renderer):
        inside, end = text[block.start : block.stop], block.stop
        while end < min(stop, block.stop + 2) and text[end] == "\n":
            end += 1
        part = renderer.part("", inside, 0, end - block.start)
        if part is not None:
            end = block.start + part.stop
            segment = Segment(text[block.start : end], part.ids, "learned", part.whole, part.first)
            yield _Piece(block.start, end, segment)


def _filled(text: str, pieces: list[_Piece]) -> Iterator[Segment]:
    """With the ordinary text between them."""
    reached = 0
    for piece in pieces:
        if piece.start > reached:
            yield Segment(text[reached : piece.start])
        yield piece.segment
        reached = piece.stop
    if reached < len(text):
        yield Segment(text[reached:])


# --- The messages of one prompt cut at the chunks of one corpus: whose surrogate context and KV corrections it is blended with.


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
