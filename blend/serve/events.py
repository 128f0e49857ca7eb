"""What the engine answers: `Started`, an `Output` for every token, then `Finished` or `Failed`.

The service adds text and sources to the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from blend.serve.prompt import Kept, Source
from blend.serve.reasons import PartsTokens
from blend.serve.request import Method, ToolCall

if TYPE_CHECKING:
    from blend.intervals import Judged
    from blend.layout import Span

# Reasons that are no loss: the KV is in memory, exact or as this conversation blended it.
IN_MEMORY = "in memory already"
BLENDED_BEFORE = "blended in an earlier turn"
# Reasons for which the service has a word: see `reasons`.
NOTHING = "nothing to reuse"
COLD = "cold"
SHORT = "short"
ONLY_PARTS = "recurrent layers reuse chunks only from their beginning to their end"
EndReason = Literal["stop", "length", "cancelled", "deadline", "shutdown"]
TokenPart = Literal["prefix", "chunk", "text", "suffix"]


class QueueFullError(Exception):
    """Too many requests wait. retry_after_s: when a place is likely to be free."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class EngineFailedError(Exception):
    """The engine's thread has died; the process must be restarted."""

    def __init__(self) -> None:
        super().__init__("the engine has failed; its log says where: start the server anew")


class Figures(NamedTuple):
    """The cost of a prefill.

    Attributes:
        method: "full" if all KV is that of full prefill.
        reason: why blending was not used, or "".
        rows: rows of the prompt.
        rows_computed: rows computed in every layer.
        rows_reused: rows from the prefix cache.
        rows_inexact: how many of them an earlier turn blended, counted from the first such row on.
        rows_moved: rows behind them whose text is an earlier prompt's; some of these are computed.
        rows_shared: rows of text that other requests in flight brought, too, from caches that one of them computed.
        rows_ahead: rows of such caches that this request computed, apart from its prompt, for itself and the others.
        edits: how text behind an edit of an earlier prompt was answered for, see `Request`; "" without such an edit.
        hits, chunks: stored chunks found and looked for.
        bytes_loaded: bytes of KV read.
        missing: caches that the store should have had; a chunk may still hit with its other cache.
        stages: seconds by stage.
        waited_s: seconds in the queue.
        ttft_s: seconds from arrival to the first token.
        full_estimated_s: estimated seconds of full prefill, if it was not measured.
        full_measured_s: seconds of full prefill of this prompt, when it was requested with `cold`.
        notes: deviations from the configuration.
        quality: the fields of `blend.quality.Estimate`, if a quality was requested and the corpus has estimates.
        not_reused: tokens that are computed though text might be reused, by reason; added by the service.
        kept: the text that is kept, if the request keeps any; added by the service.

    """

    method: Method
    reason: str
    rows: int
    rows_computed: int
    rows_reused: int = 0
    rows_inexact: int = 0
    rows_moved: int = 0
    rows_shared: int = 0
    rows_ahead: int = 0
    edits: str = ""
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
    not_reused: tuple[PartsTokens, ...] = ()
    kept: Kept | None = None

    @property
    def cached_tokens(self) -> int:
        """Rows that were not computed for this answer."""
        return max(0, self.rows - self.rows_computed - self.rows_ahead)


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
        edited: text of an earlier prompt that was computed, because an edit in front of it may have changed it.

    """

    figures: Figures
    hits: tuple[bool, ...] = ()
    trace: tuple[TracedToken, ...] = ()
    problems: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    answer: int = 0
    edited: tuple[Span, ...] = ()


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


class Promise(NamedTuple):
    """What audits say of the qualities that were asked for in a corpus.

    figures: the mean KL ("kl") and the share of flips ("flips"), of the target that is kept least. kept: False if the lower end
    of an interval is above its target.
    """

    figures: Mapping[str, Judged]
    kept: bool


class Audit(NamedTuple):
    """The result of an audit of one answer.

    Attributes:
        tokens: number of compared tokens.
        flipped: whether full recompute's answer differs within them.
        kl: mean KL of blended to full next-token distributions along the common tokens, in nats. It compares the likeliest
            tokens, and the rest together: a lower bound of the KL over all tokens, and close to it. None for an answer that
            is not blended anew.
        quality: the fields of `blend.quality.Estimate`, if a quality was asked for and the corpus has estimates.
        promise: of this corpus, this audit included; None if no quality was asked for.

    """

    tenant: str
    corpus: str
    tokens: int
    flipped: bool
    kl: float | None
    quality: Mapping[str, float | None] | None = None
    promise: Promise | None = None


class Finished(NamedTuple):
    """The last event of an answer. answer: its index. last: no answer to the prompt goes on. stop: the stop text that ended it.

    Those that are cancelled, late, or cut short by a shutdown end together, with one event. An answer that is to be verified
    ends, and then once more, with its check.
    """

    reason: EndReason
    answer: int = 0
    last: bool = True
    check: Check | None = None
    stop: str = ""


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
        comparing: number of comparisons still to be made.

    """

    running: int
    waiting: int
    kv_bytes: int
    kv_budget: int
    prefix_bytes: int = 0
    encoding: int = 0
    prefix_evictions: int = 0
    comparing: int = 0

    @property
    def idle(self) -> bool:
        """Nothing is running, waiting or being computed."""
        return not (self.running or self.waiting or self.encoding or self.comparing)
