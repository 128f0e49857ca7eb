"""The messages of one prompt cut at the chunks of one corpus: whose surrogate context and KV corrections it is blended with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blend.serve.passages.known import KnownTexts
from blend.serve.passages.segments import Segment, placed, segments, with_learned
from blend.serve.types import Message


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
    pasted = {name: [_pasted(one, texts) for one in messages] for name, texts in known.items()}
    corpus = max(pasted, key=lambda name: sum(len(part.ids) for parts in pasted[name] for part in parts))
    found = pasted.pop(corpus)
    for number, message in enumerate(messages):
        if learning and message.role == "user":
            whole = with_learned(message.content, found[number], known[corpus].renderer)
            found[number] = _mine(whole, [parts[number] for parts in pasted.values()])
    return CutMessages(corpus, found)


def _pasted(message: Message, texts: KnownTexts) -> list[Segment]:
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
