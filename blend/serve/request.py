"""What a client asks and what it is answered, in words of no network protocol: they pass between the door and the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from blend.serve.engine import EndReason, Sampling

Role = Literal["system", "user", "assistant"]
SourceKind = Literal["document", "retrieved", "pasted", "learned"]
Method = Literal["blend", "full"]
TokenPart = Literal["prefix", "chunk", "text", "suffix"]


class Message(NamedTuple):
    """One message of a conversation, plain text."""

    role: Role
    content: str


class GivenDocument(NamedTuple):
    """A document that comes with a question: its text, maybe with an id of the client's, or the id of one in the corpus."""

    text: str = ""
    title: str = ""
    id: str = ""


@dataclass(frozen=True)
class AnswerRequest:
    """A question as it came in.

    messages: the conversation, the last one being the user's. prompt: plain text to be continued, instead of messages. tenant:
    whose it is; "" where there are no tenants. documents: to be answered from; they stand before the last message. top_k: so
    many chunks of the tenant's corpus are retrieved for the last message; None retrieves nothing. corpus: which one, of which
    documents are named by their ids too; "" finds the one by itself that pasted text is of.
    stop: texts that end the answer and are no part of it. method: "full" computes everything. cold: nothing of earlier prompts
    is reused, not even what is exact, and nothing is kept: what full prefill takes shows only so. priority: smaller first.
    deadline_s: seconds from its arrival in which the first token must come. trace: whether the prompt's tokens are wanted
    with the reply, each with its score. template: arguments for the model's chat template, such as tools; without them a model
    that reasons answers directly.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    tenant: str = ""
    documents: tuple[GivenDocument, ...] = ()
    top_k: int | None = None
    corpus: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    method: Method = "blend"
    cold: bool = False
    priority: int = 0
    deadline_s: float | None = None
    trace: bool = False
    template: Mapping[str, Any] | None = None


class Source(NamedTuple):
    """A passage that the answer was given from.

    kind: how it reached the prompt. id, document: of the chunk and of its document, "" where it has none. score: of retrieval,
    where it was retrieved. hit: whether its cache came out of the store. tokens: in the prompt.
    """

    kind: SourceKind
    id: str
    document: str
    title: str
    text: str
    score: float | None
    hit: bool
    tokens: int


class Figures(NamedTuple):
    """What the prefill cost.

    method: "full" where all KV is what full prefill gives; reason: why, if blending was asked for. With "blend" a reason says
    why nothing was blended beside what earlier turns of the conversation had been. rows: of the prompt. rows_computed: in
    every layer. rows_reused: of earlier prompts with the same beginning; rows_inexact: the last ones of these, from the first
    on that an earlier turn blended. hits, chunks: stored chunks found, and looked for. bytes_loaded: of their KV. lacking:
    caches that the store should have had; a chunk may hit all the same, with its other cache, and another answer come of it.
    stages: seconds by stage. waited_s: in the queue. ttft_s: from arrival to the first token. full_measured_s: what full
    prefill of this prompt took, from when work on it began, if it was asked for with `cold`. full_estimated_s: without such a
    measurement what it would take, by this machine's timings; None while there are none. notes: what was done otherwise than
    configured.
    """

    method: Method
    reason: str
    rows: int
    rows_computed: int
    rows_reused: int
    rows_inexact: int
    hits: int
    chunks: int
    bytes_loaded: int
    lacking: int
    stages: Mapping[str, float]
    waited_s: float
    ttft_s: float
    full_estimated_s: float | None
    full_measured_s: float | None
    notes: tuple[str, ...]


class TracedToken(NamedTuple):
    """A token of the prompt. part: "prefix", "chunk", "text" or "suffix". score: of the selector, where it gave one."""

    text: str
    part: TokenPart
    recomputed: bool
    score: float | None


class Opened(NamedTuple):
    """The first token is there.

    prompt_tokens: of the prompt; cached_tokens: of these not computed for this answer. damaged: entries of the store that were
    found so, which is told operators alone.
    """

    prompt_tokens: int
    cached_tokens: int
    sources: tuple[Source, ...]
    figures: Figures
    trace: tuple[TracedToken, ...] = ()
    damaged: int = 0


class TokenText(NamedTuple):
    """A token of the answer and its natural log-probability before sampling; text may be part of a character: see raw."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


class Delta(NamedTuple):
    """More of the answer's text; tokens: those that it is made of, where log-probabilities were asked for.

    gaps: seconds from each token that came since the last `Delta` to the one before it; an answer's first has none. A token may
    be half a character, or the end of a text that might have become a stop, so that pieces of text are no tokens.
    """

    text: str
    tokens: tuple[TokenText, ...] = ()
    gaps: tuple[float, ...] = ()


class Closed(NamedTuple):
    """The answer is complete, or was given up. tpot_s: seconds per token after the first, None for a single one.

    gaps: of the tokens that no `Delta` told of.
    """

    reason: EndReason
    completion_tokens: int
    tpot_s: float | None
    gaps: tuple[float, ...] = ()


class Refused(NamedTuple):
    """The answer failed after it was taken in."""

    error: Exception


Reply = Opened | Delta | Closed | Refused
