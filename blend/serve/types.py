"""What a server asks of whatever computes its answers: a narrow protocol, so that another engine fits behind the same door.

Prompts go in as token ids with their layout, tokens and figures come out one by one. Text, roles and templates are the door's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from blend.config import ANSWER_TOKENS, BlendConfig
from blend.errors import ConfigError
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.blender import Blend
    from blend.chunks.library import ChunkLibrary, Variant
    from blend.serve.corpus_caches import Computing, OnDone


ASKED_FOR = "asked for"
# Reasons that are no loss: what could be blended is in memory, exact as of full prefill or as this conversation blended it.
IN_MEMORY, BLENDED_BEFORE = "in memory already", "blended in an earlier turn"
EndReason = Literal["stop", "length", "cancelled", "deadline", "shutdown"]


class QueueFullError(Exception):
    """More prompts wait than may: nobody's mistake. retry_after_s: when a place is likely to be free."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} prompts wait already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class EngineFailedError(Exception):
    """The engine has ended at a fault of its own, and answers nothing until the process is started anew."""

    def __init__(self) -> None:
        super().__init__("the engine has failed; its log says where: start the server anew")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature: 0 takes the likeliest, and so does less than 1e-5. top_p: only the likeliest tokens that together have this
    probability. seed: makes a draw repeatable. ignore_eos: whether the answer goes on behind a token that would end it.
    logprobs: how many alternatives come with each token; None gives no log-probabilities at all. Raises `ConfigError` for what
    is out of its range.
    """

    max_tokens: int = ANSWER_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "max_tokens": (self.max_tokens, 1, 1_000_000),
            "temperature": (self.temperature, 0, 2),
            "top_p": (self.top_p, 0, 1),
            "logprobs": (self.logprobs or 0, 0, 20),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:  # NaN is none of them either
                raise ConfigError(f"{name} is {value}; give a number from {low} to {high:,}")


@dataclass(frozen=True)
class Work:
    """A prompt to be answered.

    config: how its chunks are blended, if not as the engine does. tenant: whose it is: what is kept of it serves nobody else.
    corpus: of the tenant, whose chunks these are. full: nothing is to be blended, and the store not asked; reason: why. Where
    that was asked for, nothing is taken over either that an earlier turn blended.
    cold: nothing of how earlier prompts began is used, nor the prefix that is at hand, and nothing of this one is kept.
    remember: whether what the store lacks for it may be computed and stored afterwards. begun: when it was begun to be put
    together, by `time.monotonic`. priority: smaller ones first.
    deadline_s: seconds from its arrival in which the first token must come. trace: whether `Started` is to tell row by row what
    was done. handover: takes the blended prompt, in the engine's thread, if somebody else is to go on with it: then nothing is
    decoded, and where `Started` gives a reason to compute the prompt in full, nothing is computed either.
    """

    layout: PromptLayout
    sampling: Sampling = field(default_factory=Sampling)
    config: BlendConfig | None = None
    tenant: str = ""
    corpus: str = ""
    full: bool = False
    reason: str = ASKED_FOR
    cold: bool = False
    remember: bool = True
    begun: float = field(default_factory=monotonic)
    priority: int = 0
    deadline_s: float | None = None
    trace: bool = False
    handover: Callable[[Blend], None] | None = None


class Started(NamedTuple):
    """The prompt is prefilled; the first token follows.

    hits: for each place of the layout that may be stored, whether its KV was there. rows, rows_computed: of the prompt, and
    of these in every layer. rows_reused: its first rows, whose KV was in memory; rows_inexact: the last ones of these, from
    the first on that an earlier turn blended and full prefill would not give so. bytes_loaded: of stored KV. lacking: caches
    that the store should have had; a chunk may hit all the same, with its other cache. reason: why all rows that were not
    reused were computed, or "". stages: seconds by stage. waited_s: before anything was done for it. ttft_s: from its
    arrival. notes: what was done otherwise than configured. trace: for each row, where that was asked for, whether it was
    computed, and the selector's score or None. problems: a line for each entry of the store that was damaged.
    """

    hits: tuple[bool, ...]
    rows: int
    rows_computed: int
    rows_reused: int
    rows_inexact: int
    bytes_loaded: int
    lacking: int
    reason: str
    stages: Mapping[str, float]
    waited_s: float
    ttft_s: float
    notes: tuple[str, ...]
    trace: tuple[tuple[bool, float | None], ...] = ()
    problems: tuple[str, ...] = ()


class Token(NamedTuple):
    """One token of the answer. logprob: natural, of the model before sampling. top: ids and logprobs of the likeliest."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Ended(NamedTuple):
    """Nothing more comes. reason: "stop" after a token that ends answers, which was the last one."""

    reason: EndReason


class Failed(NamedTuple):
    """Nothing more comes, because of this."""

    error: Exception


Event = Started | Token | Ended | Failed


class Handle(Protocol):
    """A prompt that was taken in."""

    def cancel(self) -> None:
        """Give it up; `Ended` follows unless it has ended already. Any thread may call it, any number of times."""


class Holding(NamedTuple):
    """What an engine is busy with.

    kv_bytes: reserved for running prompts, of kv_budget. prefix_bytes: of how earlier prompts began. encoding: caches of chunks
    that are still to be computed. prefix_evictions: beginnings of prompts that went for want of room so far.
    """

    running: int
    waiting: int
    kv_bytes: int
    kv_budget: int
    prefix_bytes: int = 0
    encoding: int = 0
    prefix_evictions: int = 0


class Engine(Protocol):
    """Answers prompts, many at once. Threads may share it."""

    def submit(self, work: Work, on_event: Callable[[Event], None]) -> Handle:
        """Take a prompt in; its events go to `on_event`, from another thread, which must not wait in there.

        Raises `PromptError` when it can never run, `QueueFullError` when too many wait, `EngineFailedError` when nothing is
        answered any more.
        """

    def require_room(self, tenant: str = "") -> None:
        """Raise `QueueFullError` when too many wait, or too many of this tenant; `EngineFailedError` as `submit` does."""

    @property
    def alive(self) -> bool:
        """Whether answers can still come."""
        ...

    def encode(self, library: ChunkLibrary, variants: Sequence[Variant], on_done: OnDone) -> Computing:
        """Compute and store these caches beside the answers, or when there are none."""
        ...

    def holding(self) -> Holding:
        """What it is busy with now."""

    def close(self, finish_s: float = 0.0) -> None:
        """Take nothing in any more; finish what runs if that takes no longer than `finish_s`, and end the rest."""


# --- What a client asks and what it is answered, in words of no network protocol: they pass between the door and the service.


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
