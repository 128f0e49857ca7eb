"""A chunk as it stands in prompts, and which of its tokens a part of its characters makes up."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from blend.corpus import TitledText
from blend.prompt import PromptTemplate, TextTokenizer, render_chunk

LEAST_TOKENS = 16
LEAST_SHARE = 0.8  # of the chunk's tokens
_REMEMBERED = 1024  # chunks
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes one


class ChunkPart(NamedTuple):
    """Tokens `first` to `first + len(ids) - 1` of the ids `whole` of a chunk; they are its characters `start` to `stop - 1`."""

    ids: tuple[int, ...]
    whole: tuple[int, ...]
    first: int
    start: int
    stop: int


class Rendered(NamedTuple):
    """A chunk as it stands in prompts.

    lead: characters of its title line. characters, tokens: how many stand before each place at which the text can be cut
    between two tokens, ascending; empty where these places are not known.
    """

    text: str
    lead: int
    ids: tuple[int, ...]
    characters: array[int]
    tokens: array[int]


class Renderer:
    """Chunks to tokens, the last ones remembered. Threads may share one.

    template: of the prompts. tokenizer: that of the template; one that does not say where its tokens lie in the text, as those
    written in Python, leaves chunks whole.
    """

    def __init__(self, template: PromptTemplate, tokenizer: Any) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._control = TextTokenizer(tokenizer).control
        self._remembered = lru_cache(_REMEMBERED)(self._render)
        self._parts = lru_cache(_REMEMBERED)(self._cut)

    def render(self, title: str, text: str) -> Rendered:
        """The chunk with this title and text."""
        return self._remembered(title, text)

    def part(self, title: str, text: str, start: int, stop: int) -> ChunkPart | None:
        """The tokens that lie wholly within characters `start` to `stop - 1` of the rendered chunk.

        None where these are too few to be worth it, or where their text is not known for certain.
        """
        return self._parts(title, text, start, stop)

    def _render(self, title: str, text: str) -> Rendered:
        chunk = TitledText(title, text)
        rendered, lead = render_chunk(chunk), len(title) + 1 if title else 0
        if getattr(self._tokenizer, "is_fast", False):
            encoded = self._tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
            if self._control.isdisjoint(
                encoded["input_ids"]
            ):  # else a control token is spelled out, and cut up by the template
                ids = tuple(encoded["input_ids"])
                return Rendered(rendered, lead, ids, *_edges(encoded["offset_mapping"]))
        return Rendered(rendered, lead, self.template.chunk_ids(chunk), array("I"), array("I"))

    def _cut(self, title: str, text: str, start: int, stop: int) -> ChunkPart | None:
        whole = self.render(title, text)
        if len(whole.ids) < LEAST_TOKENS:
            return None
        if (start, stop) == (0, len(whole.text)):
            return ChunkPart(whole.ids, whole.ids, 0, start, stop)
        first, last = bisect_left(whole.characters, start), bisect_right(whole.characters, stop) - 1
        if first >= last:
            return None
        start, stop = whole.characters[first], whole.characters[last]
        begin, end = whole.tokens[first], whole.tokens[last]
        ids = whole.ids[begin:end]
        if len(ids) < max(LEAST_TOKENS, LEAST_SHARE * len(whole.ids)) or not self._says(ids, whole.text[start:stop]):
            return None
        return ChunkPart(ids, whole.ids, begin, start, stop)

    def _says(self, ids: tuple[int, ...], text: str) -> bool:
        """Whether the ids spell the text as the tokenizer normalises it. Blanks apart: some decoders drop those in front."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        meant = text if normalizer is None else normalizer.normalize_str(text)
        return _letters(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) == _letters(meant)


def _edges(offsets: Sequence[tuple[int, int]]) -> tuple[array[int], array[int]]:
    """Of tokens that lie at these characters, where one ends and the next begins with another character."""
    characters, tokens, reached = array("I", [0]), array("I", [0]), 0
    for token, (start, stop) in enumerate(offsets):
        if token and start >= reached:  # else both are part of one character
            characters.append(reached)
            tokens.append(token)
        reached = max(reached, stop)
    return array("I", [*characters, reached]), array("I", [*tokens, len(offsets)])


def _letters(text: str) -> str:
    return "".join(text.replace(_SPACE, " ").split())
