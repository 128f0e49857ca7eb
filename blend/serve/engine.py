"""What a server asks of whatever computes its answers: a narrow protocol, so that another engine fits behind the same door.

Prompts go in as token ids with their layout, tokens and figures come out one by one. Text, roles and templates are the door's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from blend.config import ANSWER_TOKENS, BlendConfig
from blend.errors import ConfigError
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.blender import Blend
    from blend.chunks.library import ChunkLibrary
    from blend.chunks.open_library import Variant
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
