"""Questions in words to work for the engine, and its events to replies in words: everything about a server but the network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ContextLengthError, PromptError, StoreError
from blend.serve.chat import DIRECT, question_turns
from blend.serve.conversation import Conversation, OnReply
from blend.serve.documents import Documents
from blend.serve.engine import (
    ASKED_FOR,
    Engine,
    EngineFailedError,
    Event,
    Handle,
    QueueFullError,
    Sampling,
    Started,
    Work,
)
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.limits import LEARN_BUDGET
from blend.serve.profile import Profile
from blend.serve.request import AnswerRequest, Message
from blend.serve.tenant import Cited, Learning, TenantState, begun_corpora, kept_corpora, require_length, tenant_root

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.store import ChunkStore
    from blend.types import PromptLayout

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
