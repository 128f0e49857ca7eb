"""Options of a blended prefill. Every default of the command line is read from here, so that it exists once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from blend.errors import ConfigError
from blend.ranges import check_fields
from blend.select import Selector, make_selector
from blend.text import check_corpus_name, shown
from blend.types import ChunkKey

MaskMode = Literal["exact", "bottom-right"]
StateMode = Literal["verified", "composed", "last-chunk"]

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
DEFAULT_EMBEDDER = "minilm"
DEFAULT_STORE = ".kvblend"
MOST_SHARES = 10_000
BATCH_TOKENS = 1024  # of chunks that are computed together
# Longest answers, in tokens: of a question, and of each of a report's, which are marked against short gold answers.
ANSWER_TOKENS, REPORT_TOKENS = 128, 32


@dataclass(frozen=True)
class BlendConfig:
    """How rows are chosen and computed.

    >>> from blend import BlendConfig
    >>> BlendConfig("mixed:check_layer=3", ratio=0.05).plain()["selector"]
    'mixed:check_layer=3'
    >>> BlendConfig(ratio=2)
    Traceback (most recent call last):
    blend.errors.ConfigError: ratio: 2 is not a number from 0 to 1

    Attributes:
        selector: a spec such as "hkvd" or "mixed:check_layer=3" (`blend.select.make_selector`), or a `Selector`.
        ratio: share of the cached context rows to recompute, 0 to 1.
        mask: "exact" (row r sees keys up to its position) or "bottom-right" (up to r + N - M, as FlashAttention aligns it).
        correction: whether to add the KV correction to stored chunks, if the store has one (`blend.chunks.correction`).
        surrogate: whether to use contextual caches, if the store has them (`blend.chunks.library`).
        quality: mean KL to full recompute that answers may have, nats a token; None keeps the ratio. Needs estimates
            in the store (`blend.quality`); without one the ratio holds, and a note says so.
        flips: share of answers that may differ from full recompute's within their first 32 tokens; as `quality`.
        states: what recurrent layers carry over a stored chunk that is not computed: "composed" (its operator on the state
            before it), "last-chunk" (the state behind the prefix and this chunk alone), or "verified" (the one that
            `blend verify` found best, at first "composed").
        reproducible: whether answers depend on the prompt and the store's corpora alone, and not on what was asked before. Then
            nothing that a prompt computed is kept.

    Raises:
        ConfigError: a value is outside its range (`blend.ranges`).

    """

    selector: str | Selector = "query_guided"
    ratio: float = 0.15
    mask: MaskMode = "exact"
    correction: bool = True
    surrogate: bool = True
    quality: float | None = None
    flips: float | None = None
    states: StateMode = "verified"
    reproducible: bool = False

    def __post_init__(self) -> None:
        make_selector(self.selector)
        check_fields(self)

    def plain(self) -> dict[str, Any]:
        """The fields as JSON values; the selector as its spec."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "selector": make_selector(self.selector).spec}


@dataclass(frozen=True)
class PromptConfig:
    """The text around the chunks.

    >>> from blend import PromptConfig, Rag
    >>> rag = Rag("my-store", model="my-model", prompt=PromptConfig(system="You answer in one word."))

    Attributes:
        system: the system message.
        instruction: how the user's turn begins.
        question: how the question follows the chunks; `{question}` is replaced.
        chat_instructions: the only text that a server adds, in front of documents; empty adds none.

    Raises:
        ConfigError: a value is not text, or `question` lacks `{question}`.

    """

    system: str = "You are a careful assistant who answers from the given documents."
    instruction: str = "Answer the question using only the documents below. Be brief and exact.\n\n"
    question: str = "Question: {question}\nReply with the answer alone, in a few words."
    chat_instructions: str = "These documents may help to answer."

    def __post_init__(self) -> None:
        check_fields(self)
        if "{question}" not in self.question:
            raise ConfigError("the question part of the prompt lacks the placeholder {question}")


@dataclass(frozen=True)
class CorpusConfig:
    """How documents become chunks, and how many chunks answer a question.

    >>> from blend import CorpusConfig, Rag
    >>> rag = Rag("my-store", model="my-model", corpus=CorpusConfig("handbook", chunk_tokens=64, codec="int8"))

    Attributes:
        name: the corpus in the store (`blend.corpora`). Each has its own index, surrogate context and KV corrections.
        chunk_tokens: longest chunk, in tokens.
        top_k: chunks to retrieve.
        min_score: least similarity of a retrieved chunk to the question, 0 to 1; 0 retrieves any. None takes the
            embedder's own: 0.15 with minilm, one common word with words, else any.
        embedder: the embedding model; "words" needs none, and finds passages by their words alone.
        reranker: a cross-encoder that orders the chunks found anew.
        codec: how the store keeps KV.
        batch_tokens: tokens of one forward pass of precompute.
        surrogate_tokens: tokens of other chunks behind which contextual caches are computed; 0 computes none.
        surrogate_text: takes those tokens from this text; empty leaves what the store has.

    Raises:
        ConfigError: a value is outside its range.

    """

    name: str = ""
    chunk_tokens: int = 256
    top_k: int = 8
    min_score: float | None = None
    embedder: str = DEFAULT_EMBEDDER
    reranker: str | None = None
    codec: str = "bfloat16"
    batch_tokens: int = BATCH_TOKENS
    surrogate_tokens: int = 512
    surrogate_text: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        check_corpus_name(self.name)


class Share(NamedTuple):
    """The share `number`, from 1, of `of` shares of a precompute.

    A cache's digest decides which share it belongs to, so shares coordinate through the store only.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parse a share such as 2/4. Raises `ConfigError`."""
        number, slash, of = text.partition("/")
        if slash and all(part.isascii() and part.isdigit() and len(part) < 6 for part in (number, of)):
            share = cls(int(number), int(of))
            if 1 <= share.number <= share.of <= MOST_SHARES:
                return share
        raise ConfigError(f"{shown(text)} is no share: give its number and how many there are, such as 2/4")

    def number_of(self, key: ChunkKey) -> int:
        """The number of the share that computes this cache."""
        return int(key.digest[:16], 16) % self.of + 1

    def holds(self, key: ChunkKey) -> bool:
        """Whether this share computes this cache."""
        return self.number_of(key) == self.number

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Share(1, 1)
