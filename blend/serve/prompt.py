"""A request that is ready for the engine: its token ids, its passages and how they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blend.layout import LEAD_SHARE, Place
from blend.serve.flights import Flight
from blend.serve.reasons import ComputedPart, Word
from blend.serve.request import Request

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.config import BlendConfig
    from blend.layout import PromptLayout, Span, Tokens
    from blend.sampling import Sampling
    from blend.serve.forms.grammar import Grammar
    from blend.serve.forms.thoughts import Thinking

ASKED_FOR = "asked for"
SourceKind = Literal["document", "retrieved", "pasted", "learned"]
Learn = Callable[["ChunkLibrary", Collection["Tokens"]], Collection["Tokens"]]


def nothing_before() -> int:
    """The conversation is new."""
    return 0


class Source(NamedTuple):
    """A passage of the prompt, as replies show it.

    Attributes:
        kind: how it got into the prompt.
        id, document: ids of the chunk and of its document, or "".
        score: similarity at retrieval.
        hit: whether its cache was in the store.
        tokens: number of its tokens in the prompt.

    """

    kind: SourceKind
    id: str
    document: str
    title: str
    text: str
    score: float | None
    hit: bool
    tokens: int


class Cited(NamedTuple):
    """A passage of a prompt and its source. brought: the question brought its text."""

    place: Place
    kind: SourceKind
    id: str = ""
    document: str = ""
    title: str = ""
    text: str = ""
    score: float | None = None
    brought: bool = False

    def source(self, *, hit: bool) -> Source:
        """For a reply."""
        tokens = len(self.place.tokens)
        return Source(self.kind, self.id, self.document, self.title, self.text, self.score, hit, tokens)


class Kept(NamedTuple):
    """What a request's marks keep: tokens of text, of so many that were to be kept, for so many seconds at least."""

    tokens: int
    of: int
    seconds: float


@dataclass(frozen=True)
class Prompt:
    """A request that is ready for the engine.

    Attributes:
        request: what the client asked for.
        layout: the token ids.
        sampling: the request's, with a length that fits and with a seed.
        full_because: why all of it is computed; "" blends it.
        corpus: the one that its passages are from.
        cited: its passages, in order.
        question: tokens of the question that are to be learned, in the layout's suffix.
        learn: takes the texts that the request brought, in a thread for I/O. Returns those whose caches may be stored.
        kept: the text that is kept, if the request keeps any.
        author: whose earlier prompts may give this one their rows; "" takes none.
        history: says how many of its first rows stand in front of its last message; 0 in a new conversation.
        computed: the parts of the prompt that no cache serves, and why.
        absent: for each of `cited`, why its cache would be missing.
        remember: compute and store the caches that were missing.
        config: how to blend; None: as the corpus does.
        thinking: how the answer may begin with thoughts.
        grammar: the form that the request's schema and tools give the answer.
        flight: which of its text other requests in flight bring, too; None if they are not compared.
        draft: a likely answer. Its tokens run behind the prompt in few passes, and count up to the first that differs from
            the answer (speculative decoding).
        stopped: add an answer's index, in the engine's thread when its `Output` comes, and the answer ends there.

    """

    request: Request
    layout: PromptLayout
    sampling: Sampling
    full_because: str = ""
    corpus: str = ""
    cited: tuple[Cited, ...] = ()
    question: Span | None = None
    learn: Learn | None = None
    kept: Kept | None = None
    author: str = ""
    history: Callable[[], int] = nothing_before
    computed: tuple[ComputedPart, ...] = ()
    absent: tuple[Word, ...] = ()
    remember: bool = True
    config: BlendConfig | None = None
    thinking: Thinking | None = None
    grammar: Grammar | None = None
    flight: Flight | None = None
    draft: tuple[int, ...] = ()
    stopped: set[int] = field(default_factory=set, compare=False)

    def brought_texts(
        self, operator_rows: float, reused: int = 0, layout: PromptLayout | None = None
    ) -> dict[Tokens, int]:
        """The texts that may be learned or were learned, and where each begins.

        Args:
            operator_rows: of the decoder. Pieces whose operators take longer to read than their rows to compute are left out.
            reused: first rows of the prompt, whose texts are left out.
            layout: the same prompt in other pieces.

        """
        layout = layout or self.layout
        texts = {
            place.whole: span.start
            for place, span in zip(layout.places, layout.chunk_spans, strict=True)
            if place.is_brought and span.stop > reused
        }
        if self.question is not None and self.question.start >= reused:
            texts.setdefault(layout.token_ids[slice(*self.question)], self.question.start)
        least = operator_rows / (1 - LEAD_SHARE)
        return {text: start for text, start in texts.items() if len(text) > least}

    @classmethod
    def of(cls, layout: PromptLayout, **fields: Any) -> Prompt:
        """The prompt of these tokens, for a request with these fields."""
        request = Request(**fields)
        return cls(request, layout, request.sampling, ASKED_FOR if request.method == "full" else "")
