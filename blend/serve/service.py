"""What full prefill would have taken on this machine, from what it was measured to take."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ContextLengthError, PromptError, StoreError
from blend.model.decoder import full_prefill
from blend.rag import NONE_RETRIEVED
from blend.serve.chat import DIRECT, question_turns
from blend.serve.documents import Documents
from blend.serve.failures import LOG, STORE_UNREACHABLE, StoreWatch
from blend.serve.limits import LEARN_BUDGET
from blend.serve.tenant import Cited, Learning, TenantState, begun_corpora, kept_corpora, require_length, tenant_root
from blend.serve.text import Speaker
from blend.serve.types import (
    ASKED_FOR,
    AnswerRequest,
    Closed,
    Delta,
    Ended,
    EndReason,
    Engine,
    EngineFailedError,
    Event,
    Failed,
    Figures,
    Handle,
    Message,
    Opened,
    QueueFullError,
    Refused,
    Reply,
    Sampling,
    Source,
    Started,
    Token,
    TokenPart,
    TokenText,
    TracedToken,
    Work,
)
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.rag import Rag
    from blend.store import ChunkStore


MEASURED_ROWS = 256
_TIMINGS = 3  # the first one warms up; other programs only make one slower
_MEASURED_PROMPTS = 1024


class Profile:
    """Seconds of full prefill by the length of the prompt: operations, at the rate that was measured.

    A row takes 2 operations a parameter, and its attention 4 for each key, query head and head dimension in every layer.
    Threads may share it.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self._decoder, self._lock = decoder, threading.Lock()
        weights = sum(part.numel() for layer in decoder.layers for part in layer.parameters())
        heads = getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
        self._of_row, self._of_pair = 2.0 * weights, 4.0 * heads * width * len(decoder.layers)
        self._rate: float | None = None
        self._prompts: OrderedDict[int, float] = OrderedDict()
        token = 1 % decoder.vocabulary
        rows = min(MEASURED_ROWS, (decoder.context_length or MEASURED_ROWS) - 1)
        self.sample = PromptLayout((token,), (), (token,) * (rows - 1))
        """The prompt that is timed; an answer of one token fits behind it."""

    def measure(self) -> None:
        """Time full prefill of some rows while nothing else is computed."""
        self.timed(min(full_prefill(self._decoder, self.sample).ttft_s for _ in range(_TIMINGS)))

    def timed(self, seconds: float) -> None:
        """Full prefill of the `sample` took so long; earlier timings count no more."""
        rows = self.sample.rows
        self.saw(rows, rows * (rows + 1) // 2, seconds, anew=True)

    def took(self, prompt: int, seconds: float) -> None:
        """Full prefill of this very prompt, named by a hash, took so long."""
        with self._lock:
            self._prompts[prompt] = seconds
            self._prompts.move_to_end(prompt)
            if len(self._prompts) > _MEASURED_PROMPTS:
                self._prompts.popitem(last=False)

    def measured(self, prompt: int) -> float | None:
        """Seconds that full prefill of this very prompt took the last time; None where that is not known."""
        return self._prompts.get(prompt)

    def saw(self, rows: int, pairs: int, seconds: float, *, anew: bool = False) -> None:
        """Rows that look at so many keys together were computed in so many seconds, in one pass."""
        rate = self._operations(rows, pairs) / max(seconds, 1e-9)
        with self._lock:
            known = None if anew else self._rate
            self._rate = rate if known is None else math.exp(0.9 * math.log(known) + 0.1 * math.log(rate))

    def seconds(self, rows: int) -> float | None:
        """What full prefill of a prompt of so many rows takes; None while nothing was measured."""
        return None if self._rate is None else self._operations(rows, rows * (rows + 1) // 2) / self._rate

    def _operations(self, rows: int, pairs: int) -> float:
        return rows * self._of_row + pairs * self._of_pair


# --- One question on its way: the engine's events become replies in words, text as soon as it is sure.


OnReply = Callable[[Reply], None]


class Conversation:
    """One question on its way; a `Handle`."""

    def __init__(
        self,
        rag: Rag,
        request: AnswerRequest,
        sampling: Sampling,
        layout: PromptLayout,
        cited: Sequence[Cited],
        on_reply: OnReply,
        profile: Profile,
        before_s: float,
        watch: StoreWatch,
    ) -> None:
        self._handle: Handle | None = None
        self._cancelled = False
        self.before_s = before_s
        self._decoder, self._request, self._sampling, self._layout = rag.decoder, request, sampling, layout
        self._cited, self._on_reply, self._profile, self._watch = cited, on_reply, profile, watch
        self._speaker = Speaker(rag.decoder.tokenizer, request.stop)
        self._tokens, self._first, self._last = 0, 0.0, 0.0
        self._named: list[TokenText] = []
        self._gaps: list[float] = []
        self._closed = False

    def cancel(self) -> None:
        """Give it up, now or as soon as the engine has it."""
        self._cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def follow(self, handle: Handle) -> None:
        """The engine has it; events may have come already."""
        self._handle = handle
        if self._cancelled:
            handle.cancel()

    def on_event(self, event: Event) -> None:
        """Of the engine, in words."""
        if self._closed:
            return
        if isinstance(event, Started):
            self._on_reply(self._opened(event))
        elif isinstance(event, Token):
            self._hear(event)
        elif isinstance(event, Ended):
            self._close(event.reason)
        elif isinstance(event, Failed):
            self._closed = True
            self._on_reply(Refused(event.error))

    def _hear(self, token: Token) -> None:
        before, self._last = self._last, time.monotonic()
        self._first = self._first or self._last
        if self._tokens:
            self._gaps.append(self._last - before)
        self._tokens += 1
        if self._sampling.logprobs is not None:
            self._named.append(self._speaker.named(token))
        said = self._speaker.hear(token.id)
        if said.text or said.ended:
            self._say(said.text)
        if said.ended:
            self._close("stop")
            self.cancel()

    def _say(self, text: str) -> None:
        named, self._named = tuple(self._named), []
        if text or named:
            self._on_reply(Delta(text, named, self._told_gaps()))

    def _told_gaps(self) -> tuple[float, ...]:
        gaps, self._gaps = tuple(self._gaps), []
        return gaps

    def _close(self, reason: EndReason) -> None:
        self._say(self._speaker.finish())
        self._closed = True
        gaps = self._tokens - 1
        tpot_s = (self._last - self._first) / gaps if gaps > 0 else None
        self._on_reply(Closed(reason, self._tokens, tpot_s, self._told_gaps()))

    def _opened(self, started: Started) -> Opened:
        if started.reason == STORE_UNREACHABLE:
            self._watch.lost("it could be read when a question came, and not when its caches were loaded")
        for line in started.problems:
            LOG.warning("damaged", extra={"why": line})
        sources = tuple(
            Source(one.kind, one.id, one.document, one.title, one.text, one.score, hit, len(one.passage.ids))
            for one, hit in zip(self._cited, started.hits, strict=True)
        )
        measured = self._full_measured(started)
        figures = Figures(
            method="full" if started.reason and not started.rows_inexact else "blend",
            reason="" if started.reason == ASKED_FOR else started.reason,
            rows=started.rows,
            rows_computed=started.rows_computed,
            rows_reused=started.rows_reused,
            rows_inexact=started.rows_inexact,
            hits=sum(started.hits),
            chunks=len(started.hits),
            bytes_loaded=started.bytes_loaded,
            lacking=started.lacking,
            stages={"prepare": self.before_s, **started.stages},
            waited_s=started.waited_s,
            ttft_s=self.before_s + started.ttft_s,
            full_estimated_s=self._profile.seconds(started.rows) if measured is None else None,
            full_measured_s=measured,
            notes=(*started.notes, NONE_RETRIEVED) if self._none_retrieved else started.notes,
        )
        cached = started.rows - started.rows_computed
        return Opened(started.rows, cached, sources, figures, self._traced(started), len(started.problems))

    @property
    def _none_retrieved(self) -> bool:
        return self._request.top_k is not None and not any(one.kind in ("retrieved", "document") for one in self._cited)

    def _full_measured(self, started: Started) -> float | None:
        """Seconds that full prefill of this prompt took, now or when the tenant last asked for it; None where it did not."""
        prompt = hash((self._request.tenant, self._layout.token_ids))
        if self._request.cold and started.stages and started.rows_computed == started.rows:
            self._profile.took(prompt, self.before_s + started.ttft_s - started.waited_s)
        return self._profile.measured(prompt)

    def _traced(self, started: Started) -> tuple[TracedToken, ...]:
        """The prompt's tokens, one by one."""
        if not started.trace:
            return ()
        layout, names = self._layout, list[TokenPart]()
        names += ["prefix"] * len(layout.prefix)
        for place, chunk in enumerate(layout.chunks):
            names += ["text" if place in layout.plain else "chunk"] * len(chunk)
        names += ["suffix"] * len(layout.suffix)
        texts = self._decoder.tokenizer.batch_decode([[token] for token in layout.token_ids])
        rows = zip(texts, names, started.trace, strict=True)
        return tuple(TracedToken(text, part, computed, score) for text, part, (computed, score) in rows)


# --- Questions in words to work for the engine, and its events to replies in words: everything about a server but the network.


_LOOK_S = 0.5
TIMED_EVERY_S = 120.0  # at most so often full prefill is timed again, while the server is idle
MOST_OF_A_TOKEN = 64  # characters that no text has in a token on average
_COUNTED = 4096  # characters whose tokens are counted at a time
_CUT_TOKENS = 32  # that a cut through a text may add to it
Require = Callable[[], None]


class _GivenUpError(Exception):
    """What is measured when nobody waits is given up."""


class Prepared(NamedTuple):
    """A question whose prompt is put together. begun: when it came, by `time.monotonic`."""

    request: AnswerRequest
    room: TenantState
    work: Work
    cited: tuple[Cited, ...]
    begun: float

    @property
    def rag(self) -> Rag:
        """Of the corpus that its passages are of."""
        return self.room.rag(self.work.corpus)


class Put(NamedTuple):
    """A question put into a prompt, and its passages in order. corpus: whose chunks are among them."""

    layout: PromptLayout
    cited: list[Cited]
    corpus: str


class Service:
    """Answers questions of many tenants over one engine. Threads may share it.

    rag: the corpus without a name of nobody in particular; its decoder answers. engine: over that decoder. learn_budget: bytes
    of each tenant's store for caches of texts that came with questions; 0 learns nothing. full: nothing is ever blended.
    profile: of full prefill, which the engine keeps up to date.
    """

    def __init__(
        self,
        rag: Rag,
        engine: Engine,
        *,
        learn_budget: int = LEARN_BUDGET,
        full: bool = False,
        profile: Profile | None = None,
    ) -> None:
        self.engine, self.full = engine, full
        self.model, self.context_length = rag.decoder.name, rag.decoder.context_length
        self.created = int(time.time())
        self._rag, self._learn_budget = rag, learn_budget
        self._own = TenantState(rag, learn_budget)
        self._tenants: dict[str, TenantState] = {"": self._own}
        self._lock = threading.Lock()
        self._profile = profile or Profile(rag.decoder)
        self._documents: dict[tuple[str, str], Documents] = {}
        self._open, self.ready = True, False
        self._asked = self._calibrating = False
        self._closing = threading.Event()
        self._timing: Handle | None = None
        self._timer = threading.Thread(target=self._time_again, name="kvblend-timer", daemon=True)
        self._timer.start()
        self.learning = Learning(engine.encode, self._calibrate)

    def warm_up(self) -> None:
        """Make the first answer as fast as the others, and measure what full prefill takes."""
        rag = self._rag
        _ = rag.blender.encoder(rag.template.prefix).prefix
        if rag.index_dir.exists():
            _ = rag.embedder
        if self._profile.seconds(1) is None:
            self._profile.measure()
        if not self.full:
            for tenant, corpus in sorted(kept_corpora(rag.root)):
                self.documents(tenant, corpus)  # goes on with what an earlier process had taken in
        self.ready = True

    def tenant(self, tenant: str) -> TenantState:
        """What a tenant has. Raises `ConfigError` for what cannot name one."""
        with self._lock:
            if tenant not in self._tenants:
                rag = self._rag.sibling("", tenant_root(self._rag.root, tenant))
                self._tenants[tenant] = TenantState(rag, self._learn_budget, self._own.watch)
            return self._tenants[tenant]

    def require_store(self, tenant: str) -> None:
        """Raise `StoreError` where what a tenant has stored cannot be read now."""
        self.tenant(tenant).watch.require()

    @property
    def alive(self) -> bool:
        """Whether answers can still come: the engine runs."""
        return self.engine.alive

    @property
    def stores(self) -> list[ChunkStore]:
        """The server's, and those of tenants who have come, as far as they can be opened; may take a while."""
        with self._lock:
            rooms = list(self._tenants.values())
        found: list[ChunkStore] = []
        for room in rooms:
            with suppress(StoreError):
                found.append(room.rag().store)
        return found

    def corpora(self, tenant: str) -> tuple[str, ...]:
        """Names of a tenant's corpora; "" is the one without a name."""
        return self.tenant(tenant).corpora

    def begun(self, tenant: str) -> set[str]:
        """The same, with those that documents were taken in for and that have no index yet."""
        return {*self.corpora(tenant), *begun_corpora(tenant_root(self._rag.root, tenant))}

    def documents(self, tenant: str, corpus: str = "") -> Documents:
        """The documents of a tenant's corpus.

        Raises `ConfigError` for what cannot name one, `StoreError` while the store cannot be read.
        """
        self.require_store(tenant)
        room = self.tenant(tenant)
        rag = room.rag(corpus)
        with self._lock:
            if not self._open:
                raise QueueFullError(0, 1.0)
            if (tenant, corpus) not in self._documents:
                made = Documents(rag, self.engine.encode, calibrate=partial(self._calibrate_corpus, rag))
                self._documents[tenant, corpus] = made
                room.hide(corpus, lambda: made.leaving)
            return self._documents[tenant, corpus]

    def _calibrate_corpus(
        self, rag: Rag, chunks: Sequence[tuple[int, ...]], anew: bool, give_up: Callable[[], bool]
    ) -> bool:
        """The same for a corpus whose documents come and go: False where that was more urgent."""
        return self._calibrate(rag, chunks, anew, give_up) or not self._open

    def _calibrate(
        self,
        rag: Rag,
        chunks: Sequence[tuple[int, ...]],
        anew: bool = False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Measure the KV corrections at a time when nobody waits: each of their prompts has the model to itself.

        Whether that was done, and not given up because this is closed, or `give_up` says so.
        """

        def until_nobody_waits(*progress: object) -> None:
            while self._open and not give_up():
                if not any(self.engine.holding()[:2]):
                    return
                time.sleep(_LOOK_S)
            raise _GivenUpError

        self._calibrating = True
        try:
            until_nobody_waits()
            rag.blender.calibrate(rag.template.prefix, chunks, anew=anew, progress=until_nobody_waits)
            return True
        except _GivenUpError:
            return False
        finally:
            self._calibrating = False

    def _time_again(self) -> None:
        """Time full prefill again, as prompts get it, where questions came since the last time and the server is idle now."""
        while not self._closing.wait(TIMED_EVERY_S):
            holding = self.engine.holding()
            if not self._asked or self._calibrating or holding.running or holding.waiting or holding.encoding:
                continue
            self._asked = False
            work = Work(self._profile.sample, Sampling(max_tokens=1), full=True, cold=True, remember=False)
            with suppress(QueueFullError, EngineFailedError):
                self._timing = self.engine.submit(work, self._on_timed)

    def _on_timed(self, event: Event) -> None:
        if isinstance(event, Started):
            self._profile.timed(event.ttft_s - event.waited_s)

    def submit(
        self, request: AnswerRequest, on_reply: OnReply, begun: float | None = None, require: Require = lambda: None
    ) -> Handle:
        """Take a question in; its replies go to `on_reply`, from another thread, which must not wait in there.

        begun, require: see `prepare`. Raises as `prepare` does, and `QueueFullError` when too many wait.
        """
        self.engine.require_room(request.tenant)  # who is to come again later must not cost a search first
        return self.take(self.prepare(request, begun, require), on_reply)

    def prepare(self, request: AnswerRequest, begun: float | None = None, require: Require = lambda: None) -> Prepared:
        """Put a question into a prompt: takes as long as retrieval and tokenising do.

        begun: when it came, by `time.monotonic`; by default now. require: called between pieces of the work; raises where the
        question is to be given up. Raises `PromptError` and `ConfigError` for what cannot be answered, `RetrievalError` where
        there is nothing to retrieve from, `StoreError` where what it names cannot be read now.
        """
        begin = time.monotonic() if begun is None else begun
        room = self.tenant(request.tenant)
        reachable = room.watch.reachable()
        layout, cited, corpus = put(room, request, require)
        rag = room.rag(corpus)
        sampling = replace(request.sampling, max_tokens=_room_for(rag, layout, request.sampling.max_tokens))
        full = self.full or request.method == "full"
        work = Work(
            layout,
            sampling,
            tenant=request.tenant,
            corpus=corpus,
            full=full or not reachable,
            reason=ASKED_FOR if full else STORE_UNREACHABLE,
            cold=request.cold,
            remember=not self.full and reachable and room.learn(corpus, cited),
            begun=begin,
            priority=request.priority,
            deadline_s=request.deadline_s,
            trace=request.trace,
        )
        return Prepared(request, room, work, tuple(cited), begin)

    def take(self, prepared: Prepared, on_reply: OnReply) -> Handle:
        """Have a prompt answered; see `submit`."""
        request, room, work, cited, begin = prepared
        self._asked = True
        if self._timing is not None:
            self._timing.cancel()
        rag, before_s = prepared.rag, time.monotonic() - begin
        conversation = Conversation(
            rag, request, work.sampling, work.layout, cited, on_reply, self._profile, before_s, room.watch
        )
        if request.deadline_s is not None:
            work = replace(work, deadline_s=request.deadline_s - before_s)
        conversation.follow(self.engine.submit(work, conversation.on_event))
        if work.remember:
            self.learning.notice(room)
        return conversation

    def close(self, finish_s: float = 0.0) -> None:
        """Take nothing in any more, and let what runs finish if that takes no longer than this."""
        self.ready = False
        with self._lock:
            self._open = False
            documents = list(self._documents.values())
        self._closing.set()
        self._timer.join()
        self.engine.close(finish_s)
        self.learning.close()
        for one in documents:
            one.close()


def _require_length(room: TenantState, request: AnswerRequest, require: Require) -> None:
    """Refuse what cannot fit before it is cut into chunks, which takes far longer than counting its tokens."""
    longest = room.rag().decoder.context_length
    said = [request.prompt or "", *(message.content for message in request.messages)]
    said += [document.text for document in request.documents]
    characters = sum(map(len, said)) + sum(len(document.title) for document in request.documents)
    if longest is None or characters <= longest:
        return
    if characters > longest * MOST_OF_A_TOKEN:
        raise ContextLengthError(
            f"the prompt has {characters:,} characters, more than the {longest:,} tokens that the model reads can hold; "
            "shorten it",
            longest,
        )
    tokens = 0
    for text in said:
        for start in range(0, len(text), _COUNTED):
            require()
            words = " ".join(text[start : start + _COUNTED].split())  # a prompt need not keep all blanks of a document
            tokens += max(0, room.rag().template.count(words) - _CUT_TOKENS)
            require_length(tokens, longest)


def put(room: TenantState, request: AnswerRequest, require: Require = lambda: None) -> Put:
    """The prompt of a question. require: see `Service.prepare`."""
    _require_length(room, request, require)
    if request.prompt is not None:
        corpus, (turn,), cited = room.written(request.corpus or None, [Message("user", request.prompt)], bare=True)
        return Put(room.chat.continued(turn.content), cited, corpus)
    if not request.messages or request.messages[-1].role != "user" or not request.messages[-1].content.strip():
        raise PromptError("the last message must be the user's, and say something")
    arguments = DIRECT if request.template is None else request.template
    found = room.given(request.corpus, request.documents, require)
    if request.top_k is not None:
        given = {one.passage for one in found}
        asked = [message.content for message in request.messages if message.role == "user"]
        retrieved = room.retrieved(request.corpus, asked, request.top_k)
        found.extend(one for one in retrieved if one.passage not in given)
    require()
    if found:
        passages = [one.passage for one in found]
        instructions = room.rag(request.corpus).prompt_config.chat_instructions
        turns = question_turns(request.messages, passages, instructions)
        return Put(room.chat.layout(turns, arguments), found, request.corpus)
    corpus, turns, cited = room.written(request.corpus or None, request.messages)
    return Put(room.chat.layout(turns, arguments), cited, corpus)


def _room_for(rag: Rag, layout: PromptLayout, most: int) -> int:
    """Tokens that the answer may have: no more than the model's context leaves."""
    rag.decoder.check_length(layout.rows + 1)
    longest = rag.decoder.context_length
    return most if longest is None else min(most, longest - layout.rows)
