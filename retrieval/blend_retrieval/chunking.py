"""Documents to chunks: consecutive passages of one document, none longer than a number of tokens.

A document is divided at its headings; a section that is too long is divided further at paragraphs, then sentences, then
words (semantic-text-splitter); small neighbours are put together again. The passages of a document, in order, are its
whole text: nothing is lost, nothing is there twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blend_retrieval.chunking import Passage, PassageComposer, Region
from blend_retrieval.document import Document
from blend_retrieval.errors import ChunkingError

LEAST_MAX_TOKENS = 16
LEAST_WINDOW = 1 << 14  # characters

Encode = Callable[[str], Sequence[int]]
Render = Callable[[str, str], str]


@dataclass(frozen=True)
class Chunk:
    """One passage of a document.

    id: hex digest of the document's id, the title and the text; edits of other documents or passages leave it as it is.
    title: the document's title and the headings that the passage lies under, joined by " > ".
    tokens: length of the rendered chunk in the tokenizer it was made with.
    """

    id: str
    document_id: str
    title: str
    text: str
    tokens: int


def chunk_documents(
    documents: Iterable[Document],
    encode: Encode,
    max_tokens: int,
    render: Render,
) -> tuple[Chunk, ...]:
    """All chunks of all documents, in order, `len(encode(render(title, text))) <= max_tokens` for each.

    encode: token ids of a text without special tokens, such as `partial(tokenizer.encode, add_special_tokens=False)`.
    render: what will be tokenised in the end, from a chunk's title and text.
    Raises `ChunkingError` when `max_tokens` is below 16, or so small that a single character does not fit.
    """
    if max_tokens < LEAST_MAX_TOKENS:
        raise ChunkingError(f"chunks of {max_tokens} tokens hold no text; allow at least {LEAST_MAX_TOKENS}")

    def measure(title: str, text: str) -> int:
        return len(encode(render(title, text)))

    return tuple(chunk for document in documents for chunk in _chunk(document, measure, max_tokens))


def _chunk(document: Document, measure: Callable[[str, str], int], max_tokens: int) -> list[Chunk]:
    composer = PassageComposer(document, measure, max_tokens)
    regions = [piece for section in composer.sections() for piece in _divide(composer, section)]
    regions = _join(composer, regions, composer.same_topic)
    regions = _join(composer, regions, lambda left, right: composer.tiny(left) or composer.tiny(right))
    return _number(document, [composer.compose(region) for region in regions])


def _divide(composer: PassageComposer, region: Region) -> list[Region]:
    """A region as pieces that fit."""
    if composer.fits(region):
        return [region]
    edges = [region.start, *_cuts(composer, region), region.stop]
    pieces = [Region(start, stop) for start, stop in pairwise(edges)]
    return [fitting for piece in pieces for fitting in _halve(composer, piece)]


def _cuts(composer: PassageComposer, region: Region) -> Iterator[int]:
    """Where the splitter cuts a region.

    For every piece the splitter reads all the text that it was given, so it is given one window after the other. The
    last piece of a window may go on behind it; there the next window begins. A long line has no structure that asks for
    a wide window.
    """
    from semantic_text_splitter import MarkdownSplitter

    title, start = composer.frame(region)
    splitter = MarkdownSplitter.from_callback(lambda text: composer.measure(title, text), composer.max_tokens)
    narrow, wide = 2 * composer.reach // 5, max(LEAST_WINDOW, 2 * composer.reach)

    def cuts(window: int) -> list[int]:
        text = composer.text[start : min(start + window, region.stop)]
        return [start + index for index, _ in splitter.chunk_indices(text)][1:]

    while region.stop - start > wide:
        line = composer.text.find("\n", start, start + wide) < 0
        found = (line and cuts(narrow)) or cuts(wide) or [start + wide]
        yield from found
        start = found[-1]
    yield from cuts(wide)


def _halve(composer: PassageComposer, region: Region) -> list[Region]:
    """Last resort, where a passage counts more tokens than the splitter saw: halve it, between words if it can be."""
    if composer.fits(region):
        return [region]
    if region.length < 2:
        raise ChunkingError(
            f"{composer.max_tokens} tokens are too few for one character of {composer.source}; allow more"
        )
    middle = (region.start + region.stop) // 2
    space = composer.text.rfind(" ", region.start + 1, middle)
    cut = space if space > 0 else middle
    return [*_halve(composer, Region(region.start, cut)), *_halve(composer, Region(cut, region.stop))]


def _join(composer: PassageComposer, regions: list[Region], wanted: Callable[[Region, Region], bool]) -> list[Region]:
    """Put neighbours together from left to right, where that is wanted and they fit into one chunk."""
    joined: list[Region] = []
    for region in regions:
        if joined and wanted(joined[-1], region):
            both = Region(joined[-1].start, region.stop)
            if composer.fits(both):
                joined[-1] = both
                continue
        joined.append(region)
    return joined


def _number(document: Document, passages: Sequence[Passage]) -> list[Chunk]:
    """Passages as chunks. Equal passages of one document are told apart by their count, so that ids are unique."""
    times: Counter[tuple[str, str]] = Counter()
    chunks = []
    for title, text, tokens in passages:
        if not text:  # blanks that a halved region left over
            continue
        identity = [document.id, title, text, times[title, text]]
        times[title, text] += 1
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        chunks.append(Chunk(digest, document.id, title, text, tokens))
    return chunks
