"""Values that cross the server: the request on its way to the engine, and the events on their way back.

One `Request` goes from the HTTP handler through the service to the engine. The engine answers with events: `Started`, an
`Output` for every token, then `Finished` or `Failed`. The service adds text and sources to the same events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blend.config import ANSWER_TOKENS, BlendConfig
from blend.errors import ConfigError, PromptError
from blend.types import Place, PromptLayout, Span

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.prefill.blender import Blend
    from blend.serve.sampling import Grammar
    from blend.serve.thoughts import Thinking
    from blend.types import CacheKey, ChunkCache, Tokens

ASKED_FOR = "asked for"
# Reasons that are no loss: the KV is in memory, exact or as this conversation blended it.
IN_MEMORY, BLENDED_BEFORE = "in memory already", "blended in an earlier turn"
ONLY_PARTS = "recurrent layers reuse chunks only from their beginning to their end"
MOST_ANSWERS = 16  # to one prompt
EndReason = Literal["stop", "length", "cancelled", "deadline", "shutdown"]
Role = Literal["system", "user", "assistant", "tool"]
SourceKind = Literal["document", "retrieved", "pasted", "learned"]
Method = Literal["blend", "full"]
TokenPart = Literal["prefix", "chunk", "text", "suffix"]


class QueueFullError(Exception):
    """Too many prompts wait. retry_after_s: when a place is likely to be free."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} prompts wait already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class FieldError(PromptError):
    """A field of a request that this model or this installation cannot serve. param: its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class EngineFailedError(Exception):
    """The engine's thread has died; the process must be restarted."""

    def __init__(self) -> None:
        super().__init__("the engine has failed; its log says where: start the server anew")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_tokens: longest answer.
        temperature: below 1e-5 the likeliest token is taken.
        top_p: sample from the likeliest tokens that together have this probability.
        seed: makes sampling repeatable; answer i is seeded with seed + i.
        logprobs: alternatives that come with each token; None gives no log-probabilities.
        ignore_eos: go on behind a token that would end the answer.
        top_k: sample from so many of the likeliest tokens; 0 or -1: from all.
        min_p: sample from tokens with at least this share of the likeliest token's probability.
        presence_penalty: subtracted once from the logits of the answer's tokens.
        frequency_penalty: subtracted from these logits for each time that the token occurs.
        repetition_penalty: divides positive logits of tokens of prompt and answer, and multiplies negative ones; None: the
            model's own.
        logit_bias: token id -> number added to its logit.
        n: answers to the prompt.

    Raises:
        ConfigError: a value is out of range.

    """

    max_tokens: int = ANSWER_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "n": (self.n, 1, MOST_ANSWERS),
            "max_tokens": (self.max_tokens, 1, 1_000_000),
            "temperature": (self.temperature, 0, 2),
            "top_p": (self.top_p, 0, 1),
            "logprobs": (self.logprobs or 0, 0, 20),
            "top_k": (self.top_k, -1, 1_000_000_000),
            "min_p": (self.min_p, 0, 1),
            "presence_penalty": (self.presence_penalty, -2, 2),
            "frequency_penalty": (self.frequency_penalty, -2, 2),
            "repetition_penalty": (1 if self.repetition_penalty is None else self.repetition_penalty, 0.01, 2),
            **{f"logit_bias of token {token}": (bias, -100, 100) for token, bias in self.logit_bias.items()},
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:  # also refuses NaN
                raise ConfigError(f"{name} is {value}; give a number from {low} to {high:,}")


class ToolCall(NamedTuple):
    """A call of a function, as the model wrote it.

    arguments: the JSON text of an object; in an answer that was cut short, its beginning.
    """

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """One message of a conversation, plain text.

    tool_calls, thoughts: of an assistant's message. tool_call_id: the call whose result this is. name: of the author or the
    function.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    thoughts: str = ""


class Function(NamedTuple):
    """A function that the client offers. parameters: a JSON schema of an object. strict: arguments must match it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        about = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": dict(self.parameters)}}


class Tools(NamedTuple):
    """The functions that an answer may call.

    parallel: several of them; else the first call ends the answer. required: names of functions; the answer must call one.
    """

    functions: tuple[Function, ...]
    parallel: bool = True
    required: tuple[str, ...] = ()


class GivenDocument(NamedTuple):
    """A document that a request brings: its text, optionally with the client's id; or the id of one in the corpus."""

    text: str = ""
    title: str = ""
    id: str = ""


Learn = Callable[["ChunkLibrary", Mapping["Tokens", "ChunkCache | None"]], Sequence["CacheKey"]]


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
    id: str
    document: str
    title: str
    text: str
    score: float | None = None
    brought: bool = False

    def source(self, *, hit: bool) -> Source:
        """For a reply."""
        tokens = len(self.place.tokens)
        return Source(self.kind, self.id, self.document, self.title, self.text, self.score, hit, tokens)


@dataclass(frozen=True)
class Request:
    """A request, from the HTTP handler to the engine; each is submitted once.

    The client sets:
        messages: the conversation; the last one is the user's or a tool's.
        prompt: text or token ids to continue, instead of messages.
        tools: functions that the answer may call; None: it calls none.
        schema: JSON schema of the answer, unless it is a call.
        tenant: "" without tenants.
        documents: inserted before the user's last message.
        top_k: chunks to retrieve from the corpus; None retrieves none.
        corpus: its name; "" detects it from pasted text.
        sampling: how tokens are chosen.
        stop: texts that end the answer and are not part of it.
        method: "full" computes everything.
        cold: neither use nor fill the prefix cache.
        priority: smaller first.
        deadline_s: seconds from arrival in which the first token must come.
        quality: mean KL that the prompt may have; None: the server's own.
        trace: report every token of the prompt.
        verify: check the answer against full recompute.
        template: arguments of the chat template.
        arrived: time of arrival, by `time.monotonic`.
        cancelled: set it, from any thread, to give the request up; `Finished` follows.
        stopped: add an answer's index, in the engine's thread when its `Output` comes, and the answer ends there.
    The service adds:
        layout: the prompt's token ids.
        cited: the prompt's passages.
        asked: tokens of the question that are to be learned.
        reason: why the method is "full".
        thinking: how the answer may begin with thoughts.
        grammar: the form that `schema` and `tools` give the answer.
        draft: a likely answer. Its tokens run behind the prompt in few passes, and count up to the first that differs from
            the answer (speculative decoding).
        remember: compute and store the caches that were missing.
        learn: takes the KV of the texts that the request brought, or None for what the store had, in a thread for I/O. Returns
            caches that must be computed.
    Programs that embed the engine may set:
        config: how to blend, instead of the engine's own.
        handover: takes the blended prompt in the engine's thread; nothing is decoded then, and a prompt that would be
            computed in full is not computed.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: Tools | None = None
    schema: Mapping[str, Any] | None = None
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
    quality: float | None = None
    trace: bool = False
    verify: bool = False
    template: Mapping[str, Any] | None = None
    arrived: float = field(default_factory=monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False)
    stopped: set[int] = field(default_factory=set, compare=False)
    layout: PromptLayout = field(default_factory=lambda: PromptLayout((), (), ()))
    cited: tuple[Cited, ...] = ()
    asked: Span | None = None
    reason: str = ASKED_FOR
    thinking: Thinking | None = None
    grammar: Grammar | None = None
    draft: tuple[int, ...] = ()
    remember: bool = True
    learn: Learn | None = None
    config: BlendConfig | None = None
    handover: Callable[[Blend], None] | None = None


class Figures(NamedTuple):
    """The cost of a prefill.

    Attributes:
        method: "full" if all KV is that of full prefill.
        reason: why blending was not used, or "".
        rows: rows of the prompt.
        rows_computed: rows computed in every layer.
        rows_reused: rows from the prefix cache.
        rows_inexact: how many of them an earlier turn blended, counted from the first such row on.
        hits, chunks: stored chunks found and looked for.
        bytes_loaded: bytes of KV read.
        missing: caches that the store should have had; a chunk may still hit with its other cache.
        stages: seconds by stage.
        waited_s: seconds in the queue.
        ttft_s: seconds from arrival to the first token.
        full_estimated_s: estimated seconds of full prefill, if it was not measured.
        full_measured_s: seconds of full prefill of this prompt, when it was requested with `cold`.
        notes: deviations from the configuration.
        quality: the fields of `blend.quality.Estimate`, if a quality was requested and the corpus is calibrated.

    """

    method: Method
    reason: str
    rows: int
    rows_computed: int
    rows_reused: int = 0
    rows_inexact: int = 0
    hits: int = 0
    chunks: int = 0
    bytes_loaded: int = 0
    missing: int = 0
    stages: Mapping[str, float] = MappingProxyType({})
    waited_s: float = 0.0
    ttft_s: float = 0.0
    full_estimated_s: float | None = None
    full_measured_s: float | None = None
    notes: tuple[str, ...] = ()
    quality: Mapping[str, float | None] | None = None

    @property
    def cached_tokens(self) -> int:
        """Rows that were not computed for this answer."""
        return self.rows - self.rows_computed


class TracedToken(NamedTuple):
    """A token of the prompt. text: added by the service. score: of the selector, if it gave one."""

    text: str
    part: TokenPart
    recomputed: bool
    score: float | None


class Started(NamedTuple):
    """The prompt is prefilled; the first token follows.

    Attributes:
        hits: for each chunk that may be stored, whether its KV was.
        problems: one line for each damaged entry of the store.
        sources: added by the service.
        answer: index of the first answer to the prompt.

    """

    figures: Figures
    hits: tuple[bool, ...] = ()
    trace: tuple[TracedToken, ...] = ()
    problems: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    answer: int = 0


class TopToken(NamedTuple):
    """A likely token and its log-probability. text, raw: added by the service; text may be part of a character, see raw."""

    id: int
    logprob: float
    text: str = ""
    raw: bytes = b""


class Token(NamedTuple):
    """One token of the answer.

    Attributes:
        logprob: natural, before sampling; None if not requested.
        top: the likeliest tokens.
        at: when it came, by `time.monotonic`.
        text, raw: added by the service if log-probabilities were requested.

    """

    id: int
    logprob: float | None = None
    top: tuple[TopToken, ...] = ()
    at: float = 0.0
    text: str = ""
    raw: bytes = b""


class Output(NamedTuple):
    """More of an answer. The engine sends single tokens; the service sends tokens once their text is certain.

    Attributes:
        calls: calls of functions, behind the text.
        answer: its index among the answers to the prompt.
        thoughts: whether the text is the model's thoughts, which come before the answer.

    """

    tokens: tuple[Token, ...]
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    answer: int = 0
    thoughts: bool = False


class Check(NamedTuple):
    """A blended answer compared with full recompute's.

    Attributes:
        verified: whether they are equal; None if they were not compared, see `reason`.
        tokens: number of first tokens in which both agree.
        first: index of the first different token.
        text, calls: all of full recompute's answer, if it differs.
        seconds: time that the check took.

    """

    verified: bool | None
    tokens: int
    first: int | None = None
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    seconds: float = 0.0
    reason: str = ""


class AuditedMean(NamedTuple):
    """A mean of so many audits under one target, and its 95 % interval."""

    mean: float
    low: float
    high: float
    target: float
    audits: int


class Promise(NamedTuple):
    """What audits say of the qualities that were asked for in a corpus.

    kl, flips: of the target that is kept least; None if none was asked for. kept: False if the lower end of an interval is
    above its target.
    """

    kl: AuditedMean | None
    flips: AuditedMean | None
    kept: bool


class Audit(NamedTuple):
    """The result of an audit of one answer.

    Attributes:
        tokens: number of compared tokens.
        flipped: whether full recompute's answer differs within them.
        kl: mean KL of blended to full next-token distributions along the common tokens, in nats. It compares the likeliest
            tokens, and the rest together: a lower bound of the KL over all tokens, and close to it.
        quality: the fields of `blend.quality.Estimate`, if a quality was asked for and the corpus is calibrated.
        promise: of this corpus, this audit included; None if no quality was asked for.

    """

    tenant: str
    corpus: str
    tokens: int
    flipped: bool
    kl: float
    quality: Mapping[str, float | None] | None = None
    promise: Promise | None = None


class Finished(NamedTuple):
    """The last event of an answer. answer: its index. last: no answer to the prompt goes on.

    Those that are cancelled, late, or cut short by a shutdown end together, with one event. An answer that is to be verified
    ends, and then once more, with its check.
    """

    reason: EndReason
    answer: int = 0
    last: bool = True
    check: Check | None = None


class Failed(NamedTuple):
    """The last event of a request that failed: all its answers end."""

    error: Exception


Event = Started | Output | Finished | Failed
OnEvent = Callable[[Event], None]
"""Called from another thread; must not block."""


class EngineStats(NamedTuple):
    """The engine's load.

    Attributes:
        running, waiting: numbers of prompts.
        kv_bytes: bytes reserved for running prompts, of `kv_budget`.
        prefix_bytes: bytes of the prefix cache.
        encoding: number of chunk caches still to be computed.
        prefix_evictions: evictions from the prefix cache so far.

    """

    running: int
    waiting: int
    kv_bytes: int
    kv_budget: int
    prefix_bytes: int = 0
    encoding: int = 0
    prefix_evictions: int = 0

    @property
    def idle(self) -> bool:
        """Nothing is running, waiting or being computed."""
        return not (self.running or self.waiting or self.encoding)
