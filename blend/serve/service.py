"""The service: makes prompts for the engine out of requests, and adds text and sources to its events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from blend.errors import ContextLengthError, PromptError, StoreError
from blend.limits import json_text
from blend.model.decoder import full_prefill
from blend.model.outline import query_numbers
from blend.rag import NONE_RETRIEVED
from blend.serve.audit import Auditor, Promises, Verification, seeded
from blend.serve.documents import Documents
from blend.serve.failures import LOG, STORE_UNREACHABLE
from blend.serve.limits import LEARN_BUDGET
from blend.serve.sampling import GrammarCompiler
from blend.serve.tenant import StoreWatch, TenantState, begun_corpora, kept_corpora, require_length, tenant_root
from blend.serve.text import DIRECT, Detokenizer, StopTexts, question_turns, turn_of
from blend.serve.thoughts import ThoughtParser, markers_of, thinking_behind
from blend.serve.tool_calls import CallFormat, CallParser, format_of
from blend.serve.types import (
    ASKED_FOR,
    Audit,
    Cited,
    EngineFailedError,
    Event,
    FieldError,
    Finished,
    Message,
    OnEvent,
    Output,
    QueueFullError,
    Request,
    Sampling,
    Started,
    Token,
    ToolCall,
)
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.rag import Rag
    from blend.serve.scheduler import EmbeddedEngine
    from blend.store import ChunkStore

TIMED_EVERY_S = 120.0  # how often an idle server times full prefill again, at most
MOST_OF_A_TOKEN = 64  # characters: more than any text has per token on average
_LOOK_S = 0.5
_MOST_LATER = 64  # prompts that wait to be learned
_COUNTED = 4096  # characters tokenized at a time to count them
_CUT_TOKENS = 32  # tokens that a cut inside a text may add to its count
_PROFILED_ROWS = 256
_TIMINGS = 3  # the first warms up; other programs only make one slower
_MEASURED_PROMPTS = 1024
Require = Callable[[], None]
"""Called between pieces of work; raises if the request is to be given up."""


class _GivenUpError(Exception):
    """Idle-time work is given up."""


class Service:
    """Answers requests of many tenants over one engine. Threads may share it.

    Args:
        rag: the unnamed corpus of the unnamed tenant; its decoder answers.
        engine: the engine over that decoder.
        learn_budget: bytes of each tenant's store for caches of texts from requests; 0 learns nothing.
        full: never blend.
        profile: the estimate of full prefill.
        audit: share of blended answers to compare with full recompute in idle time.
        on_audit: called with the results.

    """

    def __init__(
        self,
        rag: Rag,
        engine: EmbeddedEngine,
        *,
        learn_budget: int = LEARN_BUDGET,
        full: bool = False,
        profile: PrefillProfile | None = None,
        audit: float = 0.0,
        on_audit: Callable[[Audit], None] = lambda audit: None,
    ) -> None:
        self.engine, self.full = engine, full
        self.model, self.context_length = rag.decoder.name, rag.decoder.context_length
        self.created = int(time.time())
        self._rag, self._learn_budget = rag, learn_budget
        self._own = TenantState(rag, learn_budget)
        self._tenants: dict[str, TenantState] = {"": self._own}
        template = getattr(rag.decoder.tokenizer, "chat_template", None)
        self._form, self._thoughts = format_of(template), markers_of(template)
        self._grammars = GrammarCompiler(rag.decoder, self._form)
        self._lock = threading.Lock()
        self._profile = profile or PrefillProfile(rag.decoder)
        self._documents: dict[tuple[str, str], Documents] = {}
        self._open, self.ready = True, False
        self._asked = self._calibrating = False
        self._closing = threading.Event()
        self._later: deque[Request] = deque(maxlen=_MOST_LATER)
        self._audits, self._promises, self._on_audit = Auditor(audit, self._audited), Promises(), on_audit
        self._in_idle_time: Request | None = None
        self._worker = threading.Thread(target=self._work_when_idle, name="kvblend-idle", daemon=True)
        self._worker.start()

    def warm_up(self) -> None:
        """Make the first answer as fast as the others, and time full prefill."""
        rag = self._rag
        _ = rag.blender.encoder(rag.template.prefix).prefix
        if rag.index_dir.exists():
            _ = rag.embedder
        if self._profile.seconds(1) is None:
            self._profile.measure()
        if not self.full:
            for tenant, corpus in sorted(kept_corpora(rag.root)):
                self.documents(tenant, corpus)  # continues the uploads of an earlier process
            self._own.read_corpora()
        self.ready = True

    def tenant(self, tenant: str) -> TenantState:
        """The state of a tenant. Raises `ConfigError` for an invalid name."""
        with self._lock:
            if tenant not in self._tenants:
                rag = self._rag.sibling("", tenant_root(self._rag.root, tenant))
                self._tenants[tenant] = TenantState(rag, self._learn_budget, self._own.watch)
            return self._tenants[tenant]

    def rag(self, request: Request) -> Rag:
        """The corpus that a prepared request's passages are from."""
        return self.tenant(request.tenant).rag(request.corpus)

    def require_store(self, tenant: str) -> None:
        """Raise `StoreError` if the tenant's store is unreachable."""
        self.tenant(tenant).watch.require()

    @property
    def stores(self) -> list[ChunkStore]:
        """The server's store and those of known tenants, if they can be opened; may take a while."""
        with self._lock:
            states = list(self._tenants.values())
        found: list[ChunkStore] = []
        for state in states:
            with suppress(StoreError):
                found.append(state.rag().store)
        return found

    def corpora(self, tenant: str) -> tuple[str, ...]:
        """Names of a tenant's corpora; "" is the unnamed one."""
        return self.tenant(tenant).corpora

    def begun(self, tenant: str) -> set[str]:
        """The same, with those that have accepted documents and no index yet."""
        return {*self.corpora(tenant), *begun_corpora(tenant_root(self._rag.root, tenant))}

    def documents(self, tenant: str, corpus: str = "") -> Documents:
        """The documents of a tenant's corpus.

        Raises `ConfigError` for an invalid name, `StoreError` while the store is unreachable.
        """
        self.require_store(tenant)
        state = self.tenant(tenant)
        rag = state.rag(corpus)
        with self._lock:
            if not self._open:
                raise QueueFullError(0, 1.0)
            if (tenant, corpus) not in self._documents:
                # A calibration that this server's end cut short is not tried again.
                made = Documents(
                    rag,
                    self.engine.encode,
                    calibrate=lambda *given: self._calibrate(rag, *given) or not self._open,
                    on_gone=state.forget,
                )
                self._documents[tenant, corpus] = made
                state.hide(corpus, lambda: made.leaving)
            return self._documents[tenant, corpus]

    def _calibrate(
        self,
        rag: Rag,
        chunks: Sequence[tuple[int, ...]],
        anew: bool = False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Measure the KV corrections while the engine is idle; False if given up, by `give_up` or because this is closed."""

        def until_idle(*progress: object) -> None:
            while self._open and not give_up():
                stats = self.engine.stats()
                if not (stats.running or stats.waiting):
                    return
                time.sleep(_LOOK_S)
            raise _GivenUpError

        self._calibrating = True
        try:
            until_idle()
            rag.blender.calibrate(rag.template.prefix, chunks, anew=anew, progress=until_idle)
            return True
        except _GivenUpError:
            return False
        finally:
            self._calibrating = False

    @property
    def to_learn(self) -> int:
        """How many prompts wait to be learned."""
        return len(self._later)

    def later(self, request: Request) -> None:
        """Prefill this prepared prompt in full when the engine is idle, to learn its text; a new request interrupts it."""
        learning = replace(request, method="full", reason=ASKED_FOR, cold=True, handover=None, deadline_s=None)
        self._later.append(replace(learning, sampling=Sampling(max_tokens=1), cancelled=threading.Event()))

    def _work_when_idle(self) -> None:
        """Learn prompts, audit answers, and time full prefill again if requests were answered since the last time."""
        due = time.monotonic() + TIMED_EVERY_S
        while not self._closing.wait(_LOOK_S):
            if self._calibrating or not self.engine.stats().idle:
                continue
            on_event: OnEvent = self._on_learned
            if self._later:
                request = self._later[0]
            elif audit := self._audits.next():
                request, on_event = audit
            elif self._asked and time.monotonic() >= due:
                self._asked, due = False, time.monotonic() + TIMED_EVERY_S
                sample, token = self._profile.sample, Sampling(max_tokens=1)
                request = Request(layout=sample, sampling=token, method="full", cold=True, remember=False)
                on_event = self._on_timed
            else:
                continue
            self._in_idle_time = request
            with suppress(QueueFullError, EngineFailedError, PromptError):  # the last: more KV than the engine holds
                self.engine.submit(request, on_event)
            if on_event == self._on_learned:
                self._later.popleft()

    def _on_learned(self, event: Event) -> None:
        if event == Finished("cancelled") and self._in_idle_time is not None:
            self.later(self._in_idle_time)

    def _audited(self, audit: Audit) -> None:
        """Let the corpus's estimates follow its audits."""
        if audit.quality is not None and (expected := audit.quality["kl"]):
            self.tenant(audit.tenant).rag(audit.corpus).blender.calibrations.drift.add(expected, audit.kl)
        self._on_audit(self._promises.judged(audit))

    def _on_timed(self, event: Event) -> None:
        if isinstance(event, Started):
            figures = event.figures
            self._profile.timed(figures.ttft_s - figures.waited_s - figures.stages["prepare"])

    def submit(self, request: Request, on_event: OnEvent, require: Require = lambda: None) -> None:
        """Accept a request; its events go to `on_event`, from another thread.

        Raises as `prepare` does, and `QueueFullError` when too many wait.
        """
        self.engine.require_room(request.tenant)  # before the search, which would be in vain
        self.take(self.prepare(request, require), on_event)

    def prepare(self, request: Request, require: Require = lambda: None) -> Request:
        """Retrieve, tokenize, and return the request with its prompt.

        Raises `PromptError` and `ConfigError` for requests that cannot be answered, `RetrievalError` if there is nothing to
        retrieve from, `StoreError` if a corpus or document that it names cannot be read now.
        """
        state = self.tenant(request.tenant)
        reachable = state.watch.reachable()
        request = build_prompt(state, request, require)
        decoder, full = state.rag().decoder, self.full or request.method == "full"
        max_tokens = decoder.answer_length(request.layout.rows, request.sampling.max_tokens)
        markers = self._thoughts if request.prompt is None else None
        thinking = thinking_behind(decoder.tokenizer, markers, request.layout.token_ids)
        brought = any(one.brought for one in request.cited)
        remember = not self.full and reachable and not (brought and state.learned is None)
        return replace(
            request,
            sampling=replace(request.sampling, max_tokens=max_tokens),
            method="full" if full or not reachable else "blend",
            reason=ASKED_FOR if full else STORE_UNREACHABLE,
            thinking=thinking,
            grammar=self._grammars.compile(request.schema, request.tools, thinking),
            remember=remember,
            config=request.config
            if request.quality is None
            else replace(state.rag().blend_config, quality=request.quality),
            learn=partial(state.keep, begun=request.arrived) if remember and (brought or request.asked) else None,
        )

    def take(self, request: Request, on_event: OnEvent) -> None:
        """Hand a prepared request to the engine; see `submit`."""
        self._asked = True
        if self._in_idle_time is not None:
            self._in_idle_time.cancelled.set()
        if request.verify or self._audits.share:
            request = seeded(request)
        if request.verify:
            on_event = Verification(self._take, request, on_event).on_event
        self._take(request, self._audits.watched(request, on_event))

    def _take(self, request: Request, on_event: OnEvent) -> None:
        state = self.tenant(request.tenant)
        processor = OutputProcessor(
            state.rag(request.corpus), request, on_event, self._profile, state.watch, self._form
        )
        self.engine.submit(request, processor.on_event)

    def close(self, finish_s: float = 0.0) -> None:
        """Accept nothing more, and let running answers finish within `finish_s`."""
        self.ready = False
        with self._lock:
            self._open = False
            documents = list(self._documents.values())
        self._closing.set()
        self._worker.join()
        if self._in_idle_time is not None:
            self._in_idle_time.cancelled.set()
        self.engine.close(finish_s)
        for one in documents:
            one.close()


def build_prompt(state: TenantState, request: Request, require: Require = lambda: None) -> Request:
    """The request with layout, passages and corpus. Raises as `Service.prepare` does."""
    _require_length(state, request, require)
    if isinstance(request.prompt, tuple):
        return _with_reuse(state, request, _given_tokens(state, request.prompt), ())
    if request.prompt is not None:
        return _with_reuse(state, request, state.chat.continued((request.prompt,)), ())
    _require_question(state, request)
    arguments = DIRECT if request.template is None else request.template
    if request.tools is not None:
        arguments = {**arguments, "tools": [one.described for one in request.tools.functions]}
    cited = state.given(request.corpus, request.documents, require)
    if request.top_k is not None:
        given = {one.place for one in cited}
        questions = [message.content for message in request.messages if message.role == "user"]
        if not questions:
            raise PromptError(
                "there is no message of the user's to search the corpus with; add one, or leave out retrieve"
            )
        retrieved = state.retrieved(request.corpus, questions, request.top_k)
        cited.extend(one for one in retrieved if one.place not in given)
    require()
    if cited:
        instructions = state.rag(request.corpus).prompt_config.chat_instructions
        turns = question_turns(request.messages, [one.place for one in cited], instructions)
    else:
        turns = list(map(turn_of, request.messages))
    return _with_reuse(state, request, state.chat.layout(turns, arguments), cited)


def _with_reuse(state: TenantState, request: Request, layout: PromptLayout, cited: Sequence[Cited]) -> Request:
    """The request with its prompt, in which all known text is found."""
    chosen = request.corpus or any(not one.brought for one in cited)
    found = state.reuse(request.corpus if chosen else None, layout, cited)
    return replace(request, layout=found.layout, cited=found.cited, corpus=found.corpus, asked=found.asked)


def _given_tokens(state: TenantState, ids: tuple[int, ...]) -> PromptLayout:
    """The prompt of token ids, which may be control tokens. Raises `PromptError` and `FieldError`."""
    most = state.rag().decoder.vocabulary
    if (wrong := max(ids)) >= most:
        raise FieldError(f"prompt: there is no token {wrong:,}; give ids from 0 to {most - 1:,}", "prompt")
    return state.chat.plain(ids)


def _require_question(state: TenantState, request: Request) -> None:
    """Refuse conversations that ask nothing, and tools that the model would never see."""
    last = request.messages[-1] if request.messages else Message("user", "")
    if last.role == "assistant" or (last.role != "tool" and not last.content.strip()):
        raise PromptError("the last message must say something, and not be the assistant's")
    with_calls = any(one.role == "tool" or one.tool_calls for one in request.messages)
    if (request.tools is not None or with_calls) and not state.chat.takes_tools:
        field = "messages" if request.tools is None else "tools"
        raise FieldError(
            f"{field}: the model's chat template has no place for tools; ask without, or serve another", field
        )


def _require_length(state: TenantState, request: Request, require: Require) -> None:
    """Refuse what cannot fit before it is cut into chunks, which takes far longer than counting its tokens."""
    longest = state.rag().decoder.context_length
    texts = [
        request.prompt if isinstance(request.prompt, str) else "",
        *(message.content for message in request.messages),
    ]
    texts += [document.text for document in request.documents]
    texts += [json_text(one.described) for one in request.tools.functions] if request.tools is not None else []
    texts += [call.arguments for message in request.messages for call in message.tool_calls]
    texts += [message.thoughts for message in request.messages]
    characters = sum(map(len, texts)) + sum(len(document.title) for document in request.documents)
    if longest is None or characters <= longest:
        return
    if characters > longest * MOST_OF_A_TOKEN:
        raise ContextLengthError(
            f"the prompt has {characters:,} characters, more than the {longest:,} tokens that the model reads can hold; "
            "shorten it",
            longest,
        )
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _COUNTED):
            require()
            words = " ".join(text[start : start + _COUNTED].split())  # blanks of a document may not reach the prompt
            tokens += max(0, state.rag().template.count(words) - _CUT_TOKENS)
            require_length(tokens, longest)


class OutputProcessor:
    """Adds text and sources to the events of one request."""

    def __init__(
        self,
        rag: Rag,
        request: Request,
        on_event: OnEvent,
        profile: PrefillProfile,
        watch: StoreWatch,
        form: CallFormat,
    ) -> None:
        self._tokenizer, self._request, self._send = rag.decoder.tokenizer, request, on_event
        self._profile, self._watch = profile, watch
        answers = range(request.sampling.n)
        self._going = {index: AnswerText(self._tokenizer, request, form, index, on_event) for index in answers}

    def on_event(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, Started):
            self._send(self._started(event))
        elif isinstance(event, Output):
            for token in event.tokens:
                self._going[event.answer].add(token)
        else:
            if isinstance(event, Finished):
                for index in list(self._going) if event.last else [event.answer]:
                    self._going.pop(index).finish()
            self._send(event)

    def _started(self, started: Started) -> Started:
        request, figures = self._request, started.figures
        if figures.reason == STORE_UNREACHABLE:
            self._watch.lost("it could be read when a question came, and not when its caches were loaded")
        for line in started.problems:
            LOG.warning("damaged", extra={"why": line})
        sources = tuple(one.source(hit=hit) for one, hit in zip(request.cited, started.hits, strict=True))
        prompt = hash((request.tenant, request.layout.token_ids))
        if request.cold and figures.rows_computed == figures.rows and request.handover is None:
            self._profile.took(prompt, figures.ttft_s - figures.waited_s)
        measured = self._profile.measured(prompt)
        retrieved = any(one.kind in ("retrieved", "document") for one in request.cited)
        notes = (NONE_RETRIEVED,) if request.top_k is not None and not retrieved else ()
        figures = figures._replace(
            full_estimated_s=self._profile.seconds(figures.rows) if measured is None else None,
            full_measured_s=measured,
            notes=(*figures.notes, *notes),
        )
        texts = self._tokenizer.batch_decode([[token] for token in request.layout.token_ids]) if started.trace else ()
        trace = tuple(row._replace(text=text) for row, text in zip(started.trace, texts, strict=True))
        return started._replace(figures=figures, sources=sources, trace=trace)


class AnswerText:
    """Adds text to the tokens of one answer, and reads thoughts and calls of functions. index: among the request's answers."""

    def __init__(self, tokenizer: Any, request: Request, form: CallFormat, index: int, send: OnEvent) -> None:
        self._request, self._index, self._send = request, index, send
        tools, thinking = request.tools, request.thinking
        shown = (*(form.markers if tools is not None else ()), *(thinking.markers if thinking is not None else ()))
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._thoughts, self._stop = ThoughtParser(thinking), StopTexts(request.stop)
        names = [one.name for one in tools.functions] if tools is not None else []
        self._calls = (
            CallParser(form, names, parallel=tools.parallel, required=bool(tools.required))
            if tools is not None
            else None
        )
        self._held: list[Token] = []  # until their text is certain

    def add(self, token: Token) -> None:
        """The next token."""
        spelled = self._request.sampling.logprobs is not None
        self._held.append(self._detokenizer.spelled(token) if spelled else token)
        if text := self._detokenizer.add(token.id):
            text = self._without_thoughts(*self._thoughts.add(text))
            if text := self._stop.add(text):
                for piece in self._calls.add(text) if self._calls is not None else [text]:
                    self._output(piece)
        if self._stop.ended or (self._calls is not None and self._calls.ended):
            self._request.stopped.add(self._index)

    def finish(self) -> None:
        """Send what is still held; no token follows."""
        text = self._without_thoughts(*self._thoughts.add(self._detokenizer.finish()))
        text += self._without_thoughts(*self._thoughts.finish())
        text = self._stop.add(text) + self._stop.finish()
        pieces: list[str | ToolCall] = [text] if text else []
        if self._calls is not None:
            pieces = [*self._calls.add(text), *self._calls.finish()]
        for piece in pieces or ([""] if self._held else []):
            self._output(piece)

    def _without_thoughts(self, thoughts: str, text: str) -> str:
        """Send the thoughts, with the tokens that belong to them; return the text."""
        if thoughts or (self._thoughts.inside and self._held):
            self._send(Output(tuple(self._held), thoughts, (), self._index, thoughts=True))
            self._held = []
        return text

    def _output(self, piece: str | ToolCall) -> None:
        tokens, self._held = tuple(self._held), []
        text, calls = (piece, ()) if isinstance(piece, str) else ("", (piece,))
        self._send(Output(tokens, text, calls, self._index))


class PrefillProfile:
    """Estimates what full prefill takes by prompt length: operations, at the measured rate. Threads may share it.

    A row takes 2 operations a parameter, and its attention 4 for each key, query head and head dimension in every layer.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._lock = decoder, threading.Lock()
        weights = sum(part.numel() for layer in decoder.layers for part in layer.parameters())
        self._of_row, self._of_pair = 2.0 * weights, 4.0 * query_numbers(decoder.config) * len(decoder.layers)
        self._rate: float | None = None
        self._prompts: LRUCache[int, float] = LRUCache(_MEASURED_PROMPTS)
        token = 1 % decoder.vocabulary
        rows = min(_PROFILED_ROWS, (decoder.context_length or _PROFILED_ROWS) - 1)
        self.sample = PromptLayout((token,), (), (token,) * (rows - 1))
        """The prompt that is timed; an answer of one token fits behind it."""

    def measure(self) -> None:
        """Time full prefill now; nothing else may be computed meanwhile."""
        self.timed(min(full_prefill(self._decoder, self.sample).ttft_s for _ in range(_TIMINGS)))

    def timed(self, seconds: float) -> None:
        """Full prefill of the `sample` took so long; this replaces earlier timings."""
        self._rate = self._operations(self.sample.rows) / max(seconds, 1e-9)

    def took(self, prompt: int, seconds: float) -> None:
        """Full prefill of this prompt, named by a hash, took so long."""
        with self._lock:
            self._prompts[prompt] = seconds

    def measured(self, prompt: int) -> float | None:
        """Seconds of its last full prefill; None if unknown."""
        with self._lock:
            return self._prompts.get(prompt)

    def seconds(self, rows: int) -> float | None:
        """The estimate for a prompt of so many rows; None while nothing was measured."""
        return None if self._rate is None else self._operations(rows) / self._rate

    def _operations(self, rows: int) -> float:
        return rows * self._of_row + rows * (rows + 1) // 2 * self._of_pair
